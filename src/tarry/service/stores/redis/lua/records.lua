-- Shared by all scripts: time, arguments, and the records of tenants, lanes and policies.
--
-- A script changes one partition:
--   KEYS[1] is the prefix of the keys of the partition (KEYS[2]: see `RedisConnection.run`)
--   ARGV[1] is the time of a test clock in epoch ms; empty: the clock of the server is used
--   ARGV[2] is the token of the calling store
--   ARGV[3] are the arguments as a MessagePack array
--   ARGV[4] and later are binary values, which are stored without being decoded here
--
-- Records are MessagePack maps. Each is read once, changed in memory, and written once by `flush`.

local base = KEYS[1] .. ':'
local call = redis.call
local encode, decode = cmsgpack.pack, cmsgpack.unpack
local args = decode(ARGV[3])
local now = tonumber(ARGV[1])
if not now then
    local time = call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = 0, 1, 2, 3, 4
-- The fields of tenants and lanes that count the tasks in each status.
local COUNTERS = {[0] = 'pending', 'in_flight', 'succeeded', 'exhausted', 'cancelled'}
local MINUTE_MS, HOUR_MS = 60000, 3600000
local WAKEUP_HORIZON_MS = 1000
local SERIES_RETENTION_S = 26 * 3600

local tenants, changed_tenants = {}, {} -- by name
local lanes, changed_lanes = {}, {} -- by id, a number
local uses, changed_uses = {}, {} -- policies that tasks name, by id
local totals = {} -- changes of the counters of the partition
local rescheduled_tenants = {} -- tenants of lanes whose check times have changed
local has_fixed_checks = {} -- by id of a lane: `flush` does not compute its check times

-- Lets the script write although the memory is full. Redis checks only the first write of a script,
-- and never refuses DEL. Otherwise a server full of pending tasks could not store results, so that
-- no task would ever be finished and removed. Scripts that add tasks do not call this.
local function write_despite_full_memory()
    call('DEL', base .. 'none') -- this key does not exist
end

local function tenant_of(lane_name)
    return string.match(lane_name, '^[^/]*')
end

local function load_tenant(name)
    local tenant = tenants[name]
    if not tenant then
        local packed = call('GET', base .. 'tenant:' .. name)
        tenant = packed and decode(packed) or {
            pending = 0, in_flight = 0, succeeded = 0, exhausted = 0, cancelled = 0,
            superseded = 0, lanes = 0, limited = 0, replays = 0, turn = 0, is_new = true,
        }
        tenants[name] = tenant
    end
    return tenant
end

local function change_tenant(name)
    local tenant = load_tenant(name)
    if tenant.is_new then
        tenant.is_new = nil
        call('ZADD', base .. 'tenant_names', 0, name)
    end
    changed_tenants[name] = tenant
    return tenant
end

local function load_lane(id)
    local lane = lanes[id]
    if not lane then
        lane = decode(call('GET', base .. 'lane:' .. id))
        lanes[id] = lane
    end
    return lane
end

local function find_lane(name)
    local id = call('HGET', base .. 'lane_ids', name)
    return id and load_lane(tonumber(id)) or nil
end

local function create_lane(name)
    local id = call('HINCRBY', base .. 'meta', 'last_lane', 1)
    local tenant_name = tenant_of(name)
    local tenant = change_tenant(tenant_name)
    tenant.lanes = tenant.lanes + 1
    call('HSET', base .. 'lane_ids', name, id)
    call('ZADD', base .. 'lane_names', 0, name)
    local lane = {
        id = id, name = name, tenant = tenant_name, turn = 0, probes = 0, opens = 0,
        pending = 0, in_flight = 0, succeeded = 0, exhausted = 0, cancelled = 0,
    }
    lanes[id], changed_lanes[id] = lane, lane
    return lane
end

local function change_lane(lane)
    changed_lanes[lane.id] = lane
end

