--! uses records tasks
-- Cancels a task, or retries it now. args: action, tenant, id, quota. Returns the status, or nil
-- if the task does not exist.

local action, tenant_name, id, quota = args[1], args[2], args[3], args[4]
local state = find_task(tenant_name, id)
if not state then return false end
local status

if action == 'cancel' then
    write_despite_full_memory()
    if state.s == PENDING then
        end_task(id, state, CANCELLED)
        status = 'cancelled'
    elseif state.s == IN_FLIGHT then
        if not state.z then
            state.z = 1
            write_state(id, state)
        end
        status = 'requested'
    else
        status = 'finished'
    end
elseif state.s == PENDING then
    make_pending(id, state, math.min(state.d, now))
    status = 'due'
elseif state.s == IN_FLIGHT then
    status = 'in_flight'
elseif state.s == SUCCEEDED then
    status = 'succeeded'
else
    local tenant = load_tenant(tenant_name)
    if quota and tenant.pending + tenant.in_flight >= quota then return 'over_quota' end
    replay_task(id, state)
    status = 'due'
end
flush(true, status == 'due')
return status
