--! uses records tasks
-- Reads records for a transfer to another store.
--
-- args:    kind, position, limit, and then for the kind
--            'tenant'             nothing; the position is a name
--            'versions'           tenant, version; the position is the policy of the version
--            'deleted policies'   nothing; the position is the id of a policy use
--            'replays'            nothing; the position is a rank
--            'replayed tasks'     id of a replay; the position is a rank
-- reply:   for the kind, after the position
--            'tenant'             next name, or nil
--            'versions'           four values of each version: policy, version, creation time,
--                                 document
--            'deleted policies'   last id that was read (0: no more); then three values of each:
--                                 tenant, policy, last version
--            'replays'            encoded replays
--            'replayed tasks'     ids of tasks

local kind, position, limit = unpack(args, 1, 3)
local exporters = {}

function exporters.tenant()
    local names = call('ZRANGEBYLEX', base .. 'tenant_names', '(' .. position, '+', 'LIMIT', 0, 1)
    return names[1] or false
end

function exporters.versions(tenant_name, after_version)
    local reply = {}
    local first = position == '' and '-' or '[' .. position
    local policies = call('ZRANGEBYLEX', base .. 'policy_ids:' .. tenant_name, first, '+',
                          'LIMIT', 0, limit + 1)
    for _, policy in ipairs(policies) do
        local newest = tonumber(call('HGET', base .. 'policies:' .. tenant_name, policy) or 0)
        local first_version = policy == position and after_version + 1 or 1
        for version = first_version, newest do
            local name = version .. ':' .. policy
            local document = call('HGET', base .. 'documents:' .. tenant_name, name)
            if document then
                if #reply >= 4 * limit then return reply end
                local created_at = call('HGET', base .. 'created:' .. tenant_name, name)
                reply[#reply + 1] = policy
                reply[#reply + 1] = version
                reply[#reply + 1] = tonumber(created_at or 0)
                reply[#reply + 1] = document
            end
        end
    end
    return reply
end

exporters['deleted policies'] = function()
    local last_id = tonumber(call('HGET', base .. 'meta', 'last_use') or 0)
    local reply = {0}
    for id = position + 1, last_id do
        local packed = call('GET', base .. 'use:' .. id)
        local use = packed and decode(packed)
        if use and use.deleted > 0 then
            reply[#reply + 1] = use.tenant
            reply[#reply + 1] = use.policy
            reply[#reply + 1] = use.deleted
        end
        if id - position >= limit and id < last_id then
            reply[1] = id
            break
        end
    end
    return reply
end

function exporters.replays()
    local reply = {}
    for _, id in ipairs(call('ZRANGE', base .. 'replays', position, position + limit - 1)) do
        reply[#reply + 1] = call('GET', base .. 'replay:' .. id) or nil
    end
    return reply
end

exporters['replayed tasks'] = function(replay_id)
    return call('ZRANGE', base .. 'replayed:' .. replay_id, position, position + limit - 1)
end

return exporters[kind](args[4], args[5])
