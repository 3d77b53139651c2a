--! uses records tasks
-- Returns the tasks of a tenant with these ids, see `emit_task`. args: tenant, ids.

local reply = {}
for _, id in ipairs(args[2]) do
    local state = find_task(args[1], id)
    if state then emit_task(reply, id, state) end
end
return reply
