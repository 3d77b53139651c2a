--! uses records
-- Returns lanes for which a rate was found, last used lanes first.
--
-- args:    maximum number of lanes
-- reply:   for each lane an array: negative time of its last use, encoded record

local limit = args[1]
local reply = {}
local names_and_scores = call('ZRANGE', base .. 'rated_lanes', 0, limit - 1, 'WITHSCORES')
for index = 1, #names_and_scores, 2 do
    local lane = find_lane(names_and_scores[index])
    if lane then
        reply[#reply + 1] = {tonumber(names_and_scores[index + 1]), encode(lane)}
    end
end
return reply
