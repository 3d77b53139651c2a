--! uses records replays
-- Returns encoded replays, newest first, or those that need steps, by due time. args: whether they
-- need steps, tenant or nil, limit.

local suffix = args[2] and ':' .. args[2] or ''
local ids
if args[1] then
    ids = call('ZRANGE', base .. 'active_replays' .. suffix, 0, args[3] - 1)
else
    ids = call('ZREVRANGE', base .. 'replays' .. suffix, 0, args[3] - 1)
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
