--! uses records
-- Lists or forgets references to orphaned bodies. args: action, limit or references.

if args[1] == 'list' then
    return call('SRANDMEMBER', base .. 'orphans', args[2])
end
for _, ref in ipairs(args[2]) do
    call('SREM', base .. 'orphans', ref)
end
