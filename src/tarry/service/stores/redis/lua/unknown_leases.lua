--! uses records tasks
-- Finds the leases of a worker, lane by lane.
--
-- args:    worker, length of its leases in ms
--          lane, cursor     position after the last call; at first '' and '0'
--          maximum numbers of lanes and of leases to read. They are limited because a script blocks
--          Redis: to read a lease takes 4 us, and a lane may have 100,000.
-- reply:   lane, cursor     position for the next call; an empty lane: all leases were read
--          then for each lease: id, tenant, version, end of the deferral or false
--
-- A position is the name of a lane, and the cursor of ZSCAN in its leases. '0': they were all read,
-- so the next call begins with the next lane.

local worker, length_ms, last_name, cursor, max_lanes, max_leases = unpack(args, 1, 6)
local is_within_lane = cursor ~= '0'
local first = (is_within_lane and '[' or '(') .. last_name
local names = call('ZRANGEBYLEX', base .. 'lane_names', first, '+', 'LIMIT', 0, max_lanes)
if names[1] ~= last_name then cursor = '0' end -- the lane was removed
local reply, read_count = {'', '0'}, 0

local function append_lease(id, state, tenant_name)
    local startable_at = state.w - length_ms
    reply[#reply + 1] = id
    reply[#reply + 1] = tenant_name
    reply[#reply + 1] = state.i
    reply[#reply + 1] = startable_at > now and startable_at or false
end

-- Reads leases of a lane, and sets `cursor` to that of the next ones ('0': all were read).
local function read_leases(lane)
    repeat
        -- ZSCAN returns every lease that exists all the time, although others are released.
        local page = call('ZSCAN', base .. 'leased:' .. lane.id, cursor, 'COUNT', max_leases)
        cursor = page[1]
        for index = 1, #page[2], 2 do
            local id = id_of_member(page[2][index])
            local state = load_state(id)
            read_count = read_count + 1
            if state and state.h == worker then append_lease(id, state, lane.tenant) end
        end
    until cursor == '0' or read_count >= max_leases
end

for position, name in ipairs(names) do
    local lane = find_lane(name)
    if lane and lane.in_flight > 0 then read_leases(lane) else cursor = '0' end
    local is_last_name = position == #names
    local is_last_lane = is_last_name and #names < max_lanes
    if cursor ~= '0' or (not is_last_lane and (read_count >= max_leases or is_last_name)) then
        reply[1], reply[2] = name, cursor
        break
    end
end
return reply
