--! uses records tasks
-- Deletes the dead letters among tasks of a tenant.
--
-- args:    tenant, ids of tasks
-- reply:   number of deleted tasks

local tenant_name, ids = unpack(args, 1, 2)
local count = 0
for _, id in ipairs(ids) do
    local state = find_task(tenant_name, id)
    if state and state.s == EXHAUSTED then
        delete_task(id, state)
        count = count + 1
    end
end
flush()
return count
