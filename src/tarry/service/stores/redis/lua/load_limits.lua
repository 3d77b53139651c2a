--! uses records
-- Returns the version of what operators have set for lanes, and the number of processes that lease
-- tasks (only in their partition). args: time after which a silent process is not counted, whether
-- to return also the limits by lane as pairs, and the names of paused lanes.

local version = tonumber(call('HGET', base .. 'meta', 'limits_version') or 0)
local count = call('ZCOUNT', base .. 'leasing_workers', '(' .. now - args[1], '+inf')
if not args[2] then return {version, count} end
return {version, count, call('HGETALL', base .. 'limits'), call('SMEMBERS', base .. 'paused_lanes')}
