--! uses records tasks
-- Finds the leases of a worker. args: worker, length of its leases, name of a lane, cursor in the
-- leases of this lane ('0': begin with the next lane), maximum numbers of lanes and of leases to
-- read. They are limited because a script blocks Redis: to read a lease takes 4 us, and a lane may
-- have 100,000.
-- Returns the name of a lane and the cursor for the next call (an empty name: all leases were
-- read), and for each lease its id, tenant, version, and the end of its deferral or false.

local worker, length_ms, last_name, cursor = args[1], args[2], args[3], args[4]
local max_lanes, max_leases = args[5], args[6]
local first = (cursor == '0' and '(' or '[') .. last_name
local names = call('ZRANGEBYLEX', base .. 'lane_names', first, '+', 'LIMIT', 0, max_lanes)
if names[1] ~= last_name then cursor = '0' end -- the lane was removed
local reply, read_count = {'', '0'}, 0

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
            if state and state.h == worker then
                reply[#reply + 1] = id
                reply[#reply + 1] = lane.tenant
                reply[#reply + 1] = state.i
                local startable_at = state.w - length_ms
                reply[#reply + 1] = startable_at > now and startable_at or false
            end
        end
    until cursor == '0' or read_count >= max_leases
end

for position, name in ipairs(names) do
    local lane = find_lane(name)
    if lane and lane.in_flight > 0 then read_leases(lane) else cursor = '0' end
    local is_last = position == #names and #names < max_lanes
    if cursor ~= '0' or (not is_last and (read_count >= max_leases or position == #names)) then
        reply[1], reply[2] = name, cursor
        break
    end
end
return reply
