--! uses records keyed
-- Reads, lists, writes or exports records by owner, kind and key.
--
-- args:    action, and then for the action
--            'read'     addresses, each an array: owner, kind, key
--            'list'     owner, kind, key after which the list begins, limit, maximum number of
--                       bytes
--            'write'    changes, each an array: owner, kind, key, value (nil: delete the record),
--                       expected value (nil: no record), whether the change is unconditional,
--                       lifetime in ms or nil
--            'export'   owner, kind and key after which the list begins, limit, maximum number of
--                       bytes
-- reply:   for the action
--            'read'     now, and four values of each record, see `append_keyed`; false is the value
--                       of a record that does not exist
--            'list'     likewise
--            'write'    1, or 0 if a change conflicts: then nothing is changed
--            'export'   owner, kind, key, value and time of records that do not expire

local action = args[1]

local function read(addresses)
    local reply = {now}
    for _, address in ipairs(addresses) do
        local owner, kind, key = unpack(address)
        rebuild_or_require(owner, kind)
        append_keyed(reply, key, read_keyed(owner, kind, key) or {false, 0})
    end
    return reply
end

local function list(owner, kind, after, limit, max_bytes)
    local _, names_key = redis_keys_of(owner, kind)
    rebuild_or_require(owner, kind)
    local reply, bytes = {now}, 0
    local first = '(' .. after
    while true do
        local keys = call('ZRANGEBYLEX', names_key, first, '+', 'LIMIT', 0, limit)
        for _, key in ipairs(keys) do
            local record = read_keyed(owner, kind, key)
            if record then
                append_keyed(reply, key, record)
                bytes = bytes + #record[1]
                if bytes >= max_bytes or #reply > 4 * limit then return reply end
            end
        end
        if #keys < limit then return reply end
        first = '(' .. keys[#keys]
    end
end

local function has_conflict(change)
    local owner, kind, key, _, expected, is_unconditional, lifetime_ms = unpack(change, 1, 7)
    rebuild_or_require(owner, kind, lifetime_ms)
    if is_unconditional then return false end
    local record = read_keyed(owner, kind, key)
    return (record and record[1] or nil) ~= expected
end

local function write(changes)
    write_despite_full_memory()
    for _, change in ipairs(changes) do
        if has_conflict(change) then return 0 end
    end
    for _, change in ipairs(changes) do
        local owner, kind, key, value, _, _, lifetime_ms = unpack(change, 1, 7)
        if value then
            write_keyed(owner, kind, key, value, now, lifetime_ms and now + lifetime_ms)
        else
            delete_keyed(owner, kind, key)
        end
    end
    return 1
end

if action == 'read' then return read(args[2]) end
if action == 'list' then return list(unpack(args, 2, 6)) end
if action == 'write' then return write(args[2]) end

local owner, kind, after, limit, max_bytes = unpack(args, 2, 6)
local reply, bytes = {}, 0

-- Appends the records with keys after `first`; returns whether the reply is complete.
local function export(of_owner, of_kind, first)
    local _, names_key = redis_keys_of(of_owner, of_kind)
    rebuild_or_require(of_owner, of_kind)
    while true do
        local keys = call('ZRANGEBYLEX', names_key, first, '+', 'LIMIT', 0, limit)
        for _, key in ipairs(keys) do
            local record = read_keyed(of_owner, of_kind, key)
            if record and not record[3] then
                for _, value in ipairs({of_owner, of_kind, key, record[1], record[2]}) do
                    reply[#reply + 1] = value
                end
                bytes = bytes + #record[1]
                if bytes >= max_bytes or #reply >= 5 * limit then return true end
            end
        end
        if #keys < limit then return false end
        first = '(' .. keys[#keys]
    end
end

-- Without this check, an export after the loss of `keyed_owners` would leave out all records.
local has_owners = call('EXISTS', base .. 'keyed_owners') == 1
require_key('keyed_owners', has_owners or call('EXISTS', base .. 'keyed_kinds') == 0)
-- First the rest of the owner with which the previous page ended (kind '': there is none), then the
-- owners after it.
local is_complete = kind ~= '' and export(owner, kind, '(' .. after)
local first = kind == '' and '-' or '(' .. owner .. '\0' .. kind
while not is_complete do
    local members = call('ZRANGEBYLEX', base .. 'keyed_owners', first, '+', 'LIMIT', 0, 1)
    if #members == 0 then break end
    local of_owner, of_kind = string.match(members[1], '^(.-)%z(.*)$')
    is_complete = export(of_owner, of_kind, '-')
    first = '(' .. members[1]
end
return reply
