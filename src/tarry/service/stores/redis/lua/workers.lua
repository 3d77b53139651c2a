--! uses records
-- Records, lists or removes processes; all are in one partition. args: action, and then
--   record: name, whether the process leases tasks; ARGV[5] is the encoded record
--   list: time after which a silent process is not listed
--   remove: name
-- Listed processes are pairs of the encoded record and the time of the last heartbeat.
--
-- `workers` has the records by name. `workers_seen` has the names by the time of the last
-- heartbeat, and `leasing_workers` those of processes that lease tasks.

write_despite_full_memory()
local action = args[1]
if action == 'record' then
    call('HSET', base .. 'workers', args[2], ARGV[5])
    call('ZADD', base .. 'workers_seen', now, args[2])
    set_score(base .. 'leasing_workers', args[2], args[3] and now or nil)
elseif action == 'remove' then
    call('HDEL', base .. 'workers', args[2])
    call('ZREM', base .. 'workers_seen', args[2])
    call('ZREM', base .. 'leasing_workers', args[2])
else
    local reply = {}
    local names = call('ZRANGEBYSCORE', base .. 'workers_seen', '(' .. now - args[2], '+inf',
                       'WITHSCORES')
    for index = 1, #names, 2 do
        local packed = call('HGET', base .. 'workers', names[index])
        if packed then -- a record that is missing is written again by the next heartbeat
            reply[#reply + 1] = packed
            reply[#reply + 1] = tonumber(names[index + 1])
        end
    end
    return reply
end
