--! uses records
-- Writes, reads, lists or deletes policies of a tenant.
--
-- args:     action, tenant, policy, and then for the action
--             'read'     nothing; what a write depends on
--             'write'    the newest version as it was read (0: none), version to add, quota of
--                        versions of the tenant or nil, creation time
--             'get'      version, or nil: the newest
--             'list'     limit, maximum number of bytes; the list begins after the policy
--             'delete'   nothing
-- values:   to write: the document
-- reply:    status, and then four values of each policy: id, version, creation time, document
--           to read, instead of the status: time, number of versions of all policies of the tenant,
--             last version before the policy was deleted (0: it was not)
--           to write: 1, or 0 if another version was added meanwhile
--
-- Keys: VERSION:POLICY is the name of a version.
--
--   policies:TENANT        hash POLICY -> newest version
--   policy_ids:TENANT      sorted set of the policies, all with the score 0
--   documents:TENANT       hash VERSION:POLICY -> document
--   created:TENANT         hash VERSION:POLICY -> creation time
--   replaced:TENANT        hash VERSION:POLICY -> time when the version was replaced
--   version_tasks:TENANT   hash VERSION:POLICY -> number of tasks that refer to the version
--   unused_versions        TENANT\0VERSION:POLICY of replaced versions without tasks, by that time

local action, tenant, policy = unpack(args, 1, 3)
local newest_key, ids_key = base .. 'policies:' .. tenant, base .. 'policy_ids:' .. tenant
local documents_key, created_key = base .. 'documents:' .. tenant, base .. 'created:' .. tenant
local replaced_key = base .. 'replaced:' .. tenant

local function newest_version(id)
    return tonumber(call('HGET', newest_key, id) or nil)
end

-- Appends a version of a policy to a reply.
local function append_policy(reply, id, version)
    local name = version .. ':' .. id
    reply[#reply + 1] = id
    reply[#reply + 1] = version
    reply[#reply + 1] = tonumber(call('HGET', created_key, name) or 0)
    reply[#reply + 1] = call('HGET', documents_key, name)
    return reply
end

-- Adds a version, unless another process has added one, or the tenant has too many. A quota of nil
-- means that there is none.
local function write(expected, version, quota, created_at, document)
    local newest = newest_version(policy)
    if (newest or 0) ~= expected then return 0 end
    if quota and call('HLEN', documents_key) >= quota then return 0 end
    if newest then
        local name = newest .. ':' .. policy
        call('HSET', replaced_key, name, created_at)
        if not call('HGET', base .. 'version_tasks:' .. tenant, name) then
            call('ZADD', base .. 'unused_versions', created_at, tenant .. '\0' .. name)
        end
    else
        local use = find_or_create_policy_use(tenant, policy)
        if use.deleted >= version then return 0 end
        use.deleted = 0
        change_policy_use(use)
        call('ZADD', ids_key, 0, policy)
        call('ZADD', base .. 'tenant_names', 0, tenant)
    end
    local name = version .. ':' .. policy
    call('HSET', newest_key, policy, version)
    call('HSET', documents_key, name, document)
    call('HSET', created_key, name, created_at)
    flush()
    return 1
end

local function read()
    local newest = newest_version(policy)
    local use_id = call('HGET', base .. 'use_ids', tenant .. '\0' .. policy)
    local deleted = use_id and load_policy_use(tonumber(use_id)).deleted or 0
    local reply = {now, call('HLEN', documents_key), deleted}
    return newest and append_policy(reply, policy, newest) or reply
end

local function delete()
    local newest = newest_version(policy)
    if not newest then return {'missing'} end
    local use = find_or_create_policy_use(tenant, policy)
    if use.live > 0 then return {'conflict'} end
    if use.rebuilt and count_live_tasks(tenant) > 0 then
        return {'conflict'} -- the number of live tasks of the policy is not known
    end
    use.deleted = newest
    change_policy_use(use)
    for version = 1, newest do
        local name = version .. ':' .. policy
        if call('HDEL', documents_key, name) == 1 then
            call('HDEL', created_key, name)
            call('HDEL', replaced_key, name)
            call('ZREM', base .. 'unused_versions', tenant .. '\0' .. name)
        end
    end
    call('HDEL', newest_key, policy)
    call('ZREM', ids_key, policy)
    flush()
    return {'deleted'}
end

if action == 'read' then
    return read()
elseif action == 'write' then
    return write(args[4], args[5], args[6], args[7], ARGV[5])
elseif action == 'delete' then
    return delete()
elseif action == 'get' then
    local version = args[4] or newest_version(policy)
    if not version or call('HEXISTS', documents_key, version .. ':' .. policy) == 0 then
        return {'missing'}
    end
    return append_policy({'found'}, policy, version)
end
local reply, bytes = {'complete'}, 0
local limit, max_bytes = args[4], args[5]
for index, id in ipairs(call('ZRANGEBYLEX', ids_key, '(' .. policy, '+', 'LIMIT', 0, limit + 1)) do
    if index > limit or bytes >= max_bytes then
        reply[1] = 'more'
        break
    end
    local version = newest_version(id)
    if version and call('HEXISTS', documents_key, version .. ':' .. id) == 1 then
        append_policy(reply, id, version)
        bytes = bytes + #reply[#reply]
    end
end
return reply
