--! uses records tasks
-- Adds tasks.
--
-- args:     new tasks, see `add_task`
--           lease terms, likewise, or nil
--           quota of live tasks, quota of lanes: of each tenant, or nil
-- values:   for each task, the part that never changes
-- reply:    now, and then for each task an array:
--             'added', due time, end of the lease (0: not leased)
--             'existing', and the task with the same idempotency key, see `append_task`
--             'over_quota', 'too_many_lanes', or 'same_id' (another task has the id)

local new_tasks, terms, quota, lane_quota = unpack(args, 1, 4)
local reply = {now}

local function add(new_task, packed_task)
    local id, lane_name, _, _, key, key_id = unpack(new_task, 1, 6)
    local tenant_name = tenant_of(lane_name)
    local existing_id, existing = find_by_key(tenant_name, key, key_id)
    -- A cancelled task gives up its key, unless the same id is added again.
    if existing and (existing.s ~= CANCELLED or existing_id == id) then
        local result = {'existing'}
        if append_task(result, existing_id, existing) then return result end
        delete_task(existing_id, existing) -- its content is missing
        existing = nil
    end
    if not existing and call('EXISTS', base .. 'state:' .. id) == 1 then
        return {'same_id'}
    end
    if quota and count_live_tasks(tenant_name) >= quota then
        return {'over_quota'}
    end
    if exceeds_lane_quota(lane_name, lane_quota) then
        return {'too_many_lanes'}
    end
    if existing then -- it is cancelled, and gives up its key
        delete_task(existing_id, existing)
    end
    local state = add_task(new_task, packed_task, terms)
    return {'added', state.d, state.w or 0}
end

for position, new_task in ipairs(new_tasks) do
    local packed_task = ARGV[4 + position] -- `values` begin at ARGV[5]
    reply[position + 1] = add(new_task, packed_task)
end
flush_and_notify()
return reply
