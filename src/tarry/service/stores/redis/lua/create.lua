--! uses records
-- Creates or reads the `meta` of a partition. args: action, and then
--   read: nothing
--   create, in the first partition: schema version, oldest compatible version, number of
--       partitions, identity. Also records that a newer version of tarry uses the store.
--   mark, in the others: identity
--   complete, in the first partition: nothing. All others are marked; a start that was interrupted
--       before is continued by the next one.
-- Returns the stored values: schema version, oldest compatible version, number of partitions,
-- identity, whether the store is complete (1 or 0). Missing values are false.

local key = base .. 'meta'
local function get(name)
    return tonumber(call('HGET', key, name) or nil) or false
end
local action = args[1]
if action == 'create' then
    local schema = get('schema')
    if not schema then
        -- Tenants would be looked up in the wrong partitions if the number of partitions was lost.
        local has_data = call('EXISTS', base .. 'tenant_names', base .. 'lane_ids',
                              base .. 'counters', base .. 'keyed_kinds') > 0
        require_key('meta', not has_data)
        call('HSET', key, 'partitions', args[4])
    end
    if not schema or schema < args[2] then
        call('HSET', key, 'schema', args[2])
        call('HSET', key, 'compatible', args[3])
    end
    call('HSETNX', key, 'identity', args[5])
elseif action == 'mark' then
    call('HSETNX', key, 'identity', args[2])
elseif action == 'complete' then
    call('HSET', key, 'complete', 1)
end
local schema = get('schema')
return {schema, get('compatible') or schema, get('partitions'), call('HGET', key, 'identity'),
        get('complete') and 1 or 0}
