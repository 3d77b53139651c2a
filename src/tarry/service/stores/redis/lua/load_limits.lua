--! uses records
-- Returns the settings of lanes: limits and pauses.
--
-- args:    kind of the records of processes that lease tasks
--          whether to return the settings, or only the first two values
-- reply:   version of the settings
--          number of processes that lease tasks (0, except in the partition of the processes)
--          pairs of a lane and its limits as JSON
--          names of the paused lanes

local process_kind, has_settings = unpack(args, 1, 2)
local version = tonumber(call('HGET', base .. 'meta', 'limits_version') or 0)
local process_count = call('ZCOUNT', base .. 'keyed_expiry:' .. process_kind, '(' .. now, '+inf')
if not has_settings then return {version, process_count} end
return {version, process_count, call('HGETALL', base .. 'limits'),
        call('SMEMBERS', base .. 'paused_lanes')}
