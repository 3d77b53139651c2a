--! uses records
-- Returns numbers of tasks.
--
-- args:    tenant, or nil: the sums over all tenants of the partition
-- reply:   now, the number of tasks in each status, the number of superseded results

local tenant_name = args[1]
local counters = tenant_name and load_tenant(tenant_name) or {}
if not tenant_name then
    local names_and_counts = call('HGETALL', base .. 'counters')
    for index = 1, #names_and_counts, 2 do
        counters[names_and_counts[index]] = tonumber(names_and_counts[index + 1])
    end
end
local reply = {now}
for status = PENDING, CANCELLED do
    reply[#reply + 1] = counters[COUNTERS[status]] or 0
end
reply[#reply + 1] = counters.superseded or 0
return reply
