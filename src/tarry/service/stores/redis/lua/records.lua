--! uses context schema rebuild lookup rotation
-- Shared by all scripts: counts tasks and attempts, and writes the changed records.

local ATTEMPT_COUNTS_RETENTION_S = 26 * 3600

local totals = {} -- changes of the counters of the partition
local attempt_counts = {} -- changes of numbers of attempts: by key, then by field

-- Counts a task that changes its status. No old status: added; no new status: deleted; no id of a
-- policy use: it is not known.
local function count_transition(lane, use_id, old_status, new_status)
    local tenant = change_tenant(lane.tenant)
    change_lane(lane)
    local live_change, task_change = 0, 0
    if old_status then
        local counter = COUNTERS[old_status]
        -- A counter may be too small for a while after a key was lost.
        tenant[counter] = math.max(0, tenant[counter] - 1)
        lane[counter] = math.max(0, lane[counter] - 1)
        totals[counter] = (totals[counter] or 0) - 1
        task_change = -1
        live_change = -LIVE_COUNT[old_status]
    end
    if new_status then
        local counter = COUNTERS[new_status]
        tenant[counter] = tenant[counter] + 1
        lane[counter] = lane[counter] + 1
        totals[counter] = (totals[counter] or 0) + 1
        task_change = task_change + 1
        live_change = live_change + LIVE_COUNT[new_status]
    end
    if use_id and (live_change ~= 0 or task_change ~= 0) then
        local use = load_policy_use(use_id)
        use.live, use.tasks = use.live + live_change, use.tasks + task_change
        if use.rebuilt then
            use.live, use.tasks = math.max(0, use.live), math.max(0, use.tasks)
        end
        change_policy_use(use)
    end
end

-- Counts an attempt in the current minute, for the tenant and for the partition. A hash has the
-- counts of an hour, and expires by itself.
local function count_attempt(tenant_name, outcome)
    local minute = now - now % MINUTE_MS
    local hour = now - now % HOUR_MS
    local field = minute .. ':' .. outcome
    for _, key in ipairs({'attempts_of:' .. tenant_name .. ':' .. hour, 'attempts:' .. hour}) do
        attempt_counts[key] = attempt_counts[key] or {}
        attempt_counts[key][field] = (attempt_counts[key][field] or 0) + 1
    end
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
    totals = {} -- they are in the sums
end

-- Returns whether the lane can be removed when its parking has ended.
local function is_unused_lane(lane)
    return not lane.rebuilt and not lane.paused and not lane.limits
        and lane.pending + lane.in_flight + lane.succeeded + lane.exhausted + lane.cancelled == 0
end

local function write_lane(lane)
    local is_unused = is_unused_lane(lane)
    if is_unused then
        call('ZADD', base .. 'unused_lanes', lane.parked_until or 0, lane.id)
    elseif lane.unused then
        call('ZREM', base .. 'unused_lanes', lane.id)
    end
    lane.unused = is_unused or nil
    if lane.rate then
        local used_at = math.max(lane.last_claim_at or 0, lane.budget_at or 0)
        call('ZADD', base .. 'rated_lanes', -used_at, lane.name)
    end
    call('SET', base .. 'lane:' .. lane.id, encode(lane))
end

local function write_counters()
    if next(totals) and call('EXISTS', base .. 'counters') == 0 then
        rebuild_counters() -- the key was lost, or the first task was added
    end
    for counter, change in pairs(totals) do
        if change ~= 0 then
            call('HINCRBY', base .. 'counters', counter, change)
        end
    end
    for key, counts in pairs(attempt_counts) do
        for field, count in pairs(counts) do
            local is_new_field = call('HINCRBY', base .. key, field, count) == count
            if is_new_field then call('EXPIRE', base .. key, ATTEMPT_COUNTS_RETENTION_S) end
        end
    end
end

-- Writes all changed records. Returns whether a task is claimable of which other processes have not
-- been notified.
local function flush()
    for _, lane in pairs(rebuilt_lanes) do count_queued_tasks(lane) end
    for name, tenant in pairs(rebuilt_tenants) do count_tasks(name, tenant) end
    for _, lane in pairs(changed_lanes) do
        update_check_times(lane)
        write_lane(lane)
    end
    local is_claimable = false
    for name in pairs(rescheduled_tenants) do
        if update_tenant_checks(name) then is_claimable = true end
    end
    for name, tenant in pairs(changed_tenants) do
        call('SET', base .. 'tenant:' .. name, encode(tenant))
    end
    for id, use in pairs(changed_policy_uses) do
        call('SET', base .. 'use:' .. id, encode(use))
        if use.tasks == 0 and not use.rebuilt then
            call('SADD', base .. 'unused_uses', id)
        end
    end
    write_counters()
    return is_claimable
end

-- Writes all changed records, and notifies other processes if a task is claimable. `has_due_task`
-- means that one certainly is.
local function flush_and_notify(has_due_task)
    if flush() or has_due_task then
        call('PUBLISH', base .. 'wake', ARGV[2])
    end
end
