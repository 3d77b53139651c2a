--! uses records tasks
-- Adds tasks. args: tasks, lease terms (worker, length, horizon) or nil, quota, lane quota.
--
-- Each task is an array: id, lane, policy, policy version, idempotency key, the key as an id (nil
-- if it is none), delay, due time, whether to lease it. ARGV[4 + n] is the part of task n that
-- never changes.
--
-- Returns for each task an array that begins with 'added' (then due time and end of the lease or
-- 0), 'existing' (then the task, see `emit_task`), 'over_quota', 'too_many_lanes' or 'same_id'.

local new_tasks, terms, quota, lane_quota = args[1], args[2], args[3], args[4]
local results = {now}

local function add(new, packed_task)
    local id, lane_name = new[1], new[2]
    local tenant_name = tenant_of(lane_name)
    local existing_id, existing = find_by_key(tenant_name, new[5], new[6])
    if existing and (existing.s ~= CANCELLED or existing_id == id) then
        local reply = {'existing'}
        if emit_task(reply, existing_id, existing) then return reply end
        delete_task(existing_id, existing) -- its content is missing
        existing = nil
    end
    if not existing and call('EXISTS', base .. 'state:' .. id) == 1 then
        return {'same_id'}
    end
    local tenant = load_tenant(tenant_name)
    if quota and tenant.pending + tenant.in_flight >= quota then
        return {'over_quota'}
    end
    if exceeds_lane_quota(lane_name, lane_quota) then
        return {'too_many_lanes'}
    end
    if existing then
        delete_task(existing_id, existing)
    end
    local state = add_task(new, packed_task, terms)
    return {'added', state.d, state.w or 0}
end

for position, new in ipairs(new_tasks) do
    results[position + 1] = add(new, ARGV[4 + position])
end
flush(true)
return results
