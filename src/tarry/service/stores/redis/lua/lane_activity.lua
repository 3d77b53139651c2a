--! uses records
-- Changes or returns the activity of lanes. args: action, and then
--   change: lane, {at, before, after, reason or nil}, maximum number of changes
--   latencies: list of {lane, {bucket, count, ...}}, length of a window in ms, maximum number of
--     windows. Empty counts remove the windows of a lane.
--   read: list of lanes; returns lane, encoded activity, ... of the lanes that have any
--
-- The key `activity:LANE_ID` is a map: `changes` and `windows`, as `LaneActivity` in model.py. The
-- rules are those of lane_activity.py. `sweep` deletes the key with its lane; a process of an older
-- version does not, so the key also expires.

local RETENTION_S = 90 * 86400
local action = args[1]

local function key_of(lane)
    return base .. 'activity:' .. lane.id
end

local function load(lane)
    local packed = call('GET', key_of(lane))
    local activity = packed and decode(packed) or {}
    activity.changes, activity.windows = activity.changes or {}, activity.windows or {}
    return activity
end

local function save(lane, activity)
    if #activity.changes + #activity.windows == 0 then
        call('DEL', key_of(lane))
    else
        call('SET', key_of(lane), encode(activity), 'EX', RETENTION_S)
    end
end

if action == 'change' then
    local lane, change, max_count = find_lane(args[2]), args[3], args[4]
    if not lane then return end
    write_despite_full_memory()
    local activity = load(lane)
    local changes = activity.changes
    local before = #changes > 0 and changes[#changes].after or change[2]
    if before == change[3] then return end
    changes[#changes + 1] = {at = change[1], before = before, after = change[3], reason = change[4]}
    while #changes > max_count do table.remove(changes, 1) end
    save(lane, activity)
elseif action == 'latencies' then
    local window_ms, max_count = args[3], args[4]
    write_despite_full_memory()
    for _, entry in ipairs(args[2]) do
        local lane, added = find_lane(entry[1]), entry[2]
        if lane then
            local activity = load(lane)
            local windows, at = activity.windows, now - now % window_ms
            if #added == 0 then
                activity.windows = {}
            else
                local last = windows[#windows]
                if not last or last.at < at then -- `last.at` is greater if the clock was set back
                    last = {at = at, counts = {}}
                    windows[#windows + 1] = last
                end
                for index = 1, #added, 2 do
                    local bucket = added[index]
                    last.counts[bucket] = (last.counts[bucket] or 0) + added[index + 1]
                end
                while #windows > max_count do table.remove(windows, 1) end
            end
            save(lane, activity)
        end
    end
else
    local reply = {}
    for _, name in ipairs(args[2]) do
        local lane = find_lane(name)
        local packed = lane and call('GET', key_of(lane))
        if packed then
            reply[#reply + 1] = name
            reply[#reply + 1] = packed
        end
    end
    return reply
end
