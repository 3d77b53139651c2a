-- Shared by scripts that change tasks.
--
-- `state:ID` has the state of a task, and `task:ID` the part that never changes (see `codec`). ID
-- has 16 bytes. The fields of a state have one letter to save memory, because every task has them
-- (see `TaskState` in `codec`). Fields that are 0 or empty are omitted.
--
--   a attempts        b attempts before replay   c created at        d next attempt at
--   e finished at     f first due at, minus c    h worker            i version
--   k last outcome    l id of the lane           m replays           n number of the task
--   o backoff offset  p id of the policy use     r reason            s status
--   u key is the id   v policy version           w end of the lease  x lost attempts
--   y previous delay  z cancellation requested
--
-- In the queues of a lane, a task is a member of 22 bytes: its number in the order of adding, and
-- its id. Members with the same wake time are therefore sorted in the order of adding.

local function queue_member(state, id)
    return struct.pack('>I6', state.n) .. id
end

local function id_of_member(member)
    return string.sub(member, 7)
end

local function load_state(id)
    local packed = call('GET', base .. 'state:' .. id)
    return packed and decode(packed) or nil
end

local function write_state(id, state)
    local packed = encode(state)
    call('SET', base .. 'state:' .. id, packed)
    return packed
end

-- Returns the state of a task of a tenant, or nil.
local function find_task(tenant, id)
    local state = load_state(id)
    return state and load_lane(state.l).tenant == tenant and state or nil
end

-- Appends a task to a reply: id, state, the part that never changes, and the names of its lane and
-- policy. Returns whether the task was appended: it is omitted if its content is missing.
local function emit_task(reply, id, state, packed_state, packed_task)
    packed_task = packed_task or call('GET', base .. 'task:' .. id)
    if not packed_task then return false end
    local size = #reply
    reply[size + 1] = id
    reply[size + 2] = packed_state or encode(state)
    reply[size + 3] = packed_task
    reply[size + 4] = load_lane(state.l).name
    reply[size + 5] = load_use(state.p).policy
    return true
end

local function queue_key(state)
    if state.s == IN_FLIGHT then return base .. 'leased:' .. state.l end
    return base .. (state.k and 'retry:' or 'first:') .. state.l
end

local function list_key(tenant, status)
    if status <= IN_FLIGHT then return base .. 'live:' .. tenant end
    return base .. 'ended:' .. status .. ':' .. tenant
end

-- Removes a task from the queue or the lists of its old status. Call it before the state changes.
local function remove_from_queue(id, state)
    if state.s <= IN_FLIGHT then
        call('ZREM', queue_key(state), queue_member(state, id))
    else
        call('ZREM', list_key(load_lane(state.l).tenant, state.s), id)
        call('ZREM', base .. 'retention:' .. state.s, id)
    end
end

-- Writes a task that is now PENDING or IN_FLIGHT.
local function write_live(id, state, wake_at, old_status)
    local lane = load_lane(state.l)
    call('ZADD', queue_key(state), wake_at, queue_member(state, id))
    if not old_status or old_status > IN_FLIGHT then
        call('ZADD', list_key(lane.tenant, PENDING), state.n, id)
    end
    count_transition(lane, state.p, old_status, state.s)
    return write_state(id, state)
end

-- `deferred_until` is later than `due`, or nil.
local function make_pending(id, state, due, deferred_until)
    local old_status = state.s
    remove_from_queue(id, state)
    state.s, state.d, state.w, state.h, state.i = PENDING, due, deferred_until, nil, state.i + 1
    write_live(id, state, deferred_until or due, old_status)
end

-- Leases a task; the caller has removed it from its queue. Returns the packed state.
local function lease(id, state, worker, length_ms, old_status)
    local startable_at = state.s == PENDING and state.w or state.d
    state.s, state.h, state.i = IN_FLIGHT, worker, state.i + 1
    state.w = math.max(now, startable_at) + length_ms
    return write_live(id, state, state.w, old_status)
end

