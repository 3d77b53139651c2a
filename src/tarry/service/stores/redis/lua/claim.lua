--! uses records tasks lost_tasks
-- Leases tasks.
--
-- args:   worker, length_ms, horizon_ms   terms of the leases
--         limit, per_lane                 maximum number of tasks, and of tasks of each lane
--         lane_limits                     map: the name of a lane -> a lower limit; the name of a
--                                         tenant -> 0: its lanes are skipped
-- reply:  now
--         time of the next claim that may find a task (-1: none)
--         number of tasks that count towards the limit
--         number of lost attempts
--         leased tasks, see `append_task`
--         tasks whose leases were renewed, likewise
--         name and number of consecutive opens of each half-open lane of the leased tasks
--
-- Tenants take turns, and of each tenant the least recently served lane comes first. A claim first
-- makes lanes ready whose check time has come. A lane from which tasks were leased moves to the
-- end of the rotation. A lane from which no more tasks can be leased now is put to sleep. So the
-- cost of a claim grows with the number of returned tasks, not with the number of waiting tasks.

local worker, length_ms, horizon_ms, limit, per_lane, lane_limits = unpack(args, 1, 6)
local horizon_end = now + horizon_ms
local PAGE_SIZE = 16 -- ready tenants or lanes that are read at a time
local MAX_TENANTS_WOKEN = 1000
local MAX_NAMES_READ = 1000 -- at a time; Lua limits the number of arguments
-- To wake a lane takes about 30 us, in which Redis is blocked: a tenant may have 100,000 lanes. A
-- round wakes about as many as the claim needs; a claim has several rounds if lanes are skipped.
local lanes_woken_per_round = 2 * limit + 64
local max_lanes_woken_per_claim = lanes_woken_per_round + 1000
local woken_count = 0

local leased, renewed, names_and_opens = {}, {}, {}
local lost_count, remaining = 0, limit
local visited_lanes, is_visited = {}, {} -- in the order of the visits, and by id
local turn = tonumber(call('HGET', base .. 'meta', 'turn') or nil)
if not turn then -- the first claim, or `meta` was lost
    turn = tonumber(call('ZREVRANGE', base .. 'ready_tenants', 0, 0, 'WITHSCORES')[2] or 0)
end
local first_turn = turn
local turns_of_tenants = {} -- the last turn of each served tenant, by name

