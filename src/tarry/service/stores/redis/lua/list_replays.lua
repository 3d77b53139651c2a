--! uses records replays
-- Lists replays.
--
-- args:    whether to list only replays that need steps, by due time; else all, newest first
--          tenant, or nil: of all tenants of the partition
--          limit
-- reply:   encoded replays

local needs_steps_only, tenant_name, limit = unpack(args, 1, 3)
local suffix = tenant_name and ':' .. tenant_name or ''
local ids
if needs_steps_only then
    ids = call('ZRANGE', base .. 'active_replays' .. suffix, 0, limit - 1)
else
    ids = call('ZREVRANGE', base .. 'replays' .. suffix, 0, limit - 1)
end
local reply = {}
for _, id in ipairs(ids) do
    local packed = call('GET', base .. 'replay:' .. id)
    if packed then
        reply[#reply + 1] = packed
    else
        report_missing('replay:' .. id, 'the replay has ended; start another one')
        delete_replay(id)
    end
end
return reply
