-- Shared by all scripts: time, arguments, and the records of tenants, lanes and policies.
--
-- A script changes one partition:
--   KEYS[1] is the prefix of the keys of the partition (KEYS[2]: see `RedisConnection.run`)
--   ARGV[1] is the time of a test clock in epoch ms; empty: the clock of the server is used
--   ARGV[2] is the token of the calling store
--   ARGV[3] is the identity of the store, see `identity.lua`
--   ARGV[4] are the arguments as a MessagePack array
--   ARGV[5] and later are binary values, which are stored without being decoded here
--
-- Records are MessagePack maps. Each is read once, changed in memory, and written once by `flush`.

local base = KEYS[1] .. ':'
local call = redis.call
local encode, decode = cmsgpack.pack, cmsgpack.unpack
local args = decode(ARGV[4])
local now = tonumber(ARGV[1])
if not now then
    local time = call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The next line is replaced by constants of `rules/transitions.py`: the number of each status;
-- COUNTERS, the fields of tenants and lanes that count the tasks in each status; LIVE_COUNT, which
-- is 1 for the statuses of live tasks, else 0.
--! constants
local MINUTE_MS, HOUR_MS = 60000, 3600000
local WAKEUP_HORIZON_MS = 1000
local SERIES_RETENTION_S = 26 * 3600

local tenants, changed_tenants = {}, {} -- by name
local lanes, changed_lanes = {}, {} -- by id, a number
local uses, changed_uses = {}, {} -- policies that tasks name, by id
local totals = {} -- changes of the counters of the partition
local rescheduled_tenants = {} -- tenants of lanes whose check times have changed
local has_fixed_checks = {} -- by id of a lane: `flush` does not compute its check times
local rebuilt_tenants, rebuilt_lanes = {}, {} -- `flush` counts their tasks, after all changes

-- Lets the script write although the memory is full. Redis checks only the first write of a script,
-- and never refuses DEL. Otherwise a server full of pending tasks could not store results, so that
-- no task would ever be finished and removed. Scripts that add tasks do not call this.
local function write_despite_full_memory()
    call('DEL', base .. 'none') -- this key does not exist
end

local function tenant_of(lane_name)
    return string.match(lane_name, '^[^/]*')
end

-- A key can be missing although other keys refer to it: the server has evicted it, or an operator
-- has deleted it. Then scripts do not fail, because all tenants of the partition would wait. They
-- rebuild what other keys contain, and report the missing key. `sweep` returns the reports, and
-- compares the other keys (see `audit.lua`).
local MAX_REPORTS = 1000
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

