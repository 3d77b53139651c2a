--! uses records
-- Returns numbers of attempts per minute and outcome.
--
-- args:    tenant, or nil: all tenants of the partition
--          first time; the list starts with its minute, or a day ago
-- reply:   pairs of MINUTE:OUTCOME and the number of attempts, as text

local tenant_name, since = unpack(args, 1, 2)
local DAY_MS = 86400000
local first_minute = math.max(since - since % MINUTE_MS, now - DAY_MS)
local prefix = base .. (tenant_name and 'attempts_of:' .. tenant_name .. ':' or 'attempts:')
local reply = {}
for hour = first_minute - first_minute % HOUR_MS, now, HOUR_MS do
    local fields_and_counts = call('HGETALL', prefix .. hour)
    for index = 1, #fields_and_counts, 2 do
        local minute = tonumber(string.match(fields_and_counts[index], '^%d+'))
        if minute >= first_minute then
            reply[#reply + 1] = fields_and_counts[index]
            reply[#reply + 1] = fields_and_counts[index + 1]
        end
    end
end
return reply
