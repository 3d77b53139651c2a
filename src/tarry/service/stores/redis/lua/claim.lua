--! uses records tasks
-- Leases tasks. args: worker, length of leases, horizon, limit, limit per lane, limits by lane.
--
-- The order is: tenants in turn, and of each tenant the least recently served lane. A claim first
-- makes lanes ready whose check time has come. A lane from which tasks were leased moves to the
-- end of the rotation. A lane from which no more tasks can be leased now is put to sleep. So the
-- cost of a claim grows with the number of returned tasks, not with the number of waiting tasks.
--
-- Returns the time, the time of the next claim that may find a task (-1: none), number of tasks
-- that count towards the limit, number of lost attempts, leased tasks, renewed tasks, and the name
-- and number of consecutive opens of each half-open lane.

local worker, length_ms, horizon_ms, limit, per_lane = args[1], args[2], args[3], args[4], args[5]
local lane_limits = args[6]
local horizon_end = now + horizon_ms
local PAGE_SIZE = 16 -- ready tenants or lanes that are read at a time
local MAX_TENANTS_WOKEN = 1000
local MAX_NAMES_READ = 1000 -- at a time; Lua limits the number of arguments
-- To wake a lane takes about 30 us, in which Redis is blocked: a tenant may have 100,000 lanes.
local lanes_woken_at_once = 2 * limit + 64
local max_lanes_woken = lanes_woken_at_once + 1000 -- by one claim
local woken_count = 0

local leased, renewed, opens_by_lane = {}, {}, {}
local lost_count, remaining = 0, limit
local visited, visited_ids = {}, {} -- lanes in the order of their visits
local served_tenants = {} -- the last turn of each tenant, by name
local turn = tonumber(call('HGET', base .. 'meta', 'turn') or nil)
if not turn then -- the first claim, or `meta` was lost
    turn = tonumber(call('ZREVRANGE', base .. 'ready_tenants', 0, 0, 'WITHSCORES')[2] or 0)
end
local first_turn = turn

