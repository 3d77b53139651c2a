--! uses records tasks
-- Reads tasks of a tenant in the order of adding, and returns those that match a filter.
--
-- args:    tenant
--          filter: map with the fields of `StoredTaskFilter` that are set, except its functions;
--            `key_id` is the key as an id
--          after, before    limits of the numbers of tasks, both exclusive
--          whether the oldest come first
--          maximum number of tasks to read, of tasks to return, and of bytes to return
--          what to return: 'tasks' (see `append_task`), 'attempts' (tasks, and in front of each its
--            last attempt, or an empty string), 'ids' (pairs of id and number) or 'count'
-- reply:   number of tasks read
--          number of matching tasks
--          number of the last task read, in the order of adding
--          whether all tasks were read (1 or 0)
--          what was requested; empty for 'count'

local tenant_name, filter, after, before, oldest_first = unpack(args, 1, 5)
local max_read, max_found, max_bytes, mode = unpack(args, 6, 9)
local CLOCK_STEP_TOLERANCE_MS = 60000 -- the order of adding is that of creation, but for this
local PAGE_SIZE = 100

-- Returns the keys of the lists that have tasks which may match.
local function find_lists()
    local is_live = filter.is_live or filter.status == PENDING or filter.status == IN_FLIGHT
    if is_live then return {list_key(tenant_name, PENDING)} end
    if filter.status then return {list_key(tenant_name, filter.status)} end
    local keys = {}
    for _, status in ipairs({PENDING, SUCCEEDED, EXHAUSTED, CANCELLED}) do
        keys[#keys + 1] = list_key(tenant_name, status)
    end
    return keys
end

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

-- Returns a function that returns number and id of the next task of a list, within the limits.
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
    local function read_page()
        local first, last = string.format('(%.0f', low), string.format('(%.0f', high)
        if oldest_first then
            return call('ZRANGEBYSCORE', key, first, last, 'WITHSCORES', 'LIMIT', 0, PAGE_SIZE)
        end
        return call('ZREVRANGEBYSCORE', key, last, first, 'WITHSCORES', 'LIMIT', 0, PAGE_SIZE)
    end
    return function()
        local is_page_full = page and #page == 2 * PAGE_SIZE
        if not page or (index > #page and is_page_full) then
            page, index = read_page(), 1
        end
        local id, number = page[index], tonumber(page[index + 1])
        index = index + 2
        if number then
            if oldest_first then low = number else high = number end
        end
        return number, id
    end
end

-- Returns a function that returns number and id of the next task of all lists: their next tasks
-- are compared by number.
local function merge_lists(keys)
    local heads = {}
    for position, key in ipairs(keys) do
        local next_of_list = read_list(key)
        local number, id = next_of_list()
        heads[position] = {number = number, id = id, next_of_list = next_of_list}
    end
    return function()
        local best
        for _, head in ipairs(heads) do
            if head.number and (not best or (head.number < best.number) == oldest_first) then
                best = head
            end
        end
        if not best then return nil end
        local number, id = best.number, best.id
        best.number, best.id = best.next_of_list()
        return number, id
    end
end

-- Returns a function that returns number and id of the only task with the key of the filter.
local function read_task_with_key()
    local id, state = find_by_key(tenant_name, filter.key, filter.key_id)
    local is_in_range = state and state.n > after and state.n < before
    local number = is_in_range and state.n or nil
    return function()
        local next_number = number
        number = nil
        return next_number, id
    end
end

local function is_within(time, first, last)
    if not time then return not first and not last end
    return (not first or first <= time) and (not last or time <= last)
end

local is_matching_lane = {} -- by id
local function matches_lane(id)
    if is_matching_lane[id] == nil then
        local name = load_lane(id).name
        local prefix = filter.lane_prefix
        is_matching_lane[id] = (not filter.lane or name == filter.lane)
            and (not prefix or string.sub(name, 1, #prefix) == prefix)
    end
    return is_matching_lane[id]
end

local function matches(state)
    return (not filter.status or state.s == filter.status)
        and (not filter.is_live or state.s <= IN_FLIGHT)
        and (not filter.reason or state.r == filter.reason)
        and is_within(state.c, filter.created_from, filter.created_until)
        and is_within(state.e, filter.finished_from, filter.finished_until)
        and (not (filter.lane or filter.lane_prefix) or matches_lane(state.l))
        and (not filter.policy_id or load_policy_use(state.p).policy == filter.policy_id)
end

local found, found_count, bytes = {}, 0, 0

local function append_found_task(number, id, state)
    if mode == 'ids' then
        found[#found + 1] = id
        found[#found + 1] = number
    elseif mode ~= 'count' then
        local last_attempt = ''
        if mode == 'attempts' then
            last_attempt = call('LINDEX', base .. 'log:' .. id, -1) or ''
            found[#found + 1] = last_attempt
        end
        if not append_task(found, id, state) then
            if mode == 'attempts' then found[#found] = nil end
            return
        end
        bytes = bytes + #last_attempt + #found[#found - 2]
    end
    found_count = found_count + 1
end

local next_task = filter.key and read_task_with_key() or merge_lists(find_lists())
local read_count, last_number, is_complete = 0, 0, 1
while true do
    if read_count >= max_read or found_count >= max_found or bytes >= max_bytes then
        is_complete = 0
        break
    end
    local number, id = next_task()
    if not number then break end
    read_count, last_number = read_count + 1, number
    local state = load_state(id)
    if state and matches(state) then append_found_task(number, id, state) end
end
return {read_count, found_count, last_number, is_complete, found}
