-- Shared by `sweep.lua`: finds keys that are missing, and rebuilds them.
--
-- Each sweep checks a few lanes and their tenants: whether the rotation has the lane, and whether
-- queues and lists have as many tasks as the counters of the lane and the tenant. If they have not,
-- the next sweeps read the states of all tasks of the partition (a scan), and add each task to its
-- queue or lists. If the numbers still differ when the lane is checked again, tasks are lost: they
-- are removed from the lists of the tenant, and the counters are corrected.
--
-- `meta` has the id of the lane that was checked last (`audited_lane`), how many lanes are checked
-- without a pause (`audit_left`), the cursor of a scan (`scan`), and the time before which no other
-- scan starts (`next_scan_at`).

local LANES_PER_AUDIT = 50
local KEYS_PER_SCAN = 500
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

-- Starts a scan; returns false if the last one was a short time ago.
local function start_scan(key, sizes)
    if (get_meta('next_scan_at') or 0) > now then return false end
    report_missing(key, 'queues and lists have ' .. sizes .. '; they are being rebuilt')
    call('HSET', meta_key, 'scan', '0', 'next_scan_at', string.format('%.0f', now + SCAN_PAUSE_MS))
    return true
end

-- Adds a task to the queue or the lists that it belongs to.
local function restore_task(id, state)
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

local function is_queued(tenant, member)
    for index, name in ipairs(lane_names_of(tenant)) do
        local id = index <= MAX_LANES_SEARCHED and call('HGET', base .. 'lane_ids', name)
        for _, kind in ipairs({'first:', 'retry:', 'leased:'}) do
            if id and call('ZSCORE', base .. kind .. id, member) then return true end
        end
    end
    return false
end

-- Queues a live task without a state, so that a claim makes it a dead letter. Its lane is not known
-- if it is in no queue.
local function restore_content(id)
    for _, tenant in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        local number = tonumber(call('ZSCORE', list_key(tenant, PENDING), id) or nil)
        local member = number and struct.pack('>I6', number) .. id
        if member and not is_queued(tenant, member) then
            local lane = find_lane(tenant .. LOST_TASKS) or create_lane(tenant .. LOST_TASKS)
            call('ZADD', base .. 'first:' .. lane.id, now, member)
            lane.pending = lane.pending + 1
            change_lane(lane)
        end
    end
end