local function end_task(id, state, status)
    local old_status, lane = state.s, load_lane(state.l)
    remove_from_queue(id, state)
    state.s, state.e, state.w, state.h, state.i = status, now, nil, nil, state.i + 1
    call('ZREM', list_key(lane.tenant, PENDING), id)
    call('ZADD', list_key(lane.tenant, status), state.n, id)
    call('ZADD', base .. 'retention:' .. status, now, id)
    count_transition(lane, state.p, old_status, status)
    write_state(id, state)
end

-- Makes a finished task due now; the policy will not count its attempts so far.
local function replay_task(id, state)
    local old_status = state.s
    remove_from_queue(id, state)
    state.s, state.d, state.f, state.i = PENDING, now, now - state.c, state.i + 1
    for _, field in ipairs({'e', 'r', 'y', 'o', 'k', 'x', 'z'}) do state[field] = nil end
    state.b, state.m = state.a, (state.m or 0) + 1
    write_live(id, state, now, old_status)
end

local function log_attempt(id, tenant, outcome, packed_attempt)
    call('RPUSH', base .. 'log:' .. id, packed_attempt)
    count_attempt(tenant, outcome)
end

-- Logs the attempt of an expired lease as lost.
local function log_lost_attempt(id, state)
    state.a = (state.a or 0) + 1
    local attempt = {
        number = state.a, scheduled_at = state.d, started_at = state.d, outcome = 'lost',
        worker = state.h,
    }
    log_attempt(id, load_lane(state.l).tenant, 'lost', encode(attempt))
end

-- Releases a lease; if a cancellation was requested, the task is CANCELLED. Returns whether it is.
local function release_lease(id, state, deferred_until)
    if state.z then
        end_task(id, state, CANCELLED)
        return true
    end
    local is_later = deferred_until and deferred_until > state.d
    make_pending(id, state, state.d, is_later and deferred_until or nil)
    return false
end

-- Counts the tasks that refer to a version of a policy. A replaced version without tasks is listed
-- for retention.
local function count_tasks_of_version(use, version, change)
    local field = version .. ':' .. use.policy
    local count = call('HINCRBY', base .. 'version_tasks:' .. use.tenant, field, change)
    if count == 0 then
        call('HDEL', base .. 'version_tasks:' .. use.tenant, field)
        local replaced_at = call('HGET', base .. 'replaced:' .. use.tenant, field)
        if replaced_at then
            call('ZADD', base .. 'unused_versions', replaced_at, use.tenant .. '\0' .. field)
        end
    end
end

-- Returns the idempotency key (nil if it is the id) and the owned body of a task.
local function decode_head(packed_task)
    local head = decode(string.sub(packed_task, 5, 4 + struct.unpack('>I4', packed_task)))
    return head[1], head[2]
end

-- Deletes a task, and lists its body as orphaned.
local function delete_task(id, state)
    local lane, packed = load_lane(state.l), call('GET', base .. 'task:' .. id)
    local key, owned_body_ref
    if packed then
        key, owned_body_ref = decode_head(packed)
    end
    remove_from_queue(id, state)
    if state.s <= IN_FLIGHT then
        call('ZREM', list_key(lane.tenant, PENDING), id)
    end
    call('DEL', base .. 'state:' .. id, base .. 'task:' .. id, base .. 'log:' .. id)
    if key then
        local key_entry = base .. 'key:' .. lane.tenant .. '\0' .. key
        -- Another task has the key if the entry or the state of this task was missing for a while.
        if call('GET', key_entry) == id then call('DEL', key_entry) end
    end
    if owned_body_ref then
        call('SADD', base .. 'orphans', owned_body_ref)
    end
    if state.v then
        count_tasks_of_version(load_use(state.p), state.v, -1)
    end
    count_transition(lane, state.p, state.s, nil)
end

local function format_id(id)
    local hex = string.gsub(id, '.', function(byte)
        return string.format('%02x', string.byte(byte))
    end)
    return (string.gsub(hex, '^(%x%x%x%x%x%x%x%x)(%x%x%x%x)(%x%x%x%x)(%x%x%x%x)',
                        '%1-%2-%3-%4-'))
