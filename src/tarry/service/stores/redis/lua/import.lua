--! uses records tasks replays keyed
-- Stores records of another store, unless they exist.
--
-- args:     kind: name of an importer below
--           records, each an array; the comment of the importer lists its elements
-- values:   for each record its binary part; a replay has only this part

local kind, records = unpack(args, 1, 2)
local importers = {}

-- tenant, id, version, creation time; value: document
function importers.policy(record, document)
    local tenant, id, version, created_at = unpack(record)
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
        local use = find_or_create_policy_use(tenant, id)
        use.deleted = 0
        change_policy_use(use)
        call('ZADD', base .. 'policy_ids:' .. tenant, 0, id)
    end
    call('HSET', base .. 'policies:' .. tenant, id, version)
end

-- tenant, policy, last version
function importers.deleted_policy(record)
    local tenant_name, policy, last_version = unpack(record)
    local use = find_or_create_policy_use(tenant_name, policy)
    use.deleted = last_version
    change_policy_use(use)
end

-- owner, kind, key, time of the write; value: the value
function importers.record(record, value)
    local owner, kind_of_record, key, written_at = unpack(record)
    if not read_keyed(owner, kind_of_record, key) then
        write_keyed(owner, kind_of_record, key, value, written_at, nil)
    end
end

-- name, time until which the lane is parked or nil, probes, opens, paused, time of the last claim,
-- limits as JSON or nil, rate, concurrency, budget, time of its last change
function importers.lane(record)
    local name, parked_until, probes, opens, is_paused, last_claim_at = unpack(record, 1, 6)
    local limits, rate, concurrency, budget, budget_at = unpack(record, 7, 11)
    local lane = find_or_create_lane(name)
    local tenant = change_tenant(lane.tenant)
    tenant.limited = tenant.limited - (lane.limits and 1 or 0) + (limits and 1 or 0)
    lane.parked_until, lane.probes, lane.opens = parked_until, probes, opens
    lane.paused, lane.last_claim_at = is_paused or nil, last_claim_at
    lane.limits = limits and true or nil
    lane.rate, lane.concurrency = rate, concurrency
    lane.budget, lane.budget_at = budget, budget_at
    if limits then
        call('HSET', base .. 'limits', name, limits)
    else
        call('HDEL', base .. 'limits', name)
    end
    call(lane.paused and 'SADD' or 'SREM', base .. 'paused_lanes', name)
    call('HINCRBY', base .. 'meta', 'limits_version', 1)
    remove_from_rotation(lane)
end

-- id, lane, policy, idempotency key, the key as an id or nil, and the state without its number,
-- lane and policy (see tasks.lua); value: the part that never changes
function importers.task(record, packed_task)
    local id, lane_name, policy, key, key_id, state = unpack(record, 1, 6)
    local tenant_name = tenant_of(lane_name)
    if call('EXISTS', base .. 'state:' .. id) == 1 then return end
    if find_by_key(tenant_name, key, key_id) then return end
    local lane = store_content(id, state, lane_name, policy, key, key_id, packed_task)
    if state.s <= IN_FLIGHT then
        write_live_task(id, state, state.w or state.d, nil)
        return
    end
    call('ZADD', list_key(tenant_name, state.s), state.n, id)
    call('ZADD', base .. 'retention:' .. state.s, state.e, id)
    count_transition(lane, state.p, nil, state.s)
    write_state(id, state)
end

-- tenant, id of the task, number of the attempt; value: encoded attempt
function importers.attempt(record, packed_attempt)
    local tenant_name, id, number = unpack(record)
    local key = base .. 'log:' .. id
    if find_task(tenant_name, id) and call('LLEN', key) < number then
        call('RPUSH', key, packed_attempt)
    end
end

-- value: encoded replay
function importers.replay(_, packed_replay)
    local replay = decode(packed_replay)
    if not load_replay(replay.id) then write_replay(packed_replay, nil) end
end

-- id of a replay, id of a task. The replay may be in another partition.
function importers.replayed_task(record)
    local replay_id, id = unpack(record)
    if call('EXISTS', base .. 'replay:' .. replay_id) == 1 then
        call('ZADD', base .. 'replayed:' .. replay_id, 0, id)
    end
end

for position, record in ipairs(records) do
    importers[kind](record, ARGV[4 + position]) -- the values follow four other arguments
end
flush()