local function continue_scan()
    local cursor = call('HGET', meta_key, 'scan')
    if not cursor then return end
    local pattern = string.gsub(base, '[%[%]%*%?%^\\]', '\\%0') .. '*'
    local reply = call('SCAN', cursor, 'MATCH', pattern, 'COUNT', KEYS_PER_SCAN)
    for _, key in ipairs(reply[2]) do
        local kind, id = string.match(string.sub(key, #base + 1), '^(%a+):(.*)$')
        if kind == 'state' then
            restore_task(id, load_state(id))
        elseif kind == 'task' and not load_state(id) then
            restore_content(id)
        elseif kind == 'first' or kind == 'retry' or kind == 'leased' then
            change_lane(load_lane(tonumber(id))) -- rebuilds the lane if it is missing
        elseif kind == 'lane' and tonumber(id) > (get_meta('last_lane') or 0) then
            call('HSET', meta_key, 'last_lane', id)
        end
    end
    if reply[1] == '0' then
        call('HDEL', meta_key, 'scan')
        call('HSET', meta_key, 'audit_left', get_meta('last_lane') or 0)
    else
        call('HSET', meta_key, 'scan', reply[1])
    end
end

-- Compares counters with the sizes of keys. `record` is a lane or a tenant, and `differs` whether
-- a size is not equal to its counter. Returns whether a scan has not found the difference.
local function check_sizes(record, key, differs, description)
    if is_scanning() then return false end
    if not differs then
        local was_suspect = record.suspect
        record.suspect = nil
        return false, was_suspect
    end
    if record.suspect then
        record.suspect = nil
        return true, true
    end
    record.suspect = start_scan(key, description) or nil
    return false, true
end

local function start_purge(tenant_name)
    local tenant = change_tenant(tenant_name)
    if tenant.purge then return end
    report_missing('state:*', 'tasks of tenant ' .. tenant_name .. ' are lost')
    tenant.purge = {IN_FLIGHT, '-inf'} -- PENDING tasks are in the same list
    call('HSET', meta_key, 'audit_left', get_meta('last_lane') or 0)
end

-- Removes tasks without a state from the lists of a tenant, a page of a list at a time. When all
-- lists were read, the tasks of the tenant are counted. `tenant.purge` has the status of the list,
-- and the number of the last task that was read.
local function purge_lists(name, tenant)
    local status, last = tenant.purge[1], tenant.purge[2]
    local key = list_key(name, status)
    local page = call('ZRANGEBYSCORE', key, '(' .. last, '+inf', 'WITHSCORES',
                      'LIMIT', 0, KEYS_PER_SCAN)
    for index = 1, #page, 2 do
        if not load_state(page[index]) and call('EXISTS', base .. 'task:' .. page[index]) == 0 then
            call('ZREM', key, page[index])
            call('ZREM', base .. 'retention:' .. status, page[index])
        end
    end
    change_tenant(name)
    call('HSET', meta_key, 'audit_left', get_meta('last_lane') or 0)
    if #page == 2 * KEYS_PER_SCAN then
        tenant.purge = {status, page[#page]}
    elseif status < CANCELLED then
        tenant.purge = {status + 1, '-inf'}
    else
        tenant.purge = nil
        count_tasks(name, tenant)
        rebuild_counters()
        totals = {}
    end
end

local function audit_tenant(name)
    local tenant = load_tenant(name)
    if tenant.purge then
        purge_lists(name, tenant)
        return
    end
    local live = call('ZCARD', list_key(name, PENDING))
    local differs = live ~= tenant.pending + tenant.in_flight
    local sizes = live .. ' live'
    for status = SUCCEEDED, CANCELLED do
        local size = call('ZCARD', list_key(name, status))
        differs = differs or size ~= tenant[COUNTERS[status]]
        sizes = sizes .. ', ' .. size .. ' ' .. COUNTERS[status]
    end
    local is_lost, is_changed = check_sizes(tenant, 'live:' .. name, differs, sizes .. ' tasks')
    if is_lost then
        start_purge(name)
    end
    if tenant.replays > 0 and call('EXISTS', base .. 'active_replays:' .. name) == 0 then
        tenant.replays, is_changed = 0, true
    end
    if is_changed then change_tenant(name) end
    call('ZADD', base .. 'tenant_names', 'NX', 0, name)
end

local function audit_lane(lane)
    local id, name, tenant = lane.id, lane.name, lane.tenant
    call('HSETNX', base .. 'lane_ids', name, id)
    call('ZADD', base .. 'lane_names', 'NX', 0, name)
    if lane.ready then
        call('ZADD', base .. 'ready:' .. tenant, 'NX', lane.turn, id)
        call('ZADD', base .. 'ready_tenants', 'NX', load_tenant(tenant).turn, tenant)
    end
    for kind, time in pairs({due = lane.due_check, expiry = lane.expiry_check}) do
        if call('ZADD', base .. kind .. ':' .. tenant, 'NX', time, id) == 1
            or not call('ZSCORE', base .. kind .. '_tenants', tenant) then
            rescheduled_tenants[tenant] = true
        end
    end
    if lane.paused and call('SADD', base .. 'paused_lanes', name) == 1 then
        call('HINCRBY', meta_key, 'limits_version', 1)
    end
    if lane.limits and call('HEXISTS', base .. 'limits', name) == 0 then
        report_missing('limits', 'the limits of lane ' .. name .. ' are lost; set them again')
        lane.limits = nil
        local record = change_tenant(tenant)
        record.limited = math.max(0, record.limited - 1)
        change_lane(lane)
    end
    local pending = call('ZCARD', base .. 'first:' .. id) + call('ZCARD', base .. 'retry:' .. id)
    local in_flight = call('ZCARD', base .. 'leased:' .. id)
    local differs = pending ~= lane.pending or in_flight ~= lane.in_flight
    local sizes = pending .. ' pending tasks and ' .. in_flight .. ' leased tasks of ' .. name
    local is_lost, is_changed = check_sizes(lane, 'first:' .. id, differs, sizes)
    if is_lost then
        lane.pending, lane.in_flight = pending, in_flight
        start_purge(tenant)
    end
    if is_changed then change_lane(lane) end
end

-- Checks the next lanes. Returns whether the next audit should follow at once.
local function audit()
    continue_scan()
    local last = get_meta('last_lane')
    if not last then -- the store is new, or `meta` was lost
        last = 0
        for _, id in ipairs(call('HVALS', base .. 'lane_ids')) do
            last = math.max(last, tonumber(id))
        end
        if last == 0 then
            if call('EXISTS', base .. 'counters') == 1 and not is_scanning() then
                start_scan('meta', 'lanes with unknown ids')
            end
            return is_scanning()
        end
        call('HSET', meta_key, 'last_lane', last)
        call('HSET', meta_key, 'audit_left', last)
    end
    local first = (get_meta('audited_lane') or 0) + 1
    if first > last then first = 1 end
    local checked_tenants = {}
    local until_id = math.min(last, first + LANES_PER_AUDIT - 1)
    for id = first, until_id do
        local lane = lanes[id]
        local packed = not lane and call('GET', base .. 'lane:' .. id)
        if packed then
            lane = decode(packed)
            lanes[id] = lane
        end
        if lane then
            audit_lane(lane)
            checked_tenants[lane.tenant] = true
        end
    end
    for name in pairs(checked_tenants) do audit_tenant(name) end
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