-- Returns whether a new lane with this name would exceed the quota of its tenant.
local function exceeds_lane_quota(name, lane_quota)
    return lane_quota and not find_lane(name)
        and load_tenant(tenant_of(name)).lanes >= lane_quota
end

local function load_use(id)
    local use = uses[id]
    if not use then
        use = decode(call('GET', base .. 'use:' .. id))
        uses[id] = use
    end
    return use
end

-- Returns the record of a policy that tasks name, whether the policy is stored or not.
local function find_or_create_use(tenant, policy)
    local field = tenant .. '\0' .. policy
    local id = call('HGET', base .. 'use_ids', field)
    if id then
        return load_use(tonumber(id))
    end
    id = call('HINCRBY', base .. 'meta', 'last_use', 1)
    call('HSET', base .. 'use_ids', field, id)
    local use = {id = id, tenant = tenant, policy = policy, live = 0, tasks = 0, deleted = 0}
    uses[id], changed_uses[id] = use, use
    return use
end

-- Counts a task that changes its status. No old status: added; no new status: deleted.
local function count_transition(lane, use_id, old, new)
    local tenant = change_tenant(lane.tenant)
    change_lane(lane)
    local live_change, task_change = 0, 0
    if old then
        local counter = COUNTERS[old]
        tenant[counter] = tenant[counter] - 1
        lane[counter] = lane[counter] - 1
        totals[counter] = (totals[counter] or 0) - 1
        task_change = -1
        if old <= IN_FLIGHT then live_change = -1 end
    end
    if new then
        local counter = COUNTERS[new]
        tenant[counter] = tenant[counter] + 1
        lane[counter] = lane[counter] + 1
        totals[counter] = (totals[counter] or 0) + 1
        task_change = task_change + 1
        if new <= IN_FLIGHT then live_change = live_change + 1 end
    end
    if live_change ~= 0 or task_change ~= 0 then
        local use = load_use(use_id)
        use.live, use.tasks = use.live + live_change, use.tasks + task_change
        changed_uses[use_id] = use
    end
end

-- Counts attempts per minute, for the tenant and for the partition. A hash has the counts of an
-- hour, and expires by itself.
local attempt_counts = {}
local function count_attempt(tenant, outcome)
    local minute = now - now % MINUTE_MS
    local hour = now - now % HOUR_MS
    local field = minute .. ':' .. outcome
    for _, key in ipairs({'attempts_of:' .. tenant .. ':' .. hour, 'attempts:' .. hour}) do
        attempt_counts[key] = attempt_counts[key] or {}
        attempt_counts[key][field] = (attempt_counts[key][field] or 0) + 1
    end
end

local function first_score(key)
    return tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end

local function set_score(key, member, score)
    if score then
        call('ZADD', key, score, member)
    else
        call('ZREM', key, member)
    end
end

-- A lane is *ready*, that is in the rotation that claims walk through, or *asleep* until one of
-- its two check times: the due time of its first pending task (claims make the lane ready one
-- horizon earlier), and the end of its first lease or of its parking.

-- Sets the check times of a lane that is asleep.
local function sleep_until(lane, due_check, expiry_check)
    if lane.due_check ~= due_check then
        set_score(base .. 'due:' .. lane.tenant, lane.id, due_check)
        lane.due_check = due_check
        rescheduled_tenants[lane.tenant] = true
    end
    if lane.expiry_check ~= expiry_check then
        set_score(base .. 'expiry:' .. lane.tenant, lane.id, expiry_check)
        lane.expiry_check = expiry_check
        rescheduled_tenants[lane.tenant] = true
    end
end

-- Returns the due time of the first pending task of a lane, and the end of its first lease.
local function first_times(lane)
    local due = first_score(base .. 'first:' .. lane.id)
    local retry = first_score(base .. 'retry:' .. lane.id)
    if retry and (not due or retry < due) then due = retry end
    return due, first_score(base .. 'leased:' .. lane.id)
end

