--! uses records
-- Creates or reads the `meta` of a partition.
--
-- args:    action, and then for the action
--            'read'       nothing
--            'create'     schema version, oldest compatible version, number of partitions,
--                         identity. In the first partition. It also records that a newer version of
--                         tarry uses the store.
--            'mark'       identity. In the other partitions.
--            'complete'   nothing. In the first partition, when all others are marked: a start that
--                         was interrupted before is continued by the next one.
-- reply:   schema version, oldest compatible version, number of partitions, identity, whether the
--          store is complete (1 or 0). What is missing is false.

local key = base .. 'meta'

local function get_number(field)
    return tonumber(call('HGET', key, field) or nil) or false
end

local function create(schema, compatible, partition_count, identity)
    local stored_schema = get_number('schema')
    if not stored_schema then
        -- Tenants would be looked up in the wrong partitions if the number of partitions was lost.
        local has_data = call('EXISTS', base .. 'tenant_names', base .. 'lane_ids',
                              base .. 'counters', base .. 'keyed_kinds') > 0
        require_key('meta', not has_data)
        call('HSET', key, 'partitions', partition_count)
    end
    if not stored_schema or stored_schema < schema then
        call('HSET', key, 'schema', schema)
        call('HSET', key, 'compatible', compatible)
    end
    call('HSETNX', key, 'identity', identity)
end

local action = args[1]
if action == 'create' then
    create(unpack(args, 2, 5))
elseif action == 'mark' then
    call('HSETNX', key, 'identity', args[2])
elseif action == 'complete' then
    call('HSET', key, 'complete', 1)
end
local schema = get_number('schema')
return {schema, get_number('compatible') or schema, get_number('partitions'),
        call('HGET', key, 'identity'), get_number('complete') and 1 or 0}
