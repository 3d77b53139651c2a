-- Shared by scripts that change tasks.
--
-- `state:ID` has the state of a task, and `task:ID` the part that never changes (see codec.py). The
-- fields of a state have one letter to save memory, because every task has them. Fields that are 0
-- or empty are omitted. `TaskState` in codec.py has the same table.
--
--   n number           c created_at               a attempts
--   l lane_id          f first_due_after_ms       b attempts_before_replay
--   p policy_use_id    d next_attempt_at          x lost_attempts
--   v policy_version   w wake_at                  m replays
--   s status           e finished_at              y previous_delay
--   i version          h worker                   o backoff_offset
--   r reason           z cancelling               k last_outcome_kind
--   u key_is_id
--
-- The number counts tasks in the order of adding. wake_at is the end of the lease of an IN_FLIGHT
-- task, or of the deferral of a PENDING one. first_due_after_ms is the time from created_at until
-- the first due time. key_is_id is 1 if the idempotency key is the id: then the key has no entry of
-- its own.

-- Returns the member of a task in the queues of its lane: number (6 bytes) and id (16 bytes).
-- Members with the same wake time are therefore sorted in the order of adding.
local function queue_member(state, id)
    return struct.pack('>I6', state.n) .. id
end

local function id_of_member(member)
    return string.sub(member, 7)
end

local function number_of_member(member)
    return (struct.unpack('>I6', member))
end

local function load_state(id)
    local packed_state = call('GET', base .. 'state:' .. id)
    return packed_state and decode(packed_state) or nil
end

local function write_state(id, state)
    local packed_state = encode(state)
    call('SET', base .. 'state:' .. id, packed_state)
    return packed_state
end

-- Returns the state of a task of a tenant, or nil.
local function find_task(tenant_name, id)
    local state = load_state(id)
    return state and load_lane(state.l).tenant == tenant_name and state or nil
end

-- Appends a task to a reply, as five values: id, state, the part that never changes, name of the
-- lane, name of the policy. Returns whether it was appended: a task without content is omitted. The
-- packed parts are optional.
local function append_task(reply, id, state, packed_state, packed_task)
    packed_task = packed_task or call('GET', base .. 'task:' .. id)
    if not packed_task then return false end
    local size = #reply
    reply[size + 1] = id
    reply[size + 2] = packed_state or encode(state)
    reply[size + 3] = packed_task
    reply[size + 4] = load_lane(state.l).name
    reply[size + 5] = load_policy_use(state.p).policy
    return true
end

-- Returns the key of the queue of a live task.
local function queue_key(state)
    if state.s == IN_FLIGHT then return base .. 'leased:' .. state.l end
    return base .. (state.k and 'retry:' or 'first:') .. state.l
end

-- Returns the key of a tenant's tasks with a status. PENDING and IN_FLIGHT have the same list.
local function list_key(tenant_name, status)
    if status <= IN_FLIGHT then return base .. 'live:' .. tenant_name end
    return base .. 'ended:' .. status .. ':' .. tenant_name
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

-- Writes a task that is now PENDING or IN_FLIGHT. `queue_time` is its score in the queue;
-- `old_status` is nil for a new task. Returns the packed state.
local function write_live_task(id, state, queue_time, old_status)
    local lane = load_lane(state.l)
    call('ZADD', queue_key(state), queue_time, queue_member(state, id))
    if not old_status or old_status > IN_FLIGHT then
        call('ZADD', list_key(lane.tenant, PENDING), state.n, id)
    end
    count_transition(lane, state.p, old_status, state.s)
    return write_state(id, state)
end

-- Makes a task PENDING. `deferred_until` is later than `due`, or nil.
local function make_pending(id, state, due, deferred_until)
    local old_status = state.s
    remove_from_queue(id, state)
    state.s, state.d, state.w, state.h, state.i = PENDING, due, deferred_until, nil, state.i + 1
    write_live_task(id, state, deferred_until or due, old_status)
end

-- Leases a task; the caller has removed it from its queue. Returns the packed state.
local function lease_task(id, state, worker, length_ms, old_status)
    local startable_at = state.s == PENDING and state.w or state.d
    state.s, state.h, state.i = IN_FLIGHT, worker, state.i + 1
    state.w = math.max(now, startable_at) + length_ms
    return write_live_task(id, state, state.w, old_status)