local function update_check_times(lane)
    if lane.ready or has_fixed_checks[lane.id] then return end
    local due, expiry
    if not lane.paused then
        due, expiry = first_times(lane)
        local parked_until = lane.parked_until
        if parked_until then
            -- No task of a parked lane is leased before the parking ends. So if a task is due
            -- before that time, the lane is made ready exactly when the parking ends.
            if due and due <= parked_until then
                due, expiry = nil, parked_until
            elseif expiry then
                expiry = math.max(expiry, parked_until)
            end
        end
    end
    sleep_until(lane, due, expiry)
end

local function add_to_rotation(lane)
    sleep_until(lane, nil, nil)
    lane.ready = true
    call('ZADD', base .. 'ready:' .. lane.tenant, lane.turn, lane.id)
    call('ZADD', base .. 'ready_tenants', load_tenant(lane.tenant).turn, lane.tenant)
    change_lane(lane)
end

local function remove_from_rotation(lane)
    change_lane(lane)
    if not lane.ready then return end
    lane.ready = nil
    local key = base .. 'ready:' .. lane.tenant
    call('ZREM', key, lane.id)
    if call('EXISTS', key) == 0 then
        call('ZREM', base .. 'ready_tenants', lane.tenant)
    end
end

-- Puts a lane to sleep until this time, whatever tasks it has.
local function sleep_exactly_until(lane, expiry_check)
    remove_from_rotation(lane)
    sleep_until(lane, nil, expiry_check)
    has_fixed_checks[lane.id] = true
end

-- Updates the check times of a tenant, which are the earliest of its sleeping lanes. Returns
-- whether a task of the tenant is due soon, and no other sleeping lane of the partition was due
-- before. (If one was, other processes have been notified already.)
local function update_tenant_checks(tenant)
    local earliest = first_score(base .. 'due_tenants')
    local due = first_score(base .. 'due:' .. tenant)
    set_score(base .. 'due_tenants', tenant, due)
    set_score(base .. 'expiry_tenants', tenant, first_score(base .. 'expiry:' .. tenant))
    return due and due <= now + WAKEUP_HORIZON_MS and (not earliest or due < earliest)
end

local function has_no_tasks(lane)
    return lane.pending + lane.in_flight + lane.succeeded + lane.exhausted + lane.cancelled == 0
end

-- Writes all changed records. If `announces` is true, other processes are notified if the script
-- has made a task claimable; `has_due_task` means that it certainly has.
local function flush(announces, has_due_task)
    for id, lane in pairs(changed_lanes) do
        update_check_times(lane)
        local is_unused = has_no_tasks(lane) and not lane.paused and not lane.limits
        if is_unused then
            call('ZADD', base .. 'unused_lanes', lane.parked_until or 0, id)
        elseif lane.unused then
            call('ZREM', base .. 'unused_lanes', id)
        end
        lane.unused = is_unused or nil
        if lane.rate then
            local used_at = math.max(lane.last_claim_at or 0, lane.budget_at or 0)
            call('ZADD', base .. 'rated_lanes', -used_at, lane.name)
        end
        call('SET', base .. 'lane:' .. id, encode(lane))
    end
    local is_claimable = has_due_task
    for name in pairs(rescheduled_tenants) do
        if update_tenant_checks(name) then is_claimable = true end
    end
    for name, tenant in pairs(changed_tenants) do
        call('SET', base .. 'tenant:' .. name, encode(tenant))
    end
    for id, use in pairs(changed_uses) do
        call('SET', base .. 'use:' .. id, encode(use))
        if use.tasks == 0 then
            call('SADD', base .. 'unused_uses', id)
        end
    end
    for counter, change in pairs(totals) do
        if change ~= 0 then
            call('HINCRBY', base .. 'counters', counter, change)
        end
    end
    for key, counts in pairs(attempt_counts) do
        for field, count in pairs(counts) do
            if call('HINCRBY', base .. key, field, count) == count then
                call('EXPIRE', base .. key, SERIES_RETENTION_S)
            end
        end
    end
    if announces and is_claimable then
        call('PUBLISH', base .. 'wake', ARGV[2])
    end
end
