--! uses records tasks
-- Returns attempts of tasks of a tenant.
--
-- args:    tenant
--          ids of tasks
--          index of the first attempt of each task (-1: only the last attempt)
--          maximum number of attempts, maximum number of bytes
-- reply:   for each task an array: id, and then its encoded attempts

local tenant_name, ids, first, limit, max_bytes = unpack(args, 1, 5)
local PAGE_SIZE = 100
local reply, count, bytes = {}, 0, 0
for _, id in ipairs(ids) do
    if count == limit or bytes >= max_bytes then break end
    local entry = {id}
    local index, is_complete = first, not find_task(tenant_name, id)
    while not is_complete and count < limit and bytes < max_bytes do
        local page_size = first < 0 and 1 or math.min(PAGE_SIZE, limit - count)
        local page = call('LRANGE', base .. 'log:' .. id, index, index + page_size - 1)
        for _, attempt in ipairs(page) do
            if bytes >= max_bytes then break end
            entry[#entry + 1] = attempt
            count, bytes = count + 1, bytes + #attempt
        end
        index = index + page_size
        is_complete = first < 0 or #page < page_size
    end
    reply[#reply + 1] = entry
end
return reply
