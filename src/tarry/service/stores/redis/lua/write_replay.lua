--! uses records tasks replays
-- Writes a replay with the tasks of a step, unless one of them was changed.
--
-- args:     id of the replay
--           dead letters to replay: id and version of each
--           quota of live tasks that these must not exceed, or nil
--           ids of replayed tasks that were counted as finished
-- values:   the encoded replay that is expected; empty: there is none
--           the new encoded replay
-- reply:    1, or 0 if the replay, a dead letter or the number of live tasks has changed

local id, dead_letters, quota, counted_ids = args[1], args[2], args[3], args[4]
local expected, packed = ARGV[5], ARGV[6]
local old, new = call('GET', base .. 'replay:' .. id), decode(packed)
if (old or '') ~= expected then return 0 end
local states = {}
for index = 1, #dead_letters, 2 do
    local state = find_task(new.tenant, dead_letters[index])
    if not state or state.s ~= EXHAUSTED or state.i ~= dead_letters[index + 1] then return 0 end
    states[dead_letters[index]] = state
end
if quota and #dead_letters > 0 then
    if count_live_tasks(new.tenant) + #dead_letters / 2 > quota then return 0 end
end

for index = 1, #dead_letters, 2 do
    local task_id = dead_letters[index]
    replay_task(task_id, states[task_id])
    call('ZADD', base .. 'replayed:' .. id, 0, task_id)
end
for _, task_id in ipairs(counted_ids) do call('ZREM', base .. 'replayed:' .. id, task_id) end
write_replay(packed, old and decode(old).status)
flush_and_notify()
return 1
