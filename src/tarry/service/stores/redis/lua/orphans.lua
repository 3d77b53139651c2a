--! uses records
-- Lists or forgets references to orphaned bodies.
--
-- args:    'list', maximum number of references; or 'forget', references
-- reply:   for 'list': references

local action = args[1]
if action == 'list' then
    return call('SRANDMEMBER', base .. 'orphans', args[2])
end
for _, ref in ipairs(args[2]) do
    call('SREM', base .. 'orphans', ref)
end
