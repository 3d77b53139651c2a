--! uses records tasks
-- Cancels a task, or retries it now. The fields of `state`: see tasks.lua.
--
-- args:    'cancel' or 'retry'
--          tenant, id
--          for 'retry': quota of live tasks of the tenant, or nil
-- reply:   a `CancelStatus` or a `RetryNowStatus`; nil: the task does not exist

local action, tenant_name, id, quota = unpack(args, 1, 4)

-- Returns the reply.
local function cancel(state)
    if state.s == PENDING then
        end_task(id, state, CANCELLED)
        return 'cancelled'
    elseif state.s == IN_FLIGHT then
        if not state.z then
            state.z = 1
            write_state(id, state)
        end
        return 'requested'
    end
    return 'finished'
end

-- Returns the reply. With the reply 'due', the task is due now.
local function retry(state)
    if state.s == PENDING then
        make_pending(id, state, math.min(state.d, now))
        return 'due'
    elseif state.s == IN_FLIGHT then
        return 'in_flight'
    elseif state.s == SUCCEEDED then
        return 'succeeded'
    elseif quota and count_live_tasks(tenant_name) >= quota then
        return 'over_quota'
    end
    replay_task(id, state)
    return 'due'
end

local state = find_task(tenant_name, id)
if not state then return false end
if action == 'cancel' then
    write_despite_full_memory()
    local status = cancel(state)
    flush_and_notify()
    return status
end
local status = retry(state)
local has_due_task = status == 'due'
flush_and_notify(has_due_task)
return status