-- Returns the tenant that has a lane in its rotation, or its first tasks among its tasks, or nil.
local function find_tenant_of_lane(id)
    local members = {}
    for _, kind in ipairs({'first:', 'retry:', 'leased:'}) do
        members[#members + 1] = call('ZRANGE', base .. kind .. id, 0, 0)[1]
    end
    for _, name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        for _, kind in ipairs({'ready:', 'due:', 'expiry:'}) do
            if call('ZSCORE', base .. kind .. name, id) then return name end
        end
        for _, member in ipairs(members) do
            if call('ZSCORE', base .. 'live:' .. name, string.sub(member, 7)) then return name end
        end
    end
end

-- Counts the tasks in the queues of a lane.
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
    local tenant = tenant_of(name)
    local lane = {
        id = id, name = name, tenant = tenant, turn = 0, probes = 0, opens = 0,
        succeeded = 0, exhausted = 0, cancelled = 0,
        due_check = tonumber(call('ZSCORE', base .. 'due:' .. tenant, id) or nil),
        expiry_check = tonumber(call('ZSCORE', base .. 'expiry:' .. tenant, id) or nil),
        ready = call('ZSCORE', base .. 'ready:' .. tenant, id) and true or nil,
        paused = is_paused or call('SISMEMBER', base .. 'paused_lanes', name) == 1 or nil,
        limits = call('HEXISTS', base .. 'limits', name) == 1 or nil,
        rebuilt = true, -- its finished tasks are not counted, so it is never removed
    }
    count_queued_tasks(lane)
    rebuilt_lanes[id] = lane
    report_missing('lane:' .. id, consequence)
    call('SET', base .. 'lane:' .. id, encode(lane))
    call('HSET', base .. 'lane_ids', name, id)
    call('ZADD', base .. 'lane_names', 0, name)
    call('ZREM', base .. 'unused_lanes', id)
    return lane
end

-- Returns the names of the lanes of a tenant.
local function lane_names_of(tenant)
    return call('ZRANGEBYLEX', base .. 'lane_names', '[' .. tenant .. '/', '(' .. tenant .. '0')
end

-- Counts the tasks of a tenant that are in the lists of the tenant and the queues of its lanes.
local function count_tasks(name, tenant)
    tenant.in_flight = 0
    for _, lane_name in ipairs(lane_names_of(name)) do
        local id = call('HGET', base .. 'lane_ids', lane_name)
        if id then
            tenant.in_flight = tenant.in_flight + call('ZCARD', base .. 'leased:' .. id)
        end
    end
    local live = call('ZCARD', base .. 'live:' .. name)
    tenant.in_flight = math.min(live, tenant.in_flight)
    tenant.pending = live - tenant.in_flight
    for status = SUCCEEDED, CANCELLED do
        tenant[COUNTERS[status]] = call('ZCARD', base .. 'ended:' .. status .. ':' .. name)
    end
end

-- Returns the record of a tenant without one, which is new unless it has tasks or lanes.
local function create_or_rebuild_tenant(name)
    local tenant = {
        pending = 0, in_flight = 0, succeeded = 0, exhausted = 0, cancelled = 0,
        superseded = 0, lanes = 0, limited = 0, replays = 0, turn = 0, is_new = true,
    }
    tenant.lanes = #lane_names_of(name)
    local ended = base .. 'ended:'
    local list_count = call('EXISTS', base .. 'live:' .. name, ended .. SUCCEEDED .. ':' .. name,
                            ended .. EXHAUSTED .. ':' .. name, ended .. CANCELLED .. ':' .. name)
    if tenant.lanes == 0 and list_count == 0 then return tenant end
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
    report_missing('tenant:' .. name, 'the record of the tenant was rebuilt')
    call('ZADD', base .. 'tenant_names', 0, name)
    tenant.is_new = nil
    rebuilt_tenants[name] = tenant
    call('SET', base .. 'tenant:' .. name, encode(tenant))
    return tenant
end

local function load_tenant(name)
    local tenant = tenants[name]
    if not tenant then
        local packed = call('GET', base .. 'tenant:' .. name)
        tenant = packed and decode(packed) or create_or_rebuild_tenant(name)
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
        local packed = call('GET', base .. 'lane:' .. id)
        lane = packed and decode(packed) or rebuild_lane(id)
        lanes[id] = lane
    end
    return lane
end

local function find_lane(name)
    local id = call('HGET', base .. 'lane_ids', name)
    return id and load_lane(tonumber(id)) or nil
end

-- Returns a new number for a record with a key of its own. If `meta` was lost, the first numbers
-- are in use.
local function next_number(field, key)
    local number
    repeat
        number = call('HINCRBY', base .. 'meta', field, 1)
    until call('EXISTS', base .. key .. number) == 0
    return number
end

local function create_lane(name)
    local id = next_number('last_lane', 'lane:')
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

local function rebuild_use(id)
    local field = find_field('use_ids', id) or '\0default'
    local tenant, policy = string.match(field, '^([^%z]*)%z(.*)$')
    -- Its tasks are not counted, so it is never removed (`rebuilt`).
    local use = {id = id, tenant = tenant, policy = policy, live = 0, tasks = 0, deleted = 0,
                 rebuilt = true}
    if not call('HGET', base .. 'policies:' .. tenant, policy) then
        -- The numbers of versions to which tasks refer are not used again.
        for _, name in ipairs(call('HKEYS', base .. 'version_tasks:' .. tenant)) do
            local version, named_policy = string.match(name, '^(%d+):(.*)$')
            if named_policy == policy then
                use.deleted = math.max(use.deleted, tonumber(version))
            end
        end
    end
    report_missing('use:' .. id, 'the record of the policy ' .. policy .. ' was rebuilt')
    call('SET', base .. 'use:' .. id, encode(use))
    return use
end

local function load_use(id)
    local use = uses[id]
    if not use then
        local packed = call('GET', base .. 'use:' .. id)
        use = packed and decode(packed) or rebuild_use(id)
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
    id = next_number('last_use', 'use:')
    call('HSET', base .. 'use_ids', field, id)
    local use = {id = id, tenant = tenant, policy = policy, live = 0, tasks = 0, deleted = 0}
    uses[id], changed_uses[id] = use, use
    return use
end

-- Counts a task that changes its status. No old status: added; no new status: deleted; no policy:
-- its record is not known.
local function count_transition(lane, use_id, old, new)
    local tenant = change_tenant(lane.tenant)
    change_lane(lane)
    local live_change, task_change = 0, 0
    if old then
        local counter = COUNTERS[old]
        -- A counter may be too small for a while after a key was lost.
        tenant[counter] = math.max(0, tenant[counter] - 1)
        lane[counter] = math.max(0, lane[counter] - 1)
        totals[counter] = (totals[counter] or 0) - 1
        task_change = -1
        live_change = -LIVE_COUNT[old]
    end
    if new then
        local counter = COUNTERS[new]
        tenant[counter] = tenant[counter] + 1
        lane[counter] = lane[counter] + 1
        totals[counter] = (totals[counter] or 0) + 1
        task_change = task_change + 1
        live_change = live_change + LIVE_COUNT[new]
    end
    if use_id and (live_change ~= 0 or task_change ~= 0) then
        local use = load_use(use_id)
        use.live, use.tasks = use.live + live_change, use.tasks + task_change
        if use.rebuilt then
            use.live, use.tasks = math.max(0, use.live), math.max(0, use.tasks)
        end
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
    return not lane.rebuilt
        and lane.pending + lane.in_flight + lane.succeeded + lane.exhausted + lane.cancelled == 0
end

-- Sets the counters of the partition to the sums over its tenants.
local function rebuild_counters()
    local sums = {}
    for _, name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        local tenant = load_tenant(name)
        for status = PENDING, CANCELLED do
            sums[COUNTERS[status]] = (sums[COUNTERS[status]] or 0) + tenant[COUNTERS[status]]
        end
        sums.superseded = (sums.superseded or 0) + tenant.superseded
    end
    for counter, sum in pairs(sums) do
        call('HSET', base .. 'counters', counter, sum)
    end
end

-- Writes all changed records. If `announces` is true, other processes are notified if the script
-- has made a task claimable; `has_due_task` means that it certainly has.
local function flush(announces, has_due_task)
    for _, lane in pairs(rebuilt_lanes) do count_queued_tasks(lane) end
    for name, tenant in pairs(rebuilt_tenants) do count_tasks(name, tenant) end
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
        if use.tasks == 0 and not use.rebuilt then
            call('SADD', base .. 'unused_uses', id)
        end
    end
    if next(totals) and call('EXISTS', base .. 'counters') == 0 then
        rebuild_counters() -- or the first task is added; then the sums are right, too
        totals = {}
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
