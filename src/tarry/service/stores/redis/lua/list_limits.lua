--! uses records
-- Returns the limits of lanes whose rate is limited, last used lanes first. args: limit.
-- Each lane is an array: negative time of the last use, name, encoded record.

local reply = {}
local members = call('ZRANGE', base .. 'rated_lanes', 0, args[1] - 1, 'WITHSCORES')
for index = 1, #members, 2 do
    local lane = find_lane(members[index])
    if lane then reply[#reply + 1] = {tonumber(members[index + 1]), encode(lane)} end
end
return reply
