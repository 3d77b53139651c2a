--! uses records
-- Creates the store if it does not exist. args: schema version, number of partitions (nil: any).
-- Returns the stored schema version and number of partitions.

local key = base .. 'meta'
if not call('HGET', key, 'schema') then
    call('HSET', key, 'schema', args[1])
    call('HSET', key, 'partitions', args[2])
end
return {tonumber(call('HGET', key, 'schema')), tonumber(call('HGET', key, 'partitions'))}
