--! uses records
-- Becomes or stays the leader, or stops leading. args: action, length of the lease in ms. Returns
-- 1 if the calling store is the leader.

write_despite_full_memory()
local key = base .. 'leader'
local leader = call('GET', key)
if args[1] == 'stop' then
    if leader == ARGV[2] then call('DEL', key) end
    return 0
end
if leader and leader ~= ARGV[2] then return 0 end
call('SET', key, ARGV[2], 'PX', args[2])
return 1
