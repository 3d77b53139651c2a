--! uses records tasks
-- Deletes the dead letters among tasks of a tenant. args: tenant, ids. Returns their number.

local count = 0
for _, id in ipairs(args[2]) do
    local state = find_task(args[1], id)
    if state and state.s == EXHAUSTED then
        delete_task(id, state)
        count = count + 1
    end
end
flush(false)
return count
