-- Shared by scripts that change signing secrets.
--
-- `secrets:TENANT`, `secrets_created:TENANT` and `secret_lanes:TENANT` have the records, creation
-- times and lanes by id. `secret_expiry:TENANT` and `secret_expiry_of_lane:TENANT\0LANE` have the
-- ids by time of expiry, and `expiring_secrets` those of all tenants that expire.

local function delete_secret(tenant, id)
    local lane = call('HGET', base .. 'secret_lanes:' .. tenant, id) or ''
    local count = call('HDEL', base .. 'secrets:' .. tenant, id)
    call('HDEL', base .. 'secrets_created:' .. tenant, id)
    call('HDEL', base .. 'secret_lanes:' .. tenant, id)
    call('ZREM', base .. 'secret_expiry:' .. tenant, id)
    call('ZREM', base .. 'secret_expiry_of_lane:' .. tenant .. '\0' .. lane, id)
    call('ZREM', base .. 'expiring_secrets', tenant .. '\0' .. id)
    return count
end

-- Stores a secret, unless it exists. Without `expires_at`, it does not expire.
local function store_secret(tenant, id, lane, created_at, expires_at, packed)
    if call('HSETNX', base .. 'secrets:' .. tenant, id, packed) == 0 then return end
    call('HSET', base .. 'secrets_created:' .. tenant, id, created_at)
    call('HSET', base .. 'secret_lanes:' .. tenant, id, lane)
    local score = expires_at or 'inf'
    call('ZADD', base .. 'secret_expiry:' .. tenant, score, id)
    call('ZADD', base .. 'secret_expiry_of_lane:' .. tenant .. '\0' .. lane, score, id)
    if expires_at then
        call('ZADD', base .. 'expiring_secrets', expires_at, tenant .. '\0' .. id)
    end
    call('ZADD', base .. 'tenant_names', 0, tenant)
end