-- Makes lanes ready whose check time has come; returns whether there were any.
local function wake_lanes()
    local has_woken = false
    for kind, until_time in pairs({due = horizon_end, expiry = now}) do
        local names = call('ZRANGEBYSCORE', base .. kind .. '_tenants', '-inf', until_time,
                           'LIMIT', 0, MAX_TENANTS_WOKEN)
        local share = math.max(8, math.ceil(lanes_woken_at_once / math.max(1, #names)))
        for _, name in ipairs(names) do
            local ids = call('ZRANGEBYSCORE', base .. kind .. ':' .. name, '-inf', until_time,
                             'LIMIT', 0, share)
            woken_count = woken_count + #ids
            for _, id in ipairs(ids) do
                add_to_rotation(load_lane(tonumber(id)))
                has_woken = true
            end
            update_tenant_checks(name)
        end
    end
    return has_woken
end

-- Returns a function that yields the members of a sorted set in pages. The set must not change
-- meanwhile.
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
    local ids, names = {}, {}
    local function add_ids()
        for _, id in ipairs(call('HMGET', base .. 'lane_ids', unpack(names))) do
            if id then ids[tonumber(id)] = true end
        end
        names = {}
    end
    for name, lane_limit in pairs(lane_limits) do
        if lane_limit == 0 then names[#names + 1] = name end
        if #names == MAX_NAMES_READ then add_ids() end
    end
    if #names > 0 then add_ids() end
    return ids
end

local skipped_ids = find_skipped_lanes()

-- Returns the next ready lane of a tenant that has not been visited and has no limit of 0.
local function next_lane(lane_ids)
    while true do
        local id = tonumber(lane_ids())
        if not id then return nil end
        if not visited_ids[id] and not skipped_ids[id] then return load_lane(id) end
    end
end

local function running_probes(lane)
    return call('ZCOUNT', base .. 'leased:' .. lane.id, '(' .. now, '+inf')
end

local function first_members(key, until_time, count)
    return call('ZRANGEBYSCORE', key, '-inf', until_time, 'LIMIT', 0, count)
end

-- Appends members to a list, up to `count` of them.
local function append(list, members, count)
    for index = 1, math.min(#members, count) do
        list[#list + 1] = members[index]
    end
end

-- Returns up to `lane_limit` members of tasks of a lane that may be leased, in order.
local function find_claimable(lane, lane_limit)
    if lane.parked_until then
        if lane.parked_until > now then return {} end
        lane_limit = math.min(lane_limit, lane.probes - running_probes(lane))
    end
    if lane_limit <= 0 then return {} end
    local expired = first_members(base .. 'leased:' .. lane.id, now, lane_limit)
    local first = first_members(base .. 'first:' .. lane.id, horizon_end, lane_limit)
    -- Reads one more, because the task of the last probe is used only if there is no other.
    local retries = first_members(base .. 'retry:' .. lane.id, horizon_end, lane_limit + 1)
    local chosen = {}
    if lane.parked_until then
        local ready_count = #first_members(base .. 'retry:' .. lane.id, now, lane_limit + 1)
        local ready, early, last_probe = {}, {}, {}
        for index, member in ipairs(retries) do
            if struct.unpack('>I6', member) == lane.last_probe then
                last_probe[1] = member
            else
                append(index <= ready_count and ready or early, {member}, 1)
            end
        end
        local first_count = math.floor((lane_limit + now % 3) / 3) -- a third, rounded as below
        append(chosen, first, first_count)
        append(chosen, ready, lane_limit - #chosen)
        append(chosen, {unpack(first, first_count + 1)}, lane_limit - #chosen)
        append(chosen, expired, lane_limit - #chosen)
        append(chosen, early, lane_limit - #chosen)
        append(chosen, last_probe, lane_limit - #chosen)
        if #chosen > 0 then
            lane.last_probe = struct.unpack('>I6', chosen[#chosen])
        end
        return chosen
    end
    append(chosen, expired, lane_limit)
    local left = lane_limit - #chosen
    -- A third of the tasks are retries. `now % 3` sometimes rounds up, so that a limit of 1 also
    -- selects retries.
    local retry_count = math.max(math.floor((left + now % 3) / 3), left - #first)
    retry_count = math.min(retry_count, #retries)
    append(chosen, first, left - retry_count)
    append(chosen, retries, retry_count)
    return chosen
end

local function lease_member(lane, member)
    local id = id_of_member(member)
    local state = load_state(id)
    local packed_task = call('GET', base .. 'task:' .. id)
    if not state or not packed_task or state.n ~= struct.unpack('>I6', member)
        or state.l ~= lane.id then
        remove_damaged_task(lane, member, state, packed_task)
        return
    end
    local old_status = state.s
    if old_status == IN_FLIGHT and state.h == worker then
        -- The worker is alive: the lease is renewed, and the version stays the same.
        state.i = state.i - 1
        local packed_state = lease(id, state, worker, length_ms, old_status)
        emit_task(renewed, id, state, packed_state, packed_task)
        return
    end
    if old_status == IN_FLIGHT then
        lost_count = lost_count + 1
        log_lost_attempt(id, state)
        if state.z then
            end_task(id, state, CANCELLED)
            return
        end
        state.x, state.d = (state.x or 0) + 1, state.w
    else
        call('ZREM', queue_key(state), member)
    end
    local packed_state = lease(id, state, worker, length_ms, old_status)
    emit_task(leased, id, state, packed_state, packed_task)
end

local function claim_from_lane(lane)
    visited[#visited + 1], visited_ids[lane.id] = lane, true
    change_lane(lane)
    local lane_limit = math.min(remaining, per_lane, lane_limits[lane.name] or per_lane)
    local members = find_claimable(lane, lane_limit)
    if #members == 0 then return end
    local leased_before = #leased
    for _, member in ipairs(members) do
        lease_member(lane, member)
    end
    remaining = remaining - #members
    turn = turn + 1
    lane.turn, lane.last_claim_at = turn, now
    change_tenant(lane.tenant).turn = turn
    served_tenants[lane.tenant] = turn
    if lane.parked_until and #leased > leased_before then
        opens_by_lane[#opens_by_lane + 1] = lane.name
        opens_by_lane[#opens_by_lane + 1] = lane.opens
    end
end

-- Visits one ready lane of each tenant, then another of each tenant, and so on.
local function visit_ready_lanes()
    local tenant_names = read_pages(base .. 'ready_tenants')
    local waiting, first_waiting = {}, 1
    while remaining > 0 do
        local name, lane_ids = tenant_names(), nil
        if name then
            lane_ids = lane_limits[name] ~= 0 and read_pages(base .. 'ready:' .. name) or nil
        elseif waiting[first_waiting] then
            lane_ids = waiting[first_waiting]
            first_waiting = first_waiting + 1
        else
            return
        end
        local lane = lane_ids and next_lane(lane_ids)
        if lane then
            claim_from_lane(lane)
            waiting[#waiting + 1] = lane_ids
        end
    end
end

-- Puts a visited lane to sleep, unless a claim could lease more of its tasks now.
local function update_rotation(lane)
    local due, lease_end = first_times(lane)
    local parked_until = lane.parked_until
    if parked_until and parked_until > now then
        sleep_exactly_until(lane, parked_until)
    elseif parked_until and running_probes(lane) >= lane.probes then
        local key = base .. 'leased:' .. lane.id
        local first = call('ZRANGEBYSCORE', key, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
        sleep_exactly_until(lane, tonumber(first[2]))
    elseif (due and due <= horizon_end) or (lease_end and lease_end <= now) then
        call('ZADD', base .. 'ready:' .. lane.tenant, lane.turn, lane.id)
    else
        remove_from_rotation(lane) -- `flush` sets its check times
    end
end

write_despite_full_memory()
-- Lanes that wait behind lanes with a limit of 0 are woken, too, some of them by the next claims.
local has_woken = wake_lanes()
repeat
    visit_ready_lanes()
    has_woken = has_woken and remaining > 0 and woken_count < max_lanes_woken and wake_lanes()
until not has_woken
local next_at = -1
for _, lane in ipairs(visited) do
    update_rotation(lane)
    if lane.ready then next_at = now end
end
for name, last_turn in pairs(served_tenants) do
    if call('EXISTS', base .. 'ready:' .. name) == 1 then
        call('ZADD', base .. 'ready_tenants', last_turn, name)
    end
end
if turn ~= first_turn then
    call('HSET', base .. 'meta', 'turn', turn)
end
flush(false)
if next_at < 0 and remaining <= 0 and call('EXISTS', base .. 'ready_tenants') == 1 then
    next_at = now
end
if next_at < 0 then
    local due, expiry = first_score(base .. 'due_tenants'), first_score(base .. 'expiry_tenants')
    if due then next_at = math.max(now, due - horizon_ms) end
    if expiry and (next_at < 0 or expiry < next_at) then next_at = math.max(now, expiry) end
end
if next_at == now and remaining == limit then
    next_at = now + 1 -- more lanes have to be woken
end
return {now, next_at, limit - remaining, lost_count, leased, renewed, opens_by_lane}
