-- Shared by `sweep.lua`: finds keys that are missing, and rebuilds them.
--
-- Each sweep checks a few lanes and their tenants: whether the rotation has the lane, and whether
-- queues and lists have as many tasks as the counters of the lane and the tenant. If they have not,
-- the record of the lane or tenant is `suspect`, and the next sweeps read the states of all tasks
-- of the partition (a scan), and add each task to its queue or lists. If the numbers still differ
-- when a suspect record is checked again, tasks are lost: the next sweeps remove them from the
-- lists of the tenant (a purge, whose position is in `purge` of the tenant), and correct the
-- counters.
--
-- Fields of `meta`:
--
--   audited_lane    id of the lane that was checked last
--   audit_left      how many lanes are checked without a pause between two sweeps
--   scan            cursor of a scan
--   next_scan_at    time before which no other scan starts

local LANES_PER_AUDIT = 50
local KEYS_PER_STEP = 500 -- of a scan or a purge
local SCAN_PAUSE_MS = 60000
local MAX_LANES_SEARCHED = 1000
local LOST_TASKS = '/lost-tasks' -- the lane of tasks without state and queue
local meta_key = base .. 'meta'

local function get_meta(field)
    return tonumber(call('HGET', meta_key, field) or nil)
end

local function is_scanning()
    return call('HEXISTS', meta_key, 'scan') == 1
end

-- Makes the next sweeps check all lanes without a pause.
local function audit_all_lanes()
    call('HSET', meta_key, 'audit_left', get_meta('last_lane') or 0)
end

-- Starts a scan; returns false if the last one was a short time ago.
local function start_scan(key, sizes)
    if (get_meta('next_scan_at') or 0) > now then return false end
    report_missing(key, 'queues and lists have ' .. sizes .. '; they are being rebuilt')
    call('HSET', meta_key, 'scan', '0', 'next_scan_at', string.format('%.0f', now + SCAN_PAUSE_MS))
    return true
end

-- Adds a task to the queue or the lists that it belongs to.
local function restore_lists(id, state)
    local lane = load_lane(state.l)
    if state.s <= IN_FLIGHT then
        call('ZADD', queue_key(state), state.w or state.d, queue_member(state, id))
        call('ZADD', list_key(lane.tenant, PENDING), state.n, id)
    else
        call('ZADD', list_key(lane.tenant, state.s), state.n, id)
        call('ZADD', base .. 'retention:' .. state.s, state.e, id)
    end
    change_lane(lane) -- `flush` sets its check times
end

-- Returns whether a lane of a tenant has a member in one of its queues.
local function is_queued(tenant_name, member)
    for index, lane_name in ipairs(lane_names_of(tenant_name)) do
        local id = index <= MAX_LANES_SEARCHED and call('HGET', base .. 'lane_ids', lane_name)
        for _, queue in ipairs({'first:', 'retry:', 'leased:'}) do
            if id and call('ZSCORE', base .. queue .. id, member) then return true end
        end
    end
    return false
end

-- Queues a live task without a state, so that a claim makes it a dead letter. Its lane is not known
-- if it is in no queue.
local function queue_task_without_state(id)
    for _, tenant_name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        local number = tonumber(call('ZSCORE', list_key(tenant_name, PENDING), id) or nil)
        local member = number and queue_member({n = number}, id)
        if member and not is_queued(tenant_name, member) then
            local lane = find_or_create_lane(tenant_name .. LOST_TASKS)
            call('ZADD', base .. 'first:' .. lane.id, now, member)
            lane.pending = lane.pending + 1
            change_lane(lane)
        end
    end
end

