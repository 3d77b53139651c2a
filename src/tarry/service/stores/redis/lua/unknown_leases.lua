--! uses records tasks
-- Finds the leases of a worker for tasks that are not among the known ids, in lanes with a name
-- after `after`. args: worker, known ids, after, number of lanes.
-- Returns the name of the last lane (empty: no more lanes), and for each lease its id, tenant and
-- version.

local worker, after, count = args[1], args[3], args[4]
local known = {}
for _, id in ipairs(args[2]) do known[id] = true end
local names = call('ZRANGEBYLEX', base .. 'lane_names', '(' .. after, '+', 'LIMIT', 0, count)
local reply = {#names == count and names[count] or ''}
for _, name in ipairs(names) do
    local lane = find_lane(name)
    if lane and lane.in_flight > 0 then
        for _, member in ipairs(call('ZRANGE', base .. 'leased:' .. lane.id, 0, -1)) do
            local id = id_of_member(member)
            local state = not known[id] and load_state(id)
            if state and state.h == worker then
                reply[#reply + 1] = id
                reply[#reply + 1] = tenant_of(name)
                reply[#reply + 1] = state.i
            end
        end
    end
end
return reply
