--! uses records tasks
-- Reads records for a transfer to another store. args: what, position, limit, and then
--   'tenant': position is a name; returns the next name, or nil
--   'versions': tenant; position is a policy, its version is the next argument; returns id,
--        version, creation time and document of each version after it
--   'deleted policies': position is the id of a policy use; returns the last id that was read
--        (0: no more), and tenant, policy and last version of each
--   'replays': position is a rank; returns encoded replays
--   'replayed tasks': id of a replay; position is a rank; returns ids of tasks

local what, position, limit = args[1], args[2], args[3]

if what == 'tenant' then
    local names = call('ZRANGEBYLEX', base .. 'tenant_names', '(' .. position, '+', 'LIMIT', 0, 1)
    return names[1] or false
end

local reply = {}
if what == 'versions' then
    local tenant, after_version = args[4], args[5]
    local first = position == '' and '-' or '[' .. position
    local ids = call('ZRANGEBYLEX', base .. 'policy_ids:' .. tenant, first, '+',
                     'LIMIT', 0, limit + 1)
    for _, id in ipairs(ids) do
        local newest = tonumber(call('HGET', base .. 'policies:' .. tenant, id) or 0)
        local first_version = id == position and after_version + 1 or 1
        for version = first_version, newest do
            local name = version .. ':' .. id
            local document = call('HGET', base .. 'documents:' .. tenant, name)
            if document then
                if #reply >= 4 * limit then return reply end
                reply[#reply + 1] = id
                reply[#reply + 1] = version
                local created_at = call('HGET', base .. 'created:' .. tenant, name)
                reply[#reply + 1] = tonumber(created_at or 0)
                reply[#reply + 1] = document
            end
        end
    end
elseif what == 'deleted policies' then
    local last = tonumber(call('HGET', base .. 'meta', 'last_use') or 0)
    reply[1] = 0
    for id = position + 1, last do
        local packed = call('GET', base .. 'use:' .. id)
        local use = packed and decode(packed)
        if use and use.deleted > 0 then
            reply[#reply + 1] = use.tenant
            reply[#reply + 1] = use.policy
            reply[#reply + 1] = use.deleted
        end
        if id - position >= limit and id < last then
            reply[1] = id
            break
        end
    end
elseif what == 'replays' then
    for _, id in ipairs(call('ZRANGE', base .. 'replays', position, position + limit - 1)) do
        reply[#reply + 1] = call('GET', base .. 'replay:' .. id) or nil
    end
else
    return call('ZRANGE', base .. 'replayed:' .. args[4], position, position + limit - 1)
end
return reply