end

-- Removes a member of the queues of a lane that cannot be leased, because the state or the content
-- of its task is missing. Without its state, the task becomes a dead letter: its policy and its
-- number of retries are not known. Without its content, it is deleted.
local function remove_damaged_task(lane, member, state, packed_task)
    local id = id_of_member(member)
    local number = struct.unpack('>I6', member)
    local status, due
    for kind, queue_status in pairs({leased = IN_FLIGHT, first = PENDING, retry = PENDING}) do
        local key = base .. kind .. ':' .. lane.id
        local score = call('ZSCORE', key, member)
        if score then
            status, due = queue_status, tonumber(score)
            call('ZREM', key, member)
        end
    end
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
        local created_at = struct.unpack('>I6', id) -- ids are UUIDv7
        local attempts = call('LLEN', base .. 'log:' .. id)
        local use = find_or_create_use(lane.tenant, 'default')
        changed_uses[use.id] = use
        state = {
            n = number, l = lane.id, p = use.id, s = EXHAUSTED, r = 'state-lost', e = now,
            c = math.min(created_at, due, now), d = due,
            i = now, -- above any former version, so that late results are not applied
            a = attempts > 0 and attempts or nil,
            u = not decode_head(packed_task) and 1 or nil,
        }
        call('ZREM', list_key(lane.tenant, PENDING), id)
        call('ZADD', list_key(lane.tenant, EXHAUSTED), number, id)
        call('ZADD', base .. 'retention:' .. EXHAUSTED, now, id)
        count_transition(lane, nil, status, nil)
        count_transition(lane, use.id, nil, EXHAUSTED)
        write_state(id, state)
    end
end

-- Returns a new number for a task. If `meta` was lost, the numbers continue after the last one.
local function next_task_number()
    local number = call('HINCRBY', base .. 'meta', 'last_task', 1)
    if number > 1 then return number end
    for _, name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        for status = IN_FLIGHT, CANCELLED do
            local last = call('ZREVRANGE', list_key(name, status), 0, 0, 'WITHSCORES')[2]
            number = math.max(number, tonumber(last or 0) + 1)
        end
    end
    call('HSET', base .. 'meta', 'last_task', string.format('%.0f', number))
    return number
end

-- Returns the id and state of the task with an idempotency key, or nil. `key_id` is the key as an
-- id: a key that is the id of its own task has no entry of its own.
local function find_by_key(tenant, key, key_id)
    local id = call('GET', base .. 'key:' .. tenant .. '\0' .. key)
    if id then
        return id, load_state(id)
    end
    local state = key_id and find_task(tenant, key_id)
    if state and state.u then
        return key_id, state
    end
end

-- Adds a task; `new` is described in `add.lua`. Returns its state.
local function add_task(new, packed_task, terms)
    local id, lane_name, policy, version = new[1], new[2], new[3], new[4]
    local key, key_id = new[5], new[6]
    local lane = find_lane(lane_name) or create_lane(lane_name)
    local use = find_or_create_use(lane.tenant, policy)
    local due = math.max(now, new[7] and now + new[7] or new[8])
    local state = {
        n = next_task_number(),
        l = lane.id, p = use.id, v = version, c = now, d = due, i = 0, s = PENDING,
    }
    if due ~= now then state.f = due - now end
    if key_id == id then
        state.u = 1
    else
        call('SET', base .. 'key:' .. lane.tenant .. '\0' .. key, id)
    end
    if version then count_tasks_of_version(use, version, 1) end
    call('SET', base .. 'task:' .. id, packed_task)
    local is_active = not lane.paused and not lane.parked_until
    if terms and new[9] and is_active and due <= now + terms[3] then
        state.s, state.h, state.w = IN_FLIGHT, terms[1], due + terms[2]
    end
    write_live(id, state, state.w or due, nil)
    return state
end
