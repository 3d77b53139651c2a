--! uses records tasks
-- Reads tasks of a tenant in the order of adding, and returns those that match a filter.
-- args: tenant, filter, after, before (exclusive limits of the numbers of tasks), whether the
-- oldest come first, maximum number of tasks to read, maximum number of tasks to return, maximum
-- number of bytes to return, what to return: 'tasks' (see `emit_task`), 'attempts' (with the last
-- attempt of each task in front, or an empty string), 'count' or 'ids'.
--
-- The filter is a map with the fields of `TaskFilter` that are set. `key_id` is the key as an id.
--
-- Returns: number of tasks read, number of matching tasks, number of the last task read, whether
-- all tasks were read (1 or 0), and what was requested.

local tenant, filter, after, before = args[1], args[2], args[3], args[4]
local oldest_first, max_read, max_found = args[5], args[6], args[7]
local max_bytes, mode = args[8], args[9]
local CLOCK_STEP_TOLERANCE_MS = 60000 -- the order of adding is that of `created_at`, but for this
local PAGE_SIZE = 100

-- Returns the first rank whose task was created at `time` or later, found by bisection.
local function rank_created_at(key, time)
    local low, high = 0, call('ZCARD', key)
    while low < high do
        local middle = math.floor((low + high) / 2)
        local state, rank = nil, middle
        while not state and rank < high do -- skips tasks whose state is missing
            state = load_state(call('ZRANGE', key, rank, rank)[1])
            rank = rank + 1
        end
        if not state or state.c >= time then high = middle else low = rank end
    end
    return low
end

local function number_at(key, rank)
    return tonumber(call('ZRANGE', key, rank, rank, 'WITHSCORES')[2])
end

local keys = {}
local is_live = filter.is_live or filter.status == PENDING or filter.status == IN_FLIGHT
if is_live then
    keys[1] = list_key(tenant, PENDING)
elseif filter.status then
    keys[1] = list_key(tenant, filter.status)
else
    for _, status in ipairs({PENDING, SUCCEEDED, EXHAUSTED, CANCELLED}) do
        keys[#keys + 1] = list_key(tenant, status)
    end
end

-- Returns a function that yields the numbers and ids of a list within the limits.
local function read_list(key)
    local low, high = after, before
    if filter.created_from then
        local rank = rank_created_at(key, filter.created_from - CLOCK_STEP_TOLERANCE_MS)
        low = math.max(low, (number_at(key, rank) or before) - 1)
    end
    if filter.created_until then
        local rank = rank_created_at(key, filter.created_until + CLOCK_STEP_TOLERANCE_MS + 1)
        high = math.min(high, number_at(key, rank) or before)
    end
    local page, index = nil, 1
    return function()
        if not page or (index > #page and #page == 2 * PAGE_SIZE) then
            local first, last = string.format('(%.0f', low), string.format('(%.0f', high)
            if oldest_first then
                page = call('ZRANGEBYSCORE', key, first, last, 'WITHSCORES', 'LIMIT', 0, PAGE_SIZE)
            else
                page = call('ZREVRANGEBYSCORE', key, last, first, 'WITHSCORES', 'LIMIT', 0,
                            PAGE_SIZE)
            end
            index = 1
        end
        local id, number = page[index], tonumber(page[index + 1])
        index = index + 2
        if number then
            if oldest_first then low = number else high = number end
        end
        return number, id
    end
end

-- Merges the lists by number.
local heads = {}
for position, key in ipairs(keys) do
    local next_task = read_list(key)
    local number, id = next_task()
    heads[position] = {number = number, id = id, next_task = next_task}
end

local function next_task()
    local best
    for _, head in ipairs(heads) do
        if head.number and (not best or (head.number < best.number) == oldest_first) then
            best = head
        end
    end
    if not best then return nil end
    local number, id = best.number, best.id
    best.number, best.id = best.next_task()
    return number, id
end

local function is_within(time, first, last)
    if not time then return not first and not last end
    return (not first or first <= time) and (not last or time <= last)
end

local lane_matches = {} -- by id of a lane
local function matches_lane(id)
    if lane_matches[id] == nil then
        local name = load_lane(id).name
        local prefix = filter.lane_prefix
        lane_matches[id] = (not filter.lane or name == filter.lane)
            and (not prefix or string.sub(name, 1, #prefix) == prefix)
    end
    return lane_matches[id]
end

local function matches(state)
    return (not filter.status or state.s == filter.status)
        and (not filter.is_live or state.s <= IN_FLIGHT)
        and (not filter.reason or state.r == filter.reason)
        and is_within(state.c, filter.created_from, filter.created_until)
        and is_within(state.e, filter.finished_from, filter.finished_until)
        and (not (filter.lane or filter.lane_prefix) or matches_lane(state.l))
        and (not filter.policy_id or load_use(state.p).policy == filter.policy_id)
end

if filter.key then
    -- At most one task has the key, so no list is read.
    local id, state = find_by_key(tenant, filter.key, filter.key_id)
    local is_in_range = state and state.n > after and state.n < before
    heads = {{number = is_in_range and state.n or nil, id = id, next_task = function() end}}
end

local reply, read_count, found_count, bytes, last_number, is_complete = {}, 0, 0, 0, 0, 1
while true do
    if read_count >= max_read or found_count >= max_found or bytes >= max_bytes then
        is_complete = 0
        break
    end
    local number, id = next_task()
    if not number then break end
    read_count, last_number = read_count + 1, number
    local state = load_state(id)
    if state and matches(state) then
        if mode == 'ids' then
            found_count = found_count + 1
            reply[#reply + 1] = id
            reply[#reply + 1] = number
        elseif mode == 'count' then
            found_count = found_count + 1
        else
            local last_attempt = ''
            if mode == 'attempts' then
                last_attempt = call('LINDEX', base .. 'log:' .. id, -1) or ''
                reply[#reply + 1] = last_attempt
            end
            if emit_task(reply, id, state) then
                found_count = found_count + 1
                bytes = bytes + #last_attempt + #reply[#reply - 2]
            elseif mode == 'attempts' then
                reply[#reply] = nil
            end
        end
    end
end
return {read_count, found_count, last_number, is_complete, reply}
