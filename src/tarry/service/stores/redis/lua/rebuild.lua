-- Shared by all scripts: rebuilds records that are missing.
--
-- A key can be missing although other keys refer to it: the server has evicted it, or an operator
-- has deleted it. Then scripts do not fail, because all tenants of the partition would wait. They
-- rebuild what other keys contain, and report the missing key. `sweep` returns the reports, and
-- compares the other keys (see audit.lua).

local MAX_REPORTS = 1000
local rebuilt_tenants, rebuilt_lanes = {}, {} -- `flush` counts their tasks, after all changes

local function report_missing(key, consequence)
    write_despite_full_memory()
    call('RPUSH', base .. 'missing_keys', base .. key, consequence)
    call('LTRIM', base .. 'missing_keys', -2 * MAX_REPORTS, -1)
end

-- Ends the script with an error if a key is missing that cannot be rebuilt. The caller repeats its
-- call, until the key is restored.
local function require_key(key, exists)
    if not exists then error('MISSINGKEY ' .. base .. key, 0) end
end

-- Returns the field of a hash that has this number as its value, or nil.
local function find_field(key, number)
    local cursor, value = '0', tostring(number)
    repeat
        local reply = call('HSCAN', base .. key, cursor, 'COUNT', 1000)
        cursor = reply[1]
        for index = 1, #reply[2], 2 do
            if reply[2][index + 1] == value then return reply[2][index] end
        end
    until cursor == '0'
end

-- Returns the names of the lanes of a tenant.
local function lane_names_of(tenant_name)
    local first, last = '[' .. tenant_name .. '/', '(' .. tenant_name .. '0' -- '0' follows '/'
    return call('ZRANGEBYLEX', base .. 'lane_names', first, last)
end

-- Returns the tenant that has a lane in its rotation, or the first tasks of the lane among its
-- tasks, or nil.
local function find_tenant_of_lane(lane_id)
    local members = {}
    for _, queue in ipairs({'first:', 'retry:', 'leased:'}) do
        members[#members + 1] = call('ZRANGE', base .. queue .. lane_id, 0, 0)[1]
    end
    for _, tenant_name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        for _, set in ipairs({'ready:', 'due:', 'expiry:'}) do
            if call('ZSCORE', base .. set .. tenant_name, lane_id) then return tenant_name end
        end
        for _, member in ipairs(members) do
            local id = string.sub(member, 7) -- see `queue_member`
            if call('ZSCORE', base .. 'live:' .. tenant_name, id) then return tenant_name end
        end
    end
end

-- Sets the counters of a lane to the sizes of its queues.
local function count_queued_tasks(lane)
    lane.pending = call('ZCARD', base .. 'first:' .. lane.id)
        + call('ZCARD', base .. 'retry:' .. lane.id)
    lane.in_flight = call('ZCARD', base .. 'leased:' .. lane.id)
end

local function rebuild_lane(id)
    local name = find_field('lane_ids', id)
    local consequence = 'the lane was rebuilt, without its breaker state'
    local is_paused = nil
    if not name then
        local tenant_name = find_tenant_of_lane(id)
        name = (tenant_name or '') .. '/lost-lane-' .. id
        consequence = 'the name of the lane is lost, too; it is now ' .. name
        if not tenant_name then
            is_paused = true -- the partition of the empty tenant may be another one
            consequence = 'the tenant of the lane is lost, too; its tasks are not delivered'
        end
    end
    local lane = new_lane(id, name)
    lane.due_check = tonumber(call('ZSCORE', base .. 'due:' .. lane.tenant, id) or nil)
    lane.expiry_check = tonumber(call('ZSCORE', base .. 'expiry:' .. lane.tenant, id) or nil)
    lane.ready = call('ZSCORE', base .. 'ready:' .. lane.tenant, id) and true or nil
    lane.paused = is_paused or call('SISMEMBER', base .. 'paused_lanes', name) == 1 or nil
    lane.limits = call('HEXISTS', base .. 'limits', name) == 1 or nil
    lane.rebuilt = true
    count_queued_tasks(lane)
    rebuilt_lanes[id] = lane
    report_missing('lane:' .. id, consequence)
    call('SET', base .. 'lane:' .. id, encode(lane))
    call('HSET', base .. 'lane_ids', name, id)
    call('ZADD', base .. 'lane_names', 0, name)
    call('ZREM', base .. 'unused_lanes', id)
    return lane
end

-- Sets the counters of a tenant to the sizes of its lists, and of the queues of its lanes.
local function count_tasks(name, tenant)
    local leased_count = 0
    for _, lane_name in ipairs(lane_names_of(name)) do
        local id = call('HGET', base .. 'lane_ids', lane_name)
        if id then leased_count = leased_count + call('ZCARD', base .. 'leased:' .. id) end
    end
    local live_count = call('ZCARD', base .. 'live:' .. name)
    tenant.in_flight = math.min(live_count, leased_count)
    tenant.pending = live_count - tenant.in_flight
    for status = SUCCEEDED, CANCELLED do
        tenant[COUNTERS[status]] = call('ZCARD', base .. 'ended:' .. status .. ':' .. name)
    end
end

-- Returns the record of a tenant without one, which is new unless it has tasks or lanes.
local function create_or_rebuild_tenant(name)
    local tenant = new_tenant()
    tenant.is_new = true -- not stored, see `change_tenant`
    tenant.lanes = #lane_names_of(name)
    local ended = base .. 'ended:'
    local list_count = call('EXISTS', base .. 'live:' .. name, ended .. SUCCEEDED .. ':' .. name,
                            ended .. EXHAUSTED .. ':' .. name, ended .. CANCELLED .. ':' .. name)
    if tenant.lanes == 0 and list_count == 0 then return tenant end
    tenant.is_new = nil
    count_tasks(name, tenant)
    for _, lane_name in ipairs(call('HKEYS', base .. 'limits')) do
        if tenant_of(lane_name) == name then tenant.limited = tenant.limited + 1 end
    end
    for _, id in ipairs(call('ZRANGE', base .. 'active_replays:' .. name, 0, -1)) do
        local packed = call('GET', base .. 'replay:' .. id)
        if packed and decode(packed).status == 'running' then
            tenant.replays = tenant.replays + 1
        end
    end
    tenant.turn = tonumber(call('ZSCORE', base .. 'ready_tenants', name) or 0)
    rebuilt_tenants[name] = tenant
    report_missing('tenant:' .. name, 'the record of the tenant was rebuilt')
    call('ZADD', base .. 'tenant_names', 0, name)
    call('SET', base .. 'tenant:' .. name, encode(tenant))
    return tenant
end

local function rebuild_policy_use(id)
    local field = find_field('use_ids', id) or '\0default'
    local tenant_name, policy = string.match(field, '^([^%z]*)%z(.*)$')
    local use = new_policy_use(id, tenant_name, policy)
    use.rebuilt = true -- its tasks are not counted, so it is never removed
    if not call('HGET', base .. 'policies:' .. tenant_name, policy) then
        -- The numbers of versions to which tasks refer are not used again.
        for _, name in ipairs(call('HKEYS', base .. 'version_tasks:' .. tenant_name)) do
            local version, policy_of_version = string.match(name, '^(%d+):(.*)$')
            if policy_of_version == policy then
                use.deleted = math.max(use.deleted, tonumber(version))
            end
        end
    end
    report_missing('use:' .. id, 'the record of the policy ' .. policy .. ' was rebuilt')
    call('SET', base .. 'use:' .. id, encode(use))
    return use
end
