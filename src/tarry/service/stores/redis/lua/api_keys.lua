--! uses records
-- Stores, finds, lists or revokes API keys; all are in one partition. args: action, and then
--   put: id, digest; ARGV[5] is the encoded `ApiKeyRecord` without times
--   find: digest
--   list: ids after this id, limit
--   revoke: id
-- A key is returned as three values: record, creation time, and time of revocation (0: none).

local action = args[1]
local records_key, ids_key = base .. 'api_keys', base .. 'api_key_ids'

local function emit_key(reply, id)
    local packed = call('HGET', records_key, id)
    require_key('api_keys', packed)
    reply[#reply + 1] = packed
    reply[#reply + 1] = tonumber(call('HGET', base .. 'api_keys_created', id) or 0)
    reply[#reply + 1] = tonumber(call('HGET', base .. 'api_keys_revoked', id) or 0)
    return reply
end

if action == 'put' then
    if call('HSETNX', records_key, args[2], ARGV[5]) == 1 then
        call('HSET', base .. 'api_key_digests', args[3], args[2])
        call('HSET', base .. 'api_keys_created', args[2], now)
        call('ZADD', ids_key, 0, args[2])
    end
    return 1
elseif action == 'find' then
    local id = call('HGET', base .. 'api_key_digests', args[2])
    if id then return emit_key({}, id) end
    -- Without this check, valid keys would be rejected as unknown.
    local has_digests = call('EXISTS', base .. 'api_key_digests') == 1
    require_key('api_key_digests', has_digests or call('EXISTS', records_key) == 0)
    return false
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
