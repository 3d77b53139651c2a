--! uses records tasks
-- Returns tasks of a tenant.
--
-- args:    tenant, ids
-- reply:   the tasks that exist, see `append_task`

local tenant_name, ids = unpack(args, 1, 2)
local reply = {}
for _, id in ipairs(ids) do
    local state = find_task(tenant_name, id)
    if state then append_task(reply, id, state) end
end
return reply
