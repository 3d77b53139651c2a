--! uses records
-- Returns lanes, sorted by name.
--
-- args:    first, last    limits of the names, as in ZRANGEBYLEX
--          limit
--          exact name, or nil: used instead of `first`, `last` and `limit`
--          whether to return due times
-- reply:   for each lane an array: encoded record, due time of its first pending task (0: none, or
--          not requested), limits that an operator has set as JSON, or an empty string

local first, last, limit, exact_name, has_due_times = unpack(args, 1, 5)
local names = {exact_name}
if not exact_name then
    names = call('ZRANGEBYLEX', base .. 'lane_names', first, last, 'LIMIT', 0, limit)
end
local reply = {}
for _, name in ipairs(names) do
    local lane = find_lane(name)
    if lane then
        local due = has_due_times and first_times(lane) or 0
        local limits = lane.limits and call('HGET', base .. 'limits', name) or ''
        reply[#reply + 1] = {encode(lane), due, limits}
    end
end
return reply
