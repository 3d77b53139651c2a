-- Precedes each script: ends it with an error if the partition is not part of the store that the
-- caller has opened, because the server was flushed or replaced. ARGV[3] is the identity of that
-- store (empty while it is opened), which `create.lua` has written to `meta` of each partition.

if ARGV[3] ~= '' then
    local prefix = KEYS[1] .. ':'
    local found = redis.call('HGET', prefix .. 'meta', 'identity')
    if found ~= ARGV[3] then
        local has_data = redis.call('EXISTS', prefix .. 'tenant_names', prefix .. 'lane_ids',
                                    prefix .. 'counters', prefix .. 'keyed_kinds',
                                    prefix .. 'keyed_owners') > 0
        if found or not has_data then
            return redis.error_reply('STORELOST ' .. KEYS[1] .. ' ' .. (found or ''))
        end
        -- Only this key was evicted, or deleted by mistake.
        redis.call('DEL', prefix .. 'none') -- see `write_despite_full_memory`
        redis.call('HSET', prefix .. 'meta', 'identity', ARGV[3])
    end
end
