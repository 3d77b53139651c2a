--! uses records
-- Stores, finds, lists or revokes API keys; all are in one partition. args: action, and then
--   put: id, digest; ARGV[4] is the encoded `ApiKeyRecord` without times
--   find: digest
--   list: ids after this id, limit
--   revoke: id
-- A key is returned as three values: record, creation time, and time of revocation (0: none).

local action = args[1]
local records_key, ids_key = base .. 'api_keys', base .. 'api_key_ids'

local function emit_key(reply, id)
    reply[#reply + 1] = call('HGET', records_key, id)
    reply[#reply + 1] = tonumber(call('HGET', base .. 'api_keys_created', id))
    reply[#reply + 1] = tonumber(call('HGET', base .. 'api_keys_revoked', id) or 0)
    return reply
end

if action == 'put' then
    if call('HSETNX', records_key, args[2], ARGV[4]) == 1 then
        call('HSET', base .. 'api_key_digests', args[3], args[2])
        call('HSET', base .. 'api_keys_created', args[2], now)
        call('ZADD', ids_key, 0, args[2])
    end
    return 1
elseif action == 'find' then
    local id = call('HGET', base .. 'api_key_digests', args[2])
    return id and emit_key({}, id) or false
elseif action == 'revoke' then
    if call('HEXISTS', records_key, args[2]) == 0 then return 0 end
    call('HSETNX', base .. 'api_keys_revoked', args[2], now)
    return 1
end
local reply = {}
for _, id in ipairs(call('ZRANGEBYLEX', ids_key, '(' .. args[2], '+', 'LIMIT', 0, args[3])) do
    emit_key(reply, id)
end
return reply
