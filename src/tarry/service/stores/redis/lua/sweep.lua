--! uses records tasks lost_tasks replays keyed audit
-- Deletes old and unused records, at most `limit` of each kind. args: retention of succeeded and
-- cancelled tasks, of dead letters, and of replaced policy versions; limit; schema version, oldest
-- compatible version and number of partitions, in the first partition.
-- Returns the number of deleted tasks, whether more work may be left (1 or 0), and pairs of a
-- missing key and the consequence.

local succeeded_ms, exhausted_ms, version_ms = args[1], args[2], args[3]
local limit, store = args[4], args[5]
local PAGE_SIZE = 100
local MAX_KEPT = 10000 -- dead letters of tenants with replays that one sweep reads
local deleted_count, has_more = 0, false

local function sweep_tasks(status, max_age_ms)
    local key, kept = base .. 'retention:' .. status, 0
    while kept < MAX_KEPT do
        local ids = call('ZRANGEBYSCORE', key, '-inf', now - max_age_ms, 'LIMIT', kept, PAGE_SIZE)
        if #ids == 0 then return end
        for _, id in ipairs(ids) do
            local state = load_state(id)
            if not state then
                remove_finished_task(id, status)
            elseif status == EXHAUSTED and load_tenant(load_lane(state.l).tenant).replays > 0 then
                kept = kept + 1 -- the running replay has counted this dead letter
            elseif deleted_count == limit then
                has_more = true
                return
            else
                delete_task(id, state)
                deleted_count = deleted_count + 1
            end
        end
    end
end

-- Returns the first members of a sorted set with a score up to `until_time`.
local function first_members(key, until_time)
    local members = call('ZRANGEBYSCORE', base .. key, '-inf', until_time, 'LIMIT', 0, limit)
    if limit > 0 and #members == limit then has_more = true end
    return members
end

local function split(member)
    local position = string.find(member, '\0', 1, true)
    return string.sub(member, 1, position - 1), string.sub(member, position + 1)
end

write_despite_full_memory()
if store and call('HEXISTS', meta_key, 'schema') == 0 then
    report_missing('meta', 'it was rebuilt')
    call('HSET', meta_key, 'schema', store[1], 'compatible', store[2], 'partitions', store[3])
end
local must_audit = audit()
sweep_tasks(SUCCEEDED, succeeded_ms)
sweep_tasks(CANCELLED, succeeded_ms)
sweep_tasks(EXHAUSTED, exhausted_ms)

for _, id in ipairs(first_members('ended_replays', now - exhausted_ms)) do
    delete_replay(id)
end

for _, kind in ipairs(call('SMEMBERS', base .. 'keyed_kinds')) do
    for _, member in ipairs(first_members('keyed_expiry:' .. kind, now)) do
        local owner, key = split(member)
        delete_keyed(owner, kind, key)
    end
end

flush() -- lists lanes and policies that have just become unused

for _, id in ipairs(first_members('unused_lanes', now)) do
    local lane = load_lane(tonumber(id))
    remove_from_rotation(lane)
    sleep_until(lane, nil, nil)
    call('HDEL', base .. 'lane_ids', lane.name)
    call('ZREM', base .. 'lane_names', lane.name)
    call('ZREM', base .. 'rated_lanes', lane.name)
    call('ZREM', base .. 'unused_lanes', id)
    delete_keyed_of_lane(lane.name)
    call('DEL', base .. 'lane:' .. id)
    lanes[lane.id], changed_lanes[lane.id] = nil, nil
    local tenant = change_tenant(lane.tenant)
    tenant.lanes = tenant.lanes - 1
    call('SET', base .. 'tenant:' .. lane.tenant, encode(tenant))
    update_tenant_checks(lane.tenant)
end

for _, member in ipairs(first_members('unused_versions', now - version_ms)) do
    local tenant, name = split(member)
    call('ZREM', base .. 'unused_versions', member)
    -- A version that a task refers to is listed again when the task is deleted.
    if not call('HGET', base .. 'version_tasks:' .. tenant, name) then
        call('HDEL', base .. 'documents:' .. tenant, name)
        call('HDEL', base .. 'created:' .. tenant, name)
        call('HDEL', base .. 'replaced:' .. tenant, name)
    end
end

local use_ids = limit > 0 and call('SPOP', base .. 'unused_uses', limit) or {}
if limit > 0 and #use_ids == limit then has_more = true end
for _, id in ipairs(use_ids) do
    local packed = call('GET', base .. 'use:' .. id)
    local use = packed and decode(packed)
    local is_unused = use and use.tasks == 0 and not use.rebuilt
    if is_unused and not call('HGET', base .. 'policies:' .. use.tenant, use.policy) then
        call('HDEL', base .. 'use_ids', use.tenant .. '\0' .. use.policy)
        call('DEL', base .. 'use:' .. id)
    end
end
local missing_keys = call('LRANGE', base .. 'missing_keys', 0, -1)
if #missing_keys > 0 then call('DEL', base .. 'missing_keys') end
return {deleted_count, (has_more or must_audit) and 1 or 0, missing_keys}
