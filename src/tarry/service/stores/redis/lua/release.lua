--! uses records tasks
-- Releases leases.
--
-- args:    releases, each an array: id, tenant, version, end of the deferral or nil
-- reply:   for each release 'applied', 'superseded' or 'cancelled'

local statuses = {}
for position, release in ipairs(args[1]) do
    local id, tenant_name, version, deferred_until = unpack(release, 1, 4)
    local state = find_task(tenant_name, id)
    if not state or state.s ~= IN_FLIGHT or state.i ~= version then
        statuses[position] = 'superseded'
    else
        local is_cancelled = release_lease(id, state, deferred_until)
        statuses[position] = is_cancelled and 'cancelled' or 'applied'
    end
end
flush_and_notify()
return statuses