-- Makes lanes ready whose check time has come, in one round; returns whether there were any.
local function wake_lanes()
    local has_woken = false
    for key_prefix, until_time in pairs({due = horizon_end, expiry = now}) do
        local tenant_names = call('ZRANGEBYSCORE', base .. key_prefix .. '_tenants', '-inf',
                                  until_time, 'LIMIT', 0, MAX_TENANTS_WOKEN)
        local share = math.max(8, math.ceil(lanes_woken_per_round / math.max(1, #tenant_names)))
        for _, tenant_name in ipairs(tenant_names) do
            local ids = call('ZRANGEBYSCORE', base .. key_prefix .. ':' .. tenant_name, '-inf',
                             until_time, 'LIMIT', 0, share)
            woken_count = woken_count + #ids
            for _, id in ipairs(ids) do
                add_to_rotation(load_lane(tonumber(id)))
                has_woken = true
            end
            update_tenant_checks(tenant_name)
        end
    end
    return has_woken
end

-- Returns a function that returns the next member of a sorted set, which is read in pages. The set
-- must not change meanwhile.
local function read_pages(key)
    local position, page = 0, {}
    return function()
        local index = position % PAGE_SIZE + 1
        if index == 1 then
            page = call('ZRANGE', key, position, position + PAGE_SIZE - 1)
        end
        position = position + 1
        return page[index]
    end
end

-- Returns the ids of lanes with a limit of 0: they are skipped without reading their records.
local function find_skipped_lanes()
    local is_skipped, names = {}, {}
    local function look_up_names()
        for _, id in ipairs(call('HMGET', base .. 'lane_ids', unpack(names))) do
            if id then is_skipped[tonumber(id)] = true end
        end
        names = {}
    end
    for name, lane_limit in pairs(lane_limits) do
        if lane_limit == 0 then names[#names + 1] = name end
        if #names == MAX_NAMES_READ then look_up_names() end
    end
    if #names > 0 then look_up_names() end
    return is_skipped
end

local is_skipped = find_skipped_lanes()

-- Returns the next ready lane of a tenant that has not been visited and has no limit of 0, or nil.
local function next_lane(next_lane_id)
    while true do
        local id = tonumber(next_lane_id())
        if not id then return nil end
        if not is_visited[id] and not is_skipped[id] then return load_lane(id) end
    end
end

local function count_running_probes(lane)
    return call('ZCOUNT', base .. 'leased:' .. lane.id, '(' .. now, '+inf')
end

-- Returns up to `count` members of a queue with a time up to `until_time`.
local function first_members(queue, lane, until_time, count)
    return call('ZRANGEBYSCORE', base .. queue .. ':' .. lane.id, '-inf', until_time,
                'LIMIT', 0, count)
end

-- Appends up to `count` members to a list, beginning with the one at `from_index` (nil: the first).
local function append(list, members, count, from_index)
    from_index = from_index or 1
    for index = from_index, math.min(#members, from_index + count - 1) do
        list[#list + 1] = members[index]
    end
end

-- Returns a third of a number. `now % 3` sometimes rounds up, so that a third of 1 is not always 0.
local function third_of(number)
    return math.floor((number + now % 3) / 3)
end

-- Returns up to `free` members of a lane whose parking has ended, in the order of `Store.claim`: a
-- third are first attempts, then come the due retries, the other first attempts, the expired
-- leases, the retries that are due within the horizon, and at last the task of the last probe. The
-- last of them becomes the last probe.
local function choose_probes(lane, free)
    local expired = first_members('leased', lane, now, free)
    local first = first_members('first', lane, horizon_end, free)
    -- Reads one more, because the task of the last probe is used only if there is no other.
    local retries = first_members('retry', lane, horizon_end, free + 1)
    local due_count = #first_members('retry', lane, now, free + 1)
    -- The retries: those that are due, those within the horizon, and the task of the last probe.
    local due, early, last_probe = {}, {}, {}
    for index, member in ipairs(retries) do
        if number_of_member(member) == lane.last_probe then
            last_probe[1] = member
        else
            append(index <= due_count and due or early, {member}, 1)
        end
    end
    local chosen, first_count = {}, third_of(free)
    append(chosen, first, first_count)
    append(chosen, due, free - #chosen)
    append(chosen, first, free - #chosen, first_count + 1)
    append(chosen, expired, free - #chosen)
    append(chosen, early, free - #chosen)
    append(chosen, last_probe, free - #chosen)
    if #chosen > 0 then
        lane.last_probe = number_of_member(chosen[#chosen])
    end
    return chosen
end

-- Returns up to `lane_limit` members of tasks of a lane that may be leased, in order.
local function choose_members(lane, lane_limit)
    if lane.parked_until then
        if lane.parked_until > now then return {} end
        local free = math.min(lane_limit, lane.probes - count_running_probes(lane))
        return free > 0 and choose_probes(lane, free) or {}
    end
    if lane_limit <= 0 then return {} end
    local expired = first_members('leased', lane, now, lane_limit)
    local first = first_members('first', lane, horizon_end, lane_limit)
    local retries = first_members('retry', lane, horizon_end, lane_limit)
    local chosen = {}
    append(chosen, expired, lane_limit)
    local left = lane_limit - #chosen
    -- A third of the tasks are retries, or more if there are too few first attempts.
    local retry_count = math.min(math.max(third_of(left), left - #first), #retries)
    append(chosen, first, left - retry_count)
    append(chosen, retries, retry_count)
    return chosen
end

-- Leases the task of a member of a queue of a lane, or ends it. Fields of a state: see tasks.lua.
local function lease_member(lane, member)
    local id = id_of_member(member)
    local state = load_state(id)
    local packed_task = call('GET', base .. 'task:' .. id)
    if not state or not packed_task or state.n ~= number_of_member(member)
        or state.l ~= lane.id then
        remove_damaged_task(lane, member, state, packed_task)
        return
    end
    local old_status = state.s
    if old_status == IN_FLIGHT and state.h == worker then
        -- The worker is alive: the lease is renewed, and the version stays the same. `lease_task`
        -- adds 1 to the version (`i`): undo that here.
        state.i = state.i - 1
        local packed_state = lease_task(id, state, worker, length_ms, old_status)
        append_task(renewed, id, state, packed_state, packed_task)
        return
    end
    if old_status == IN_FLIGHT then
        lost_count = lost_count + 1
        log_lost_attempt(id, state)
        if state.z then
            end_task(id, state, CANCELLED)
            return
        end
        state.x = (state.x or 0) + 1 -- lost attempts
        state.d = state.w -- the next attempt was due when the lease expired
    else
        call('ZREM', queue_key(state), member)
    end
    local packed_state = lease_task(id, state, worker, length_ms, old_status)
    append_task(leased, id, state, packed_state, packed_task)
end

local function claim_from_lane(lane)
    visited_lanes[#visited_lanes + 1], is_visited[lane.id] = lane, true
    change_lane(lane)
    local lane_limit = math.min(remaining, per_lane, lane_limits[lane.name] or per_lane)
    local members = choose_members(lane, lane_limit)
    if #members == 0 then return end
    local leased_before = #leased
    for _, member in ipairs(members) do
        lease_member(lane, member)
    end
    remaining = remaining - #members
    turn = turn + 1
    lane.turn, lane.last_claim_at = turn, now
    change_tenant(lane.tenant).turn = turn
    turns_of_tenants[lane.tenant] = turn
    if lane.parked_until and #leased > leased_before then
        names_and_opens[#names_and_opens + 1] = lane.name
        names_and_opens[#names_and_opens + 1] = lane.opens
    end
end

-- Visits one ready lane of each tenant, then another of each tenant, and so on.
local function visit_ready_lanes()
    local next_tenant = read_pages(base .. 'ready_tenants')
    local waiting, first_waiting = {}, 1 -- for each tenant with more lanes, their `read_pages`
    while remaining > 0 do
        local tenant_name, next_lane_id = next_tenant(), nil
        if tenant_name then
            local is_tenant_skipped = lane_limits[tenant_name] == 0
            next_lane_id = not is_tenant_skipped and read_pages(base .. 'ready:' .. tenant_name)
        elseif waiting[first_waiting] then
            next_lane_id = waiting[first_waiting]
            first_waiting = first_waiting + 1
        else
            return
        end
        local lane = next_lane_id and next_lane(next_lane_id)
        if lane then
            claim_from_lane(lane)
            waiting[#waiting + 1] = next_lane_id
        end
    end
end

-- Puts a visited lane to sleep, unless a claim could lease more of its tasks now.
local function update_rotation(lane)
    local due, lease_end = first_times(lane)
    local parked_until = lane.parked_until
    if parked_until and parked_until > now then
        -- Claims wake a lane one horizon before a due time: perhaps before the parking ends. With
        -- that due time as its check time, each claim until then would wake the lane again.
        sleep_exactly_until(lane, parked_until)
    elseif parked_until and count_running_probes(lane) >= lane.probes then
        local first_probe = call('ZRANGEBYSCORE', base .. 'leased:' .. lane.id, '(' .. now, '+inf',
                                 'WITHSCORES', 'LIMIT', 0, 1)
        sleep_exactly_until(lane, tonumber(first_probe[2]))
    elseif (due and due <= horizon_end) or (lease_end and lease_end <= now) then
        call('ZADD', base .. 'ready:' .. lane.tenant, lane.turn, lane.id)
    else
        remove_from_rotation(lane)
    end
end

-- Returns the time of the next claim that may find a task, or -1.
local function find_next_time()
    for _, lane in ipairs(visited_lanes) do
        if lane.ready then return now end
    end
    if remaining <= 0 and call('EXISTS', base .. 'ready_tenants') == 1 then
        return now
    end
    local next_at = -1
    local due, expiry = first_score(base .. 'due_tenants'), first_score(base .. 'expiry_tenants')
    if due then next_at = math.max(now, due - horizon_ms) end
    if expiry and (next_at < 0 or expiry < next_at) then next_at = math.max(now, expiry) end
    return next_at
end

write_despite_full_memory()
-- `wake_lanes` does not know the limits: lanes with a limit of 0 use up its shares. The loop wakes
-- the lanes behind them or, beyond `max_lanes_woken_per_claim`, the next claims do.
local has_woken = wake_lanes()
repeat
    visit_ready_lanes()
    if has_woken then
        local may_wake = remaining > 0 and woken_count < max_lanes_woken_per_claim
        has_woken = may_wake and wake_lanes()
    end
until not has_woken
for _, lane in ipairs(visited_lanes) do
    update_rotation(lane)
end
for tenant_name, last_turn in pairs(turns_of_tenants) do
    if call('EXISTS', base .. 'ready:' .. tenant_name) == 1 then
        call('ZADD', base .. 'ready_tenants', last_turn, tenant_name)
    end
end
if turn ~= first_turn then
    call('HSET', base .. 'meta', 'turn', turn)
end
flush()
local next_at = find_next_time()
if next_at == now and remaining == limit then
    -- More lanes have to be woken. With `now`, claims without tasks would follow without a pause.
    next_at = now + 1
end
return {now, next_at, limit - remaining, lost_count, leased, renewed, names_and_opens}
