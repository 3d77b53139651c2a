--! uses records tasks
-- Writes results of attempts.
--
-- args:    results, each an array:
--            id, tenant, version    of the leased task
--            outcome, attempt       outcome and encoded attempt; nil: no attempt was made
--            status, reason         new status of the task, and its reason
--            due                    due time of the next attempt, if the task is PENDING
--            renewed lease          {worker, length in ms} or nil; the task then stays IN_FLIGHT
--            previous delay, backoff offset, kind of the last outcome
--            callback task          task to add, see `add_task`, or nil
--            packed callback task   its part that never changes, or nil
-- reply:   for each result 'applied', 'superseded' or 'cancelled'

-- Adds a callback task, unless a task with its idempotency key exists.
local function add_callback_task(new_task, packed_task)
    local id, lane_name, _, _, key, key_id = unpack(new_task, 1, 6)
    local existing_id, existing = find_by_key(tenant_of(lane_name), key, key_id)
    if existing then
        if existing.s ~= CANCELLED or existing_id == id then return end
        delete_task(existing_id, existing)
    elseif call('EXISTS', base .. 'state:' .. id) == 1 then
        return
    end
    add_task(new_task, packed_task, nil)
end

local function finish(result)
    local id, tenant_name, version, outcome, packed_attempt, status, reason = unpack(result, 1, 7)
    local due, renewed_lease, previous_delay, backoff_offset, outcome_kind = unpack(result, 8, 12)
    local callback_task, packed_callback_task = unpack(result, 13, 14)
    local state = find_task(tenant_name, id)
    if not state or state.s ~= IN_FLIGHT or state.i ~= version then
        local tenant = change_tenant(tenant_name)
        tenant.superseded = tenant.superseded + 1
        totals.superseded = (totals.superseded or 0) + 1
        return 'superseded'
    end
    if outcome then
        state.a = (state.a or 0) + 1
        log_attempt(id, tenant_name, outcome, packed_attempt)
    end
    state.y, state.k = previous_delay, outcome_kind
    state.o = backoff_offset ~= 0 and backoff_offset or nil
    if state.z and status ~= SUCCEEDED then
        end_task(id, state, CANCELLED)
        return 'cancelled'
    end
    if status ~= PENDING then
        state.r = reason
        end_task(id, state, status)
    elseif renewed_lease then
        local worker, length_ms = unpack(renewed_lease)
        state.d = due
        lease_task(id, state, worker, length_ms, IN_FLIGHT)
    else
        make_pending(id, state, due)
    end
    if callback_task then
        add_callback_task(callback_task, packed_callback_task)
    end
    return 'applied'
end

write_despite_full_memory()
local statuses = {}
for position, result in ipairs(args[1]) do
    statuses[position] = finish(result)
end
flush_and_notify()
return statuses
