--! uses records secrets
-- Stores, lists or deletes signing secrets of a tenant. args: action, tenant, and then
--   put: id, lane or nil, time after which others of the lane expire, maximum number of secrets,
--        maximum number with the same lane; ARGV[5] is the encoded record without times
--   delete: id
-- A secret is returned as three values: record, creation time, time of expiry (0: never).

local action, tenant, id = args[1], args[2], args[3]
local expiry_key = base .. 'secret_expiry:' .. tenant
local not_expired = '(' .. now

local function emit_secret(reply, secret_id)
    local expires_at = call('ZSCORE', expiry_key, secret_id)
    local packed = call('HGET', base .. 'secrets:' .. tenant, secret_id)
    require_key('secrets:' .. tenant, packed)
    local created_at = call('HGET', base .. 'secrets_created:' .. tenant, secret_id)
    reply[#reply + 1] = packed
    reply[#reply + 1] = tonumber(created_at or 0)
    reply[#reply + 1] = expires_at == 'inf' and 0 or tonumber(expires_at)
    return reply
end

if call('EXISTS', expiry_key) == 0 then -- the tenant has no secrets, or the key was lost
    for _, secret_id in ipairs(call('HKEYS', base .. 'secrets:' .. tenant)) do
        local expiry = call('ZSCORE', base .. 'expiring_secrets', tenant .. '\0' .. secret_id)
        call('ZADD', expiry_key, expiry or 'inf', secret_id)
    end
end

if action == 'delete' then
    return delete_secret(tenant, id)
elseif action == 'list' then
    local reply = {}
    for _, secret_id in ipairs(call('ZRANGEBYSCORE', expiry_key, not_expired, '+inf')) do
        emit_secret(reply, secret_id)
    end
    return reply
end
local lane, expires_at, max_secrets, max_of_lane = args[4] or '', now + args[5], args[6], args[7]
local expiry = call('ZSCORE', expiry_key, id)
if expiry then
    if expiry == 'inf' or tonumber(expiry) > now then return emit_secret({}, id) end
    delete_secret(tenant, id)
end
local lane_key = base .. 'secret_expiry_of_lane:' .. tenant .. '\0' .. lane
if call('ZCOUNT', expiry_key, not_expired, '+inf') >= max_secrets
    or call('ZCOUNT', lane_key, not_expired, '+inf') >= max_of_lane then
    return false
end
for _, other in ipairs(call('ZRANGEBYSCORE', lane_key, '(' .. expires_at, '+inf')) do
    call('ZADD', lane_key, expires_at, other)
    call('ZADD', expiry_key, expires_at, other)
    call('ZADD', base .. 'expiring_secrets', expires_at, tenant .. '\0' .. other)
end
store_secret(tenant, id, lane, now, nil, ARGV[5])
return emit_secret({}, id)