end

-- Makes a task SUCCEEDED, EXHAUSTED or CANCELLED.
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
    state.e, state.r, state.x, state.z = nil, nil, nil, nil
    state.y, state.o, state.k = nil, nil, nil
    state.b, state.m = state.a, (state.m or 0) + 1
    write_live_task(id, state, now, old_status)
end

local function log_attempt(id, tenant_name, outcome, packed_attempt)
    call('RPUSH', base .. 'log:' .. id, packed_attempt)
    count_attempt(tenant_name, outcome)
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

-- Releases a lease; if a cancellation was requested, the task is then CANCELLED. Returns whether it
-- was cancelled.
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
    local length = struct.unpack('>I4', packed_task)
    local head = decode(string.sub(packed_task, 5, 4 + length))
    return head[1], head[2]
end

-- Deletes a task, and lists its body as orphaned.
local function delete_task(id, state)
    local lane, packed_task = load_lane(state.l), call('GET', base .. 'task:' .. id)
    local key, owned_body_ref
    if packed_task then
        key, owned_body_ref = decode_head(packed_task)
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
        count_tasks_of_version(load_policy_use(state.p), state.v, -1)
    end
    count_transition(lane, state.p, state.s, nil)
end

-- Returns a new number for a task. If `meta` was lost, the numbers continue after the last one.
local function next_task_number()
    local number = call('HINCRBY', base .. 'meta', 'last_task', 1)
    if number > 1 then return number end
    for _, tenant_name in ipairs(call('ZRANGE', base .. 'tenant_names', 0, -1)) do
        for status = IN_FLIGHT, CANCELLED do
            local key = list_key(tenant_name, status)
            local last_number = call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]
            number = math.max(number, tonumber(last_number or 0) + 1)
        end
    end
    call('HSET', base .. 'meta', 'last_task', string.format('%.0f', number))
    return number
end

-- Returns the id and state of the task with an idempotency key, or nil. `key_id` is the key as an
-- id, or nil if it has not the form of an id.
local function find_by_key(tenant_name, key, key_id)
    local id = call('GET', base .. 'key:' .. tenant_name .. '\0' .. key)
    if id then
        return id, load_state(id)
    end
    local state = key_id and find_task(tenant_name, key_id)
    if state and state.u then
        return key_id, state
    end
end

-- Stores what a new task has besides its state: its content and its idempotency key. Sets the
-- number, the lane and the policy of `state`. Returns the lane. `key_id`: see `find_by_key`.
local function store_content(id, state, lane_name, policy, key, key_id, packed_task)
    local lane = find_or_create_lane(lane_name)
    local use = find_or_create_policy_use(lane.tenant, policy)
    state.n, state.l, state.p = next_task_number(), lane.id, use.id
    if key_id == id then
        state.u = 1
    else
        call('SET', base .. 'key:' .. lane.tenant .. '\0' .. key, id)
    end
    if state.v then count_tasks_of_version(use, state.v, 1) end
    call('SET', base .. 'task:' .. id, packed_task)
    return lane
end

-- Adds a task, and leases it if that is requested and possible. Returns its state.
--
-- `new_task` is an array: id, lane, policy, version of the policy, idempotency key, the key as an
-- id (nil if it has not that form), delay in ms or nil, due time if the delay is nil, whether to
-- lease the task. `terms` is an array, or nil to lease no task: worker, length of the lease,
-- horizon.
local function add_task(new_task, packed_task, terms)
    local id, lane_name, policy, version, key, key_id = unpack(new_task, 1, 6)
    local delay_ms, due, is_lease_requested = unpack(new_task, 7, 9)
    if delay_ms then due = now + delay_ms end
    due = math.max(now, due)
    local state = {c = now, d = due, i = 0, s = PENDING, v = version}
    if due ~= now then state.f = due - now end
    local lane = store_content(id, state, lane_name, policy, key, key_id, packed_task)
    local is_active = not lane.paused and not lane.parked_until
    if terms and is_lease_requested and is_active then
        local worker, length_ms, horizon_ms = unpack(terms)
        if due <= now + horizon_ms then
            state.s, state.h, state.w = IN_FLIGHT, worker, due + length_ms
        end
    end
    write_live_task(id, state, state.w or due, nil)
    return state
end
