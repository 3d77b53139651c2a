-- Shared by scripts that find tasks of which a part is missing.

-- Returns the text form of an id of 16 bytes.
local function format_id(id)
    local hex = string.gsub(id, '.', function(byte)
        return string.format('%02x', string.byte(byte))
    end)
    return (string.gsub(hex, '^(%x%x%x%x%x%x%x%x)(%x%x%x%x)(%x%x%x%x)(%x%x%x%x)',
                        '%1-%2-%3-%4-'))
end

-- Removes a member from the queues of a lane. Returns the status and the time of its queue, or nil.
local function remove_member(lane, member)
    local status, queue_time
    for queue, queue_status in pairs({leased = IN_FLIGHT, first = PENDING, retry = PENDING}) do
        local key = base .. queue .. ':' .. lane.id
        local score = call('ZSCORE', key, member)
        if score then
            status, queue_time = queue_status, tonumber(score)
            call('ZREM', key, member)
        end
    end
    return status, queue_time
end

-- Makes a live task without a state a dead letter: its policy and its number of retries are not
-- known.
local function end_task_without_state(lane, id, number, old_status, queue_time, packed_task)
    local created_at = struct.unpack('>I6', id) -- ids are UUIDv7
    local attempts = call('LLEN', base .. 'log:' .. id)
    local use = find_or_create_policy_use(lane.tenant, 'default')
    change_policy_use(use)
    local state = {
        n = number, l = lane.id, p = use.id, s = EXHAUSTED, r = 'state-lost', e = now,
        c = math.min(created_at, queue_time, now), d = queue_time,
        i = now, -- above any former version, so that late results are not applied
        a = attempts > 0 and attempts or nil,
        u = not decode_head(packed_task) and 1 or nil,
    }
    call('ZREM', list_key(lane.tenant, PENDING), id)
    call('ZADD', list_key(lane.tenant, EXHAUSTED), number, id)
    call('ZADD', base .. 'retention:' .. EXHAUSTED, now, id)
    count_transition(lane, nil, old_status, nil)
    count_transition(lane, use.id, nil, EXHAUSTED)
    write_state(id, state)
end

-- Removes a member of the queues of a lane that cannot be leased, because the state or the content
-- of its task is missing. Without its content, the task is deleted.
local function remove_damaged_task(lane, member, state, packed_task)
    local id, number = id_of_member(member), number_of_member(member)
    local status, queue_time = remove_member(lane, member)
    local text = 'task ' .. format_id(id) .. ' of lane ' .. lane.name
    if state and (state.n ~= number or state.l ~= lane.id) then
        -- The task was added again after its state was lost, and has another member now.
        count_transition(lane, nil, status, nil)
    elseif state then
        report_missing('task:' .. format_id(id), text .. ' is lost')
        delete_task(id, state)
    elseif not packed_task then
        report_missing('state:' .. format_id(id), text .. ' is lost')
        call('ZREM', list_key(lane.tenant, PENDING), id)
        call('DEL', base .. 'log:' .. id)
        count_transition(lane, nil, status, nil)
    else
        report_missing('state:' .. format_id(id), text .. ' became a dead letter (state-lost)')
        end_task_without_state(lane, id, number, status, queue_time, packed_task)
    end
end

-- Removes a finished task without a state.
local function remove_finished_task(id, status)
    report_missing('state:' .. format_id(id), 'the finished task was removed')
    call('ZREM', base .. 'retention:' .. status, id)
    for _, tenant_name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        if call('ZREM', list_key(tenant_name, status), id) == 1 then
            local counter, tenant = COUNTERS[status], change_tenant(tenant_name)
            tenant[counter] = tenant[counter] - 1
            totals[counter] = (totals[counter] or 0) - 1
        end
    end
    call('DEL', base .. 'task:' .. id, base .. 'log:' .. id)
end
