-- Shared by all scripts: arguments, time, constants and small functions.
--
-- A script changes one partition:
--
--   KEYS[1]             prefix of the keys of the partition (KEYS[2]: see `RedisConnection.run`)
--   ARGV[1]             time of a test clock in epoch ms; empty: the clock of the server is used
--   ARGV[2]             token of the calling store
--   ARGV[3]             identity of the store, see identity.lua
--   ARGV[4]             arguments as a MessagePack array: `args` in the header of each script
--   ARGV[5] and later   binary values that are stored as they are: `values` in these headers

local base = KEYS[1] .. ':'
local call = redis.call
local encode, decode = cmsgpack.pack, cmsgpack.unpack
local args = decode(ARGV[4])
local now = tonumber(ARGV[1])
if not now then
    local time = call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The next line is replaced by constants of `rules/transitions.py`: the number of each status;
-- COUNTERS, the fields of tenants and lanes that count the tasks in each status; LIVE_COUNT, which
-- is 1 for the statuses of live tasks, else 0.
--! constants
local MINUTE_MS, HOUR_MS = 60000, 3600000

-- Lets the script write although the memory is full. Redis checks only the first write of a script,
-- and never refuses DEL. Otherwise a server full of pending tasks could not store results, so that
-- no task would ever be finished and removed. Scripts that add tasks do not call this.
local function write_despite_full_memory()
    call('DEL', base .. 'none') -- this key does not exist
end

local function tenant_of(lane_name)
    return string.match(lane_name, '^[^/]*')
end

-- Returns the lowest score of a sorted set, or nil.
local function first_score(key)
    return tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end

-- Sets the score of a member; nil: removes the member.
local function set_score(key, member, score)
    if score then
        call('ZADD', key, score, member)
    else
        call('ZREM', key, member)
    end
end
