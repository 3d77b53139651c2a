--! uses records replays
-- Starts, reads or cancels a replay.
--
-- args:     'start', 'get' or 'cancel'
--           tenant, id
-- values:   to start: the encoded `ReplayRecord`; the script sets its times and its progress
-- reply:    the encoded replay, or nil if it does not exist

local action, tenant_name, id = unpack(args, 1, 3)
local replay = load_replay(id)
if action == 'start' and not replay then
    replay = decode(ARGV[5])
    replay.before = math.min(replay.before ~= 0 and replay.before or now, now)
    replay.replayed, replay.unfinished, replay.status = 0, 0, 'running'
    replay.cursor, replay.count_cursor, replay.finished, replay.finished_at = nil, nil, nil, nil
    replay.created_at, replay.next_at = now, now
    write_replay(replay, nil)
    flush()
elseif not replay or (action ~= 'start' and replay.tenant ~= tenant_name) then
    return false
elseif action == 'cancel' and (replay.status == 'running' or replay.status == 'waiting') then
    local old_status = replay.status
    replay.status, replay.finished_at, replay.next_at = 'cancelled', now, now
    write_replay(replay, old_status)
    flush()
end
return call('GET', base .. 'replay:' .. id)
