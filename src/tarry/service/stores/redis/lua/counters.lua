--! uses records
-- Returns the counters of a tenant or, if the tenant is nil, of the partition: the numbers of
-- tasks in each status, and of superseded results. args: tenant. The first value is the time.

local reply = {now}
local counters = args[1] and load_tenant(args[1]) or {}
if not args[1] then
    local pairs_of_hash = call('HGETALL', base .. 'counters')
    for index = 1, #pairs_of_hash, 2 do
        counters[pairs_of_hash[index]] = tonumber(pairs_of_hash[index + 1])
    end
end
for status = PENDING, CANCELLED do
    reply[#reply + 1] = counters[COUNTERS[status]] or 0
end
reply[#reply + 1] = counters.superseded or 0
return reply