local function restore_key(key)
    local kind, id = string.match(string.sub(key, #base + 1), '^(%a+):(.*)$')
    if kind == 'state' then
        restore_lists(id, load_state(id))
    elseif kind == 'task' and not load_state(id) then
        queue_task_without_state(id)
    elseif kind == 'first' or kind == 'retry' or kind == 'leased' then
        change_lane(load_lane(tonumber(id))) -- rebuilds the lane if it is missing
    elseif kind == 'lane' and tonumber(id) > (get_meta('last_lane') or 0) then
        call('HSET', meta_key, 'last_lane', id)
    end
end

local function continue_scan()
    local cursor = call('HGET', meta_key, 'scan')
    if not cursor then return end
    local pattern = string.gsub(base, '[%[%]%*%?%^\\]', '\\%0') .. '*'
    local reply = call('SCAN', cursor, 'MATCH', pattern, 'COUNT', KEYS_PER_STEP)
    local next_cursor, keys = reply[1], reply[2]
    for _, key in ipairs(keys) do restore_key(key) end
    if next_cursor == '0' then
        call('HDEL', meta_key, 'scan')
        audit_all_lanes()
    else
        call('HSET', meta_key, 'scan', next_cursor)
    end
end

-- Handles a lane or tenant whose counters were compared with the sizes of keys: `differs` if they
-- are not equal. Returns whether tasks are lost, and whether the record has changed.
local function update_suspicion(record, key, differs, sizes)
    if is_scanning() then return false, false end
    local was_suspect = record.suspect
    record.suspect = nil
    if not differs then return false, was_suspect end
    if was_suspect then return true, true end
    record.suspect = start_scan(key, sizes) or nil
    return false, true
end

local function start_purge(tenant_name)
    local tenant = change_tenant(tenant_name)
    if tenant.purge then return end
    report_missing('state:*', 'tasks of tenant ' .. tenant_name .. ' are lost')
    tenant.purge = {IN_FLIGHT, '-inf'} -- PENDING tasks are in the same list
    audit_all_lanes()
end

-- Removes tasks without a state from the lists of a tenant, a page of a list at a time. When all
-- lists were read, the tasks of the tenant are counted. `tenant.purge` has the status of the list,
-- and the number of the last task that was read.
local function continue_purge(name, tenant)
    local status, last_number = tenant.purge[1], tenant.purge[2]
    local key = list_key(name, status)
    local page = call('ZRANGEBYSCORE', key, '(' .. last_number, '+inf', 'WITHSCORES',
                      'LIMIT', 0, KEYS_PER_STEP)
    for index = 1, #page, 2 do
        local id = page[index]
        if not load_state(id) and call('EXISTS', base .. 'task:' .. id) == 0 then
            call('ZREM', key, id)
            call('ZREM', base .. 'retention:' .. status, id)
        end
    end
    change_tenant(name)
    audit_all_lanes()
    if #page == 2 * KEYS_PER_STEP then
        tenant.purge = {status, page[#page]}
    elseif status < CANCELLED then
        tenant.purge = {status + 1, '-inf'}
    else
        tenant.purge = nil
        count_tasks(name, tenant)
        rebuild_counters()
    end
end

local function audit_tenant(name)
    local tenant = load_tenant(name)
    if tenant.purge then
        continue_purge(name, tenant)
        return
    end
    local live_count = call('ZCARD', list_key(name, PENDING))
    local differs = live_count ~= tenant.pending + tenant.in_flight
    local sizes = live_count .. ' live'
    for status = SUCCEEDED, CANCELLED do
        local size = call('ZCARD', list_key(name, status))
        differs = differs or size ~= tenant[COUNTERS[status]]
        sizes = sizes .. ', ' .. size .. ' ' .. COUNTERS[status]
    end
    local is_lost, is_changed = update_suspicion(tenant, 'live:' .. name, differs,
                                                 sizes .. ' tasks')
    if is_lost then
        start_purge(name)
    end
    if tenant.replays > 0 and call('EXISTS', base .. 'active_replays:' .. name) == 0 then
        tenant.replays, is_changed = 0, true
    end
    if is_changed then change_tenant(name) end
    call('ZADD', base .. 'tenant_names', 'NX', 0, name)
end

-- Adds a lane to the keys that have it according to its record.
local function restore_lane_keys(lane)
    local id, name, tenant_name = lane.id, lane.name, lane.tenant
    call('HSETNX', base .. 'lane_ids', name, id)
    call('ZADD', base .. 'lane_names', 'NX', 0, name)
    if lane.ready then
        call('ZADD', base .. 'ready:' .. tenant_name, 'NX', lane.turn, id)
        call('ZADD', base .. 'ready_tenants', 'NX', load_tenant(tenant_name).turn, tenant_name)
    end
    for check, time in pairs({due = lane.due_check, expiry = lane.expiry_check}) do
        if call('ZADD', base .. check .. ':' .. tenant_name, 'NX', time, id) == 1
            or not call('ZSCORE', base .. check .. '_tenants', tenant_name) then
            rescheduled_tenants[tenant_name] = true
        end
    end
    if lane.paused and call('SADD', base .. 'paused_lanes', name) == 1 then
        call('HINCRBY', meta_key, 'limits_version', 1)
    end
end

local function audit_lane(lane)
    local id, name = lane.id, lane.name
    restore_lane_keys(lane)
    if lane.limits and call('HEXISTS', base .. 'limits', name) == 0 then
        report_missing('limits', 'the limits of lane ' .. name .. ' are lost; set them again')
        lane.limits = nil
        local tenant = change_tenant(lane.tenant)
        tenant.limited = math.max(0, tenant.limited - 1)
        change_lane(lane)
    end
    local pending = call('ZCARD', base .. 'first:' .. id) + call('ZCARD', base .. 'retry:' .. id)
    local in_flight = call('ZCARD', base .. 'leased:' .. id)
    local differs = pending ~= lane.pending or in_flight ~= lane.in_flight
    local sizes = pending .. ' pending tasks and ' .. in_flight .. ' leased tasks of ' .. name
    local is_lost, is_changed = update_suspicion(lane, 'first:' .. id, differs, sizes)
    if is_lost then
        lane.pending, lane.in_flight = pending, in_flight
        start_purge(lane.tenant)
    end
    if is_changed then change_lane(lane) end
end

-- Returns the last id of a lane, or nil if `meta` has none: the store is new, or `meta` was lost.
local function find_last_lane()
    local last_id = get_meta('last_lane')
    if last_id then return last_id end
    last_id = 0
    for _, id in ipairs(call('HVALS', base .. 'lane_ids')) do
        last_id = math.max(last_id, tonumber(id))
    end
    if last_id > 0 then
        call('HSET', meta_key, 'last_lane', last_id)
        call('HSET', meta_key, 'audit_left', last_id)
        return last_id
    end
    if call('EXISTS', base .. 'counters') == 1 and not is_scanning() then
        start_scan('meta', 'lanes with unknown ids')
    end
end

-- Checks the next lanes. Returns whether the next audit should follow at once.
local function audit()
    continue_scan()
    local last_id = find_last_lane()
    if not last_id then return is_scanning() end
    local first_id = (get_meta('audited_lane') or 0) + 1
    if first_id > last_id then first_id = 1 end
    local until_id = math.min(last_id, first_id + LANES_PER_AUDIT - 1)
    local tenant_names = {}
    for id = first_id, until_id do
        local lane = lanes[id]
        local packed = not lane and call('GET', base .. 'lane:' .. id)
        if packed then
            lane = decode(packed)
            lanes[id] = lane
        end
        if lane then
            audit_lane(lane)
            tenant_names[lane.tenant] = true
        end
    end
    for name in pairs(tenant_names) do audit_tenant(name) end
    call('HSET', meta_key, 'audited_lane', until_id)
    local left = get_meta('audit_left')
    if left then
        left = left - LANES_PER_AUDIT
        if left > 0 then
            call('HSET', meta_key, 'audit_left', left)
        else
            call('HDEL', meta_key, 'audit_left')
        end
    end
    return left ~= nil or is_scanning()
end
