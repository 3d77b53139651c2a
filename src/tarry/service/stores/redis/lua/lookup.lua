-- Shared by all scripts: loads and creates the records of tenants, lanes and policy uses.
--
-- A record is read once, changed in memory, and written once by `flush`. Call `change_...` for each
-- record that was changed, or it is not written.

local tenants, changed_tenants = {}, {} -- by name
local lanes, changed_lanes = {}, {} -- by id, a number
local policy_uses, changed_policy_uses = {}, {} -- by id

-- Returns the record of a tenant. That of a new tenant is not stored before `change_tenant`.
local function load_tenant(name)
    local tenant = tenants[name]
    if not tenant then
        local packed = call('GET', base .. 'tenant:' .. name)
        tenant = packed and decode(packed) or create_or_rebuild_tenant(name)
        tenants[name] = tenant
    end
    return tenant
end

-- Returns the record of a tenant, which `flush` writes.
local function change_tenant(name)
    local tenant = load_tenant(name)
    if tenant.is_new then
        tenant.is_new = nil
        call('ZADD', base .. 'tenant_names', 0, name)
    end
    changed_tenants[name] = tenant
    return tenant
end

local function count_live_tasks(tenant_name)
    local tenant = load_tenant(tenant_name)
    return tenant.pending + tenant.in_flight
end

local function load_lane(id)
    local lane = lanes[id]
    if not lane then
        local packed = call('GET', base .. 'lane:' .. id)
        lane = packed and decode(packed) or rebuild_lane(id)
        lanes[id] = lane
    end
    return lane
end

local function change_lane(lane)
    changed_lanes[lane.id] = lane
end

-- Returns the lane with a name, or nil.
local function find_lane(name)
    local id = call('HGET', base .. 'lane_ids', name)
    return id and load_lane(tonumber(id)) or nil
end

-- Returns a new number for a record with a key of its own. If `meta` was lost, it counts from 1
-- again, so numbers that are in use are skipped.
local function next_number(field, key)
    local number
    repeat
        number = call('HINCRBY', base .. 'meta', field, 1)
    until call('EXISTS', base .. key .. number) == 0
    return number
end

local function create_lane(name)
    local lane = new_lane(next_number('last_lane', 'lane:'), name)
    local tenant = change_tenant(lane.tenant)
    tenant.lanes = tenant.lanes + 1
    call('HSET', base .. 'lane_ids', name, lane.id)
    call('ZADD', base .. 'lane_names', 0, name)
    lanes[lane.id] = lane
    change_lane(lane)
    return lane
end

local function find_or_create_lane(name)
    return find_lane(name) or create_lane(name)
end

-- Returns whether a new lane with this name would exceed the quota of its tenant.
local function exceeds_lane_quota(name, lane_quota)
    return lane_quota and not find_lane(name)
        and load_tenant(tenant_of(name)).lanes >= lane_quota
end

local function load_policy_use(id)
    local use = policy_uses[id]
    if not use then
        local packed = call('GET', base .. 'use:' .. id)
        use = packed and decode(packed) or rebuild_policy_use(id)
        policy_uses[id] = use
    end
    return use
end

local function change_policy_use(use)
    changed_policy_uses[use.id] = use
end

local function find_or_create_policy_use(tenant_name, policy)
    local field = tenant_name .. '\0' .. policy
    local id = call('HGET', base .. 'use_ids', field)
    if id then return load_policy_use(tonumber(id)) end
    local use = new_policy_use(next_number('last_use', 'use:'), tenant_name, policy)
    call('HSET', base .. 'use_ids', field, use.id)
    policy_uses[use.id] = use
    change_policy_use(use)
    return use
end
