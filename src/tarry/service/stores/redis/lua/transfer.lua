--! uses records
-- Reads or writes the mark of a transfer. args: action. To set the mark, ARGV[5] is the encoded
-- mark; without it, the mark is removed.

local key = base .. 'transfer'
if args[1] == 'set' then
    if ARGV[5] then call('SET', key, ARGV[5]) else call('DEL', key) end
end
return call('GET', key)
