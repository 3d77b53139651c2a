--! uses records
-- Becomes or stays the leader, or stops leading.
--
-- args:    'start' or 'stop'
--          for 'start': length of the lease in ms
-- reply:   1 if the calling store is the leader, else 0
--
-- The key `leader` has the token of the leader, and expires by itself.

write_despite_full_memory()
local action, length_ms = unpack(args, 1, 2)
local key, token = base .. 'leader', ARGV[2] -- the token of the calling store
local leader = call('GET', key)
if action == 'stop' then
    if leader == token then call('DEL', key) end
    return 0
end
if leader and leader ~= token then return 0 end
call('SET', key, token, 'PX', length_ms)
return 1
