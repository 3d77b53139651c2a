--! uses records
-- Records or lists sums per interval of time; all are in one partition. args: action, and then
--   record: list of {interval in ms, start, retention in s, {name, count, ...}}
--   list: interval in ms, first time, retention in ms
-- Listed points are pairs of the start and a list of names and counts.
--
-- The hash `series:INTERVAL:START` has the sums of a point by name, and expires by itself.

local action = args[1]
if action == 'record' then
    write_despite_full_memory()
    for _, point in ipairs(args[2]) do
        local step, at, retention_s, sums = unpack(point)
        local key = base .. 'series:' .. step .. ':' .. at
        for index = 1, #sums, 2 do
            call('HINCRBY', key, sums[index], sums[index + 1])
        end
        call('EXPIRE', key, retention_s)
    end
else
    local step, since, retention_ms = args[2], args[3], args[4]
    local oldest = now - retention_ms
    local first = math.max(since - since % step, math.ceil(oldest / step) * step)
    local reply = {}
    for at = first, now, step do
        local sums = call('HGETALL', base .. 'series:' .. step .. ':' .. at)
        if #sums > 0 then
            reply[#reply + 1] = at
            reply[#reply + 1] = sums
        end
    end
    return reply
end
