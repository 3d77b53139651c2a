--! uses records tasks replays secrets
-- Stores records of another store, unless they exist. args: kind, records. Binary parts of record
-- n are ARGV[4 + n]. The records are arrays, except replays, which are encoded in ARGV.

local kind, records = args[1], args[2]

local importers = {}

-- tenant, id, version, creation time; ARGV: document
function importers.policy(record, document)
    local tenant, id, version, created_at = record[1], record[2], record[3], record[4]
    local name = version .. ':' .. id
    if call('HSETNX', base .. 'documents:' .. tenant, name, document) == 0 then return end
    call('HSET', base .. 'created:' .. tenant, name, created_at)
    call('ZADD', base .. 'tenant_names', 0, tenant)
    local newest = tonumber(call('HGET', base .. 'policies:' .. tenant, id) or nil)
    if newest then
        local replaced = newest .. ':' .. id
        call('HSET', base .. 'replaced:' .. tenant, replaced, created_at)
        if not call('HGET', base .. 'version_tasks:' .. tenant, replaced) then
            call('ZADD', base .. 'unused_versions', created_at, tenant .. '\0' .. replaced)
        end
    else
        local use = find_or_create_use(tenant, id)
        use.deleted = 0
        changed_uses[use.id] = use
        call('ZADD', base .. 'policy_ids:' .. tenant, 0, id)
    end
    call('HSET', base .. 'policies:' .. tenant, id, version)
end

-- tenant, policy, last version
function importers.deleted_policy(record)
    local use = find_or_create_use(record[1], record[2])
    use.deleted = record[3]
    changed_uses[use.id] = use
end

-- id, digest, creation time, time of revocation or nil; ARGV: encoded record
function importers.api_key(record, packed)
    local id = record[1]
    if call('HSETNX', base .. 'api_keys', id, packed) == 0 then return end
    call('HSET', base .. 'api_key_digests', record[2], id)
    call('HSET', base .. 'api_keys_created', id, record[3])
    if record[4] then call('HSET', base .. 'api_keys_revoked', id, record[4]) end
    call('ZADD', base .. 'api_key_ids', 0, id)
end

-- tenant, id, lane or nil, creation time, time of expiry or nil; ARGV: encoded record
function importers.signing_secret(record, packed)
    store_secret(record[1], record[2], record[3] or '', record[4], record[5], packed)
end

-- name, time until which the lane is parked or nil, probes, opens, paused, time of the last claim,
-- limits as JSON or nil, rate, concurrency, budget, time of its last change
function importers.lane(record)
    local name = record[1]
    local lane = find_lane(name) or create_lane(name)
    local tenant = change_tenant(lane.tenant)
    tenant.limited = tenant.limited - (lane.limits and 1 or 0) + (record[7] and 1 or 0)
    lane.parked_until, lane.probes, lane.opens = record[2], record[3], record[4]
    lane.paused, lane.last_claim_at = record[5] or nil, record[6]
    lane.limits = record[7] and true or nil
    lane.rate, lane.concurrency = record[8], record[9]
    lane.budget, lane.budget_at = record[10], record[11]
    if record[7] then
        call('HSET', base .. 'limits', name, record[7])
    else
        call('HDEL', base .. 'limits', name)
    end
    call(lane.paused and 'SADD' or 'SREM', base .. 'paused_lanes', name)
    call('HINCRBY', base .. 'meta', 'limits_version', 1)
    remove_from_rotation(lane)
end

-- id, lane, policy, idempotency key, the key as an id or nil, and the state without its number,
-- lane and policy (see `tasks.lua`); ARGV: the part that never changes
function importers.task(record, packed_task)
    local id, lane_name, key, key_id, state = record[1], record[2], record[4], record[5], record[6]
    local tenant = tenant_of(lane_name)
    if call('EXISTS', base .. 'state:' .. id) == 1 then return end
    if find_by_key(tenant, key, key_id) then return end
    local lane = find_lane(lane_name) or create_lane(lane_name)
    local use = find_or_create_use(tenant, record[3])
    state.n = next_task_number()
    state.l, state.p = lane.id, use.id
    if key_id == id then
        state.u = 1
    else
        call('SET', base .. 'key:' .. tenant .. '\0' .. key, id)
    end
    if state.v then count_tasks_of_version(use, state.v, 1) end
    call('SET', base .. 'task:' .. id, packed_task)
    if state.s <= IN_FLIGHT then
        write_live(id, state, state.w or state.d, nil)
        return
    end
    call('ZADD', list_key(tenant, state.s), state.n, id)
    call('ZADD', base .. 'retention:' .. state.s, state.e, id)
    count_transition(lane, state.p, nil, state.s)
    write_state(id, state)
end

-- tenant, id of the task, number; ARGV: encoded attempt
function importers.attempt(record, packed_attempt)
    local key = base .. 'log:' .. record[2]
    if find_task(record[1], record[2]) and call('LLEN', key) < record[3] then
        call('RPUSH', key, packed_attempt)
    end
end

-- ARGV: encoded replay
function importers.replay(_, packed_replay)
    local replay = decode(packed_replay)
    if not load_replay(replay.id) then write_replay(replay, nil) end
end

-- id of a replay, id of a task. The replay may be in another partition.
function importers.replayed_task(record)
    if call('EXISTS', base .. 'replay:' .. record[1]) == 1 then
        call('ZADD', base .. 'replayed:' .. record[1], 0, record[2])
    end
end

for position, record in ipairs(records) do
    importers[kind](record, ARGV[4 + position])
end
flush(false)
