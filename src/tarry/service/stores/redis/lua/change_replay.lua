--! uses records replays
-- Starts, reads or cancels a replay. args: action, tenant, id. To start a replay, ARGV[5] is the
-- encoded `ReplayRecord`; the store sets its times and its progress.
-- Returns the encoded replay, or nil if it does not exist.

local action, tenant, id = args[1], args[2], args[3]
local replay = load_replay(id)
if action == 'start' and not replay then
    replay = decode(ARGV[5])
    replay.before = math.min(replay.before ~= 0 and replay.before or now, now)
    replay.replayed, replay.unfinished, replay.status = 0, 0, 'running'
    replay.cursor, replay.count_cursor, replay.finished, replay.finished_at = nil, nil, nil, nil
    replay.created_at, replay.next_at = now, now
    write_replay(replay, nil)
    flush()
elseif not replay or (action ~= 'start' and replay.tenant ~= tenant) then
    return false
elseif action == 'cancel' and (replay.status == 'running' or replay.status == 'waiting') then
    local old_status = replay.status
    replay.status, replay.finished_at, replay.next_at = 'cancelled', now, now
    write_replay(replay, old_status)
    flush()
end
return call('GET', base .. 'replay:' .. id)
