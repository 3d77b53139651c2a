-- Shared by all scripts: which lanes claims visit, and when.
--
-- A lane is *ready*, that is in the rotation that claims walk through, or *asleep* until one of its
-- two check times:
--
--   due_check      due time of its first pending task (claims make the lane ready one horizon
--                  earlier)
--   expiry_check   end of its first lease or of its parking
--
-- The check times of a tenant are the earliest of its sleeping lanes.

local WAKEUP_HORIZON_MS = 1000
local rescheduled_tenants = {} -- names of the tenants of lanes whose check times have changed
local has_fixed_checks = {} -- by id of a lane: `flush` does not compute its check times

-- Sets the check times of a lane that is asleep; nil: it is not woken at a time.
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
    local retry_due = first_score(base .. 'retry:' .. lane.id)
    if retry_due and (not due or retry_due < due) then due = retry_due end
    return due, first_score(base .. 'leased:' .. lane.id)
end

-- Computes the check times of a lane from its queues and its state.
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

-- Makes a lane ready.
local function add_to_rotation(lane)
    sleep_until(lane, nil, nil)
    lane.ready = true
    call('ZADD', base .. 'ready:' .. lane.tenant, lane.turn, lane.id)
    call('ZADD', base .. 'ready_tenants', load_tenant(lane.tenant).turn, lane.tenant)
    change_lane(lane)
end

-- Puts a lane to sleep; `flush` sets its check times.
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

-- Updates the check times of a tenant. Returns whether a task of the tenant is due soon, and no
-- other sleeping lane of the partition was due before. (If one was, other processes have been
-- notified already.)
local function update_tenant_checks(tenant_name)
    local earliest_due = first_score(base .. 'due_tenants')
    local due = first_score(base .. 'due:' .. tenant_name)
    set_score(base .. 'due_tenants', tenant_name, due)
    set_score(base .. 'expiry_tenants', tenant_name, first_score(base .. 'expiry:' .. tenant_name))
    return due and due <= now + WAKEUP_HORIZON_MS and (not earliest_due or due < earliest_due)
end
