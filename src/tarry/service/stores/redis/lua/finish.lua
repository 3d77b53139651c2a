--! uses records tasks
-- Writes results of attempts. args: results.
--
-- Each result is an array: id, tenant, version, outcome (nil: no attempt), encoded attempt, status,
-- reason, due time, renewed lease (worker, length) or nil, previous delay, backoff offset, kind of
-- the outcome, callback task (see `add.lua`) or nil, and its part that never changes.
--
-- Returns for each result 'applied', 'superseded' or 'cancelled'.

local function add_callback(new, packed_task)
    local id, tenant = new[1], tenant_of(new[2])
    local existing_id, existing = find_by_key(tenant, new[5], new[6])
    if existing then
        if existing.s ~= CANCELLED or existing_id == id then return end
        delete_task(existing_id, existing)
    elseif call('EXISTS', base .. 'state:' .. id) == 1 then
        return
    end
    add_task(new, packed_task, nil)
end

local function finish(result)
    local id, tenant_name, status = result[1], result[2], result[6]
    local state = find_task(tenant_name, id)
    if not state or state.s ~= IN_FLIGHT or state.i ~= result[3] then
        local tenant = change_tenant(tenant_name)
        tenant.superseded = tenant.superseded + 1
        totals.superseded = (totals.superseded or 0) + 1
        return 'superseded'
    end
    if result[4] then
        state.a = (state.a or 0) + 1
        log_attempt(id, tenant_name, result[4], result[5])
    end
    state.y, state.k = result[10], result[12]
    state.o = result[11] ~= 0 and result[11] or nil
    if state.z and status ~= SUCCEEDED then
        end_task(id, state, CANCELLED)
        return 'cancelled'
    end
    local renewed_lease = result[9]
    if status ~= PENDING then
        state.r = result[7]
        end_task(id, state, status)
    elseif renewed_lease then
        state.d = result[8]
        lease(id, state, renewed_lease[1], renewed_lease[2], IN_FLIGHT)
    else
        make_pending(id, state, result[8])
    end
    if result[13] then
        add_callback(result[13], result[14])
    end
    return 'applied'
end

write_despite_full_memory()
local statuses = {}
for position, result in ipairs(args[1]) do
    statuses[position] = finish(result)
end
flush(true)
return statuses
