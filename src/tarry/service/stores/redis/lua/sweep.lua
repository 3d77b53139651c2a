--! uses records tasks lost_tasks replays keyed audit
-- Deletes old and unused records, at most `limit` of each kind, and checks keys (see audit.lua).
--
-- args:    how long to keep succeeded and cancelled tasks, dead letters, and replaced versions of
--            policies, in ms
--          limit
--          in the first partition {schema version, oldest compatible version, number of
--            partitions}, else nil
-- reply:   number of deleted tasks
--          whether more work may be left (1 or 0)
--          pairs of a key that was missing, and the consequence

local succeeded_ms, exhausted_ms, version_ms, limit, versions = unpack(args, 1, 5)
local PAGE_SIZE = 100
local MAX_KEPT = 10000 -- dead letters of tenants with replays that one sweep reads
local deleted_count, has_more = 0, false

-- Deletes tasks that finished with this status more than `max_age_ms` ago.
local function sweep_tasks(status, max_age_ms)
    local key, kept = base .. 'retention:' .. status, 0
    local finished_until = now - max_age_ms
    while kept < MAX_KEPT do
        local ids = call('ZRANGEBYSCORE', key, '-inf', finished_until, 'LIMIT', kept, PAGE_SIZE)
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

-- Returns the two parts of a member that has a NUL between them.
local function split(member)
    local position = string.find(member, '\0', 1, true)
    return string.sub(member, 1, position - 1), string.sub(member, position + 1)
end

local function delete_lane(lane)
    remove_from_rotation(lane)
    sleep_until(lane, nil, nil)
    call('HDEL', base .. 'lane_ids', lane.name)
    call('ZREM', base .. 'lane_names', lane.name)
    call('ZREM', base .. 'rated_lanes', lane.name)
    call('ZREM', base .. 'unused_lanes', lane.id)
    delete_keyed_of_lane(lane.name)
    call('DEL', base .. 'lane:' .. lane.id)
    lanes[lane.id], changed_lanes[lane.id] = nil, nil
    local tenant = change_tenant(lane.tenant)
    tenant.lanes = tenant.lanes - 1
    call('SET', base .. 'tenant:' .. lane.tenant, encode(tenant))
    update_tenant_checks(lane.tenant)
end

-- Deletes a version of a policy, unless a task refers to it: then the version is listed again when
-- the task is deleted.
local function delete_version(tenant_name, name)
    call('ZREM', base .. 'unused_versions', tenant_name .. '\0' .. name)
    if call('HGET', base .. 'version_tasks:' .. tenant_name, name) then return end
    call('HDEL', base .. 'documents:' .. tenant_name, name)
    call('HDEL', base .. 'created:' .. tenant_name, name)
    call('HDEL', base .. 'replaced:' .. tenant_name, name)
end

-- Deletes a policy use without tasks, unless the policy is stored.
local function delete_policy_use(id)
    local packed = call('GET', base .. 'use:' .. id)
    local use = packed and decode(packed)
    local is_unused = use and use.tasks == 0 and not use.rebuilt
    if is_unused and not call('HGET', base .. 'policies:' .. use.tenant, use.policy) then
        call('HDEL', base .. 'use_ids', use.tenant .. '\0' .. use.policy)
        call('DEL', base .. 'use:' .. id)
    end
end

write_despite_full_memory()
if versions and call('HEXISTS', meta_key, 'schema') == 0 then
    local schema, compatible, partition_count = unpack(versions)
    report_missing('meta', 'it was rebuilt')
    call('HSET', meta_key, 'schema', schema, 'compatible', compatible,
         'partitions', partition_count)
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
    delete_lane(load_lane(tonumber(id)))
end

for _, member in ipairs(first_members('unused_versions', now - version_ms)) do
    delete_version(split(member))
end

local use_ids = limit > 0 and call('SPOP', base .. 'unused_uses', limit) or {}
if limit > 0 and #use_ids == limit then has_more = true end
for _, id in ipairs(use_ids) do delete_policy_use(id) end

local missing_keys = call('LRANGE', base .. 'missing_keys', 0, -1)
if #missing_keys > 0 then call('DEL', base .. 'missing_keys') end
return {deleted_count, (has_more or must_audit) and 1 or 0, missing_keys}
