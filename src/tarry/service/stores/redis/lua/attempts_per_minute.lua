--! uses records
-- Returns attempt counts as pairs of `MINUTE:OUTCOME` and count. args: tenant (nil: the
-- partition), first time. The list starts with the minute of that time, or a day ago.

local DAY_MS = 86400000
local first = math.max(args[2] - args[2] % MINUTE_MS, now - DAY_MS)
local prefix = base .. (args[1] and 'attempts_of:' .. args[1] .. ':' or 'attempts:')
local reply = {}
for hour = first - first % HOUR_MS, now, HOUR_MS do
    local pairs_of_hash = call('HGETALL', prefix .. hour)
    for index = 1, #pairs_of_hash, 2 do
        local minute = tonumber(string.match(pairs_of_hash[index], '^%d+'))
        if minute >= first then
            reply[#reply + 1] = pairs_of_hash[index]
            reply[#reply + 1] = pairs_of_hash[index + 1]
        end
    end
end
return reply
