--! uses records
-- Reads or writes the mark of a transfer. args: action. To set the mark, ARGV[4] is the encoded
-- mark; without it, the mark is removed.

local key = base .. 'transfer'
if args[1] == 'set' then
    if ARGV[4] then call('SET', key, ARGV[4]) else call('DEL', key) end
end
return call('GET', key)
