--! uses records
-- Returns the version of the settings of lanes (limits and pauses), and the number of processes
-- that lease tasks (0, except in the partition of the processes). args: kind of the records of
-- these processes, whether to return the settings, too: pairs of lane and limits, and the names of
-- paused lanes.

local version = tonumber(call('HGET', base .. 'meta', 'limits_version') or 0)
local count = call('ZCOUNT', base .. 'keyed_expiry:' .. args[1], '(' .. now, '+inf')
if not args[2] then return {version, count} end
return {version, count, call('HGETALL', base .. 'limits'), call('SMEMBERS', base .. 'paused_lanes')}
