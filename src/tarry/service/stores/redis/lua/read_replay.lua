--! uses records tasks replays
-- Returns what a step of a replay depends on.
--
-- args:     id of the replay
--           ids of tasks: the page of dead letters at the cursor of the replay
--           maximum number of replayed tasks to read
-- reply:    time
--           encoded replay, or false if it does not exist; nothing follows then
--           number of live tasks of the tenant
--           for each of the tasks that is a dead letter: id, number, version, and 1 if it is among
--             the replayed tasks, or 0
--           for replayed tasks after the count cursor: id, and status or -1 if it was deleted

local id, task_ids, max_counted = args[1], args[2], args[3]
local packed = call('GET', base .. 'replay:' .. id)
if not packed then return {now, false} end
local replay, replayed_key = decode(packed), base .. 'replayed:' .. id

local dead_letters, is_listed = {}, {}
for _, task_id in ipairs(task_ids) do
    local state = not is_listed[task_id] and find_task(replay.tenant, task_id)
    if state and state.s == EXHAUSTED then
        is_listed[task_id] = true
        dead_letters[#dead_letters + 1] = task_id
        dead_letters[#dead_letters + 1] = state.n
        dead_letters[#dead_letters + 1] = state.i
        dead_letters[#dead_letters + 1] = call('ZSCORE', replayed_key, task_id) and 1 or 0
    end
end

local first, replayed = '-', {}
if replay.count_cursor then
    first = '(' .. string.gsub(string.gsub(replay.count_cursor, '-', ''), '%x%x', function(byte)
        return string.char(tonumber(byte, 16))
    end)
end
for _, task_id in ipairs(call('ZRANGEBYLEX', replayed_key, first, '+', 'LIMIT', 0, max_counted)) do
    local state = load_state(task_id)
    replayed[#replayed + 1] = task_id
    replayed[#replayed + 1] = state and state.s or -1
end
return {now, packed, count_live_tasks(replay.tenant), dead_letters, replayed}
