-- Shared by scripts that change replays.
--
-- `replay:ID` is an encoded `ReplayRecord`. Sorted sets have the ids of all replays by creation
-- time (`replays`), of those that need steps by due time (`active_replays`), and of the others by
-- their end (`ended_replays`, for retention). `replays` and `active_replays` also exist for each
-- tenant. `replayed:ID` has the ids of replayed tasks that were not counted as finished yet.

local function load_replay(id)
    local packed = call('GET', base .. 'replay:' .. id)
    return packed and decode(packed) or nil
end

local function needs_steps(replay)
    return replay.status == 'running' or replay.unfinished > 0
end

-- Writes an encoded replay. `old_status` is its status before; nil: the replay is new.
local function write_replay(packed, old_status)
    local replay = decode(packed)
    call('SET', base .. 'replay:' .. replay.id, packed)
    local is_active = needs_steps(replay)
    for _, suffix in ipairs({'', ':' .. replay.tenant}) do
        if not old_status then
            call('ZADD', base .. 'replays' .. suffix, replay.created_at, replay.id)
        end
        local next_at = is_active and replay.next_at or nil
        set_score(base .. 'active_replays' .. suffix, replay.id, next_at)
    end
    set_score(base .. 'ended_replays', replay.id, not is_active and replay.finished_at or nil)
    -- The tenant's dead letters are not swept while one of its replays is running.
    local was_running = old_status == 'running' and 1 or 0
    local is_running = replay.status == 'running' and 1 or 0
    if was_running ~= is_running then
        local tenant = change_tenant(replay.tenant)
        tenant.replays = tenant.replays + is_running - was_running
    end
end

local function delete_replay(id)
    local replay = load_replay(id)
    call('DEL', base .. 'replay:' .. id, base .. 'replayed:' .. id)
    call('ZREM', base .. 'replays', id)
    call('ZREM', base .. 'active_replays', id)
    call('ZREM', base .. 'ended_replays', id)
    local names = replay and {replay.tenant} or call('ZRANGE', base .. 'tenant_names', 0, -1)
    for _, name in ipairs(names) do
        call('ZREM', base .. 'replays:' .. name, id)
        call('ZREM', base .. 'active_replays:' .. name, id)
    end
end
