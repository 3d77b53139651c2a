--! uses records tasks
-- Releases leases. args: releases, each an array: id, tenant, version, end of the deferral or nil.
-- Returns for each release 'applied', 'superseded' or 'cancelled'.

local statuses = {}
for position, release in ipairs(args[1]) do
    local state = find_task(release[2], release[1])
    if not state or state.s ~= IN_FLIGHT or state.i ~= release[3] then
        statuses[position] = 'superseded'
    else
        local is_cancelled = release_lease(release[1], state, release[4])
        statuses[position] = is_cancelled and 'cancelled' or 'applied'
    end
end
flush(true)
return statuses
