--! uses records tasks replays
-- Makes a step of a replay, if it is due, see `Store.replay_step`.
--
-- args:    id of the replay
--          cursor        of the page of dead letters, or nil
--          ids           of the tasks of the page
--          next cursor   or nil: it is the last page
--          quota         of live tasks of the tenant, or nil
--          in ms: maximum lag, pause after a full quota, maximum pause, shortest and longest
--          interval between two counts
--          maximum number of tasks that one step counts
-- reply:   the encoded replay, or nil if it does not exist

local id, cursor, task_ids, next_cursor, quota = unpack(args, 1, 5)
local max_lag_ms, quota_pause_ms, max_pause_ms = unpack(args, 6, 8)
local min_interval_ms, max_interval_ms, max_counted = unpack(args, 9, 11)
local STATUS_NAMES = {[0] = 'PENDING', 'IN_FLIGHT', 'SUCCEEDED', 'EXHAUSTED', 'CANCELLED'}
local key, replayed_key = base .. 'replay:' .. id, base .. 'replayed:' .. id

-- Returns when the next step is due, after a step that has replayed `count` tasks.
local function next_step_at(replay, count)
    if replay.rate <= 0 then return now end
    local pause = math.min(count * 1000 / replay.rate, max_pause_ms)
    return math.max(replay.next_at, now - max_lag_ms) + math.ceil(pause)
end

-- Replays the dead letters among the tasks of the page, as many as the quota allows.
local function replay_dead_letters(replay)
    local dead_letters, is_listed = {}, {}
    for _, task_id in ipairs(task_ids) do
        local state = not is_listed[task_id] and find_task(replay.tenant, task_id)
        if state and state.s == EXHAUSTED then
            is_listed[task_id] = true
            dead_letters[#dead_letters + 1] = {task_id, state}
        end
    end
    local allowed = #dead_letters
    if quota then
        local free = quota - count_live_tasks(replay.tenant)
        allowed = math.max(0, math.min(allowed, free))
    end
    for index = 1, allowed do
        local task_id, state = dead_letters[index][1], dead_letters[index][2]
        replay_task(task_id, state)
        replay.unfinished = replay.unfinished + call('ZADD', replayed_key, 0, task_id)
    end
    replay.replayed = replay.replayed + allowed
    replay.next_at = next_step_at(replay, allowed)
    if allowed < #dead_letters then
        replay.next_at = math.max(replay.next_at, now + quota_pause_ms)
        if allowed > 0 then
            replay.cursor = string.format('%.0f', dead_letters[allowed][2].n)
        end
    elseif not next_cursor then
        replay.status = 'waiting'
    else
        replay.cursor = next_cursor
    end
end

-- Counts replayed tasks that have finished; `count_cursor` is the last id as hexadecimal text.
local function count_finished_tasks(replay)
    local first = '-'
    if replay.count_cursor then
        first = '(' .. string.gsub(replay.count_cursor, '%x%x', function(byte)
            return string.char(tonumber(byte, 16))
        end)
    end
    local ids = call('ZRANGEBYLEX', replayed_key, first, '+', 'LIMIT', 0, max_counted)
    for _, task_id in ipairs(ids) do
        local state = load_state(task_id)
        if not state or state.s > IN_FLIGHT then
            local name = state and STATUS_NAMES[state.s] or 'DELETED'
            replay.finished = replay.finished or {}
            replay.finished[name] = (replay.finished[name] or 0) + 1
            replay.unfinished = replay.unfinished - 1
            call('ZREM', replayed_key, task_id)
        end
    end
    replay.count_cursor = nil
    if #ids == max_counted then
        replay.count_cursor = string.gsub(ids[#ids], '.', function(byte)
            return string.format('%02x', string.byte(byte))
        end)
    end
end

local replay = load_replay(id)
if not replay then return false end
local is_due = needs_steps(replay) and replay.next_at <= now
if not is_due or (replay.status == 'running' and replay.cursor ~= cursor) then
    return call('GET', key)
end
local old_status = replay.status
if old_status == 'running' then replay_dead_letters(replay) end
count_finished_tasks(replay)
if replay.status ~= 'running' then
    replay.next_at = now
    if not replay.count_cursor then -- all tasks were counted
        local interval = math.max(math.floor((now - replay.created_at) / 10), min_interval_ms)
        replay.next_at = now + math.min(interval, max_interval_ms)
    end
end
if replay.status == 'waiting' and replay.unfinished == 0 then
    replay.status, replay.finished_at = 'done', now
end
write_replay(replay, old_status)
flush_and_notify()
return call('GET', key)
