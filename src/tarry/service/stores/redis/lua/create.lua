--! uses records
-- Creates the store if it does not exist, and records that a newer version of tarry uses it.
-- args: schema version, oldest compatible schema version, number of partitions.
-- Returns the stored values of them.

local key = base .. 'meta'
local schema = tonumber(call('HGET', key, 'schema'))
if not schema then
    -- Tenants would be looked up in the wrong partitions if the number of partitions was lost.
    local has_data = call('EXISTS', base .. 'tenant_names', base .. 'lane_ids', base .. 'counters',
                          base .. 'api_keys', base .. 'workers') > 0
    require_key('meta', not has_data)
    call('HSET', key, 'partitions', args[3])
end
if not schema or schema < args[1] then
    call('HSET', key, 'schema', args[1])
    call('HSET', key, 'compatible', args[2])
end
local function get(name)
    return tonumber(call('HGET', key, name))
end
return {get('schema'), get('compatible') or get('schema'), get('partitions')}
