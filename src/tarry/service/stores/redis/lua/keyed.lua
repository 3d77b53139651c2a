-- Shared by scripts that use records by owner, kind and key (see `RecordStore` in store.py).
--
-- Keys:
--
--   keyed:KIND:OWNER         hash KEY -> record as a MessagePack array: value, time of the write,
--                            time of expiry or false
--   keyed_names:KIND:OWNER   sorted set of the keys, all with the score 0
--   keyed_owners             sorted set of OWNER\0KIND, all with the score 0
--   keyed_expiry:KIND        OWNER\0KEY of records that expire, by that time
--   keyed_kinds              set of the kinds

-- Returns the Redis keys of two collections of an owner: of its records, and of their names.
local function redis_keys_of(owner, kind)
    local suffix = kind .. ':' .. owner
    return base .. 'keyed:' .. suffix, base .. 'keyed_names:' .. suffix
end

-- Rebuilds the keys of an owner if they are missing. If the records are missing, the script fails,
-- unless they expire: then they are written again soon. `expires` is nil if the caller does not
-- know whether they do.
local function rebuild_or_require(owner, kind, expires)
    local records_key, names_key = redis_keys_of(owner, kind)
    local has_records = call('EXISTS', records_key) == 1
    if has_records == (call('EXISTS', names_key) == 1) then return end
    if has_records then
        for _, key in ipairs(call('HKEYS', records_key)) do call('ZADD', names_key, 0, key) end
        call('ZADD', base .. 'keyed_owners', 0, owner .. '\0' .. kind)
        return
    end
    local first = call('ZRANGE', names_key, 0, 0)[1]
    local expiry_key = base .. 'keyed_expiry:' .. kind
    local missing_key = 'keyed:' .. kind .. ':' .. owner
    require_key(missing_key, expires or call('ZSCORE', expiry_key, owner .. '\0' .. first))
    report_missing(missing_key, 'the records are lost, and are written again')
    call('DEL', names_key, expiry_key)
end

-- Returns a record, or nil if there is none or it has expired.
local function read_keyed(owner, kind, key)
    local packed = call('HGET', (redis_keys_of(owner, kind)), key)
    local record = packed and decode(packed)
    local expires_at = record and record[3]
    if record and (not expires_at or expires_at > now) then return record end
end

local function delete_keyed(owner, kind, key)
    local records_key, names_key = redis_keys_of(owner, kind)
    call('HDEL', records_key, key)
    call('ZREM', names_key, key)
    call('ZREM', base .. 'keyed_expiry:' .. kind, owner .. '\0' .. key)
    if call('EXISTS', names_key) == 0 then
        call('ZREM', base .. 'keyed_owners', owner .. '\0' .. kind)
    end
end

-- Writes a record, unless its owner is a lane that does not exist.
local function write_keyed(owner, kind, key, value, written_at, expires_at)
    if string.find(owner, '/', 1, true) and not find_lane(owner) then return end
    local records_key, names_key = redis_keys_of(owner, kind)
    call('HSET', records_key, key, encode({value, written_at, expires_at or false}))
    call('ZADD', names_key, 0, key)
    call('ZADD', base .. 'keyed_owners', 0, owner .. '\0' .. kind)
    call('SADD', base .. 'keyed_kinds', kind)
    set_score(base .. 'keyed_expiry:' .. kind, owner .. '\0' .. key, expires_at)
end

local function delete_keyed_of_lane(lane_name)
    for _, kind in ipairs(call('SMEMBERS', base .. 'keyed_kinds')) do
        local _, names_key = redis_keys_of(lane_name, kind)
        for _, key in ipairs(call('ZRANGE', names_key, 0, -1)) do
            delete_keyed(lane_name, kind, key)
        end
    end
end

-- Appends a record to a reply: key, value, time of the write, and time of expiry (0: never).
local function append_keyed(reply, key, record)
    local value, written_at, expires_at = unpack(record, 1, 3)
    reply[#reply + 1] = key
    reply[#reply + 1] = value
    reply[#reply + 1] = written_at
    reply[#reply + 1] = expires_at or 0
end
