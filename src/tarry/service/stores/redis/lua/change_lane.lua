--! uses records
-- Changes the state of a lane.
--
-- args:    action, name, and then for the action
--            'park'         time until which the lane is parked, probes, consecutive opens
--            'unpark'       nothing
--            'pause'        quota of lanes of the tenant, or nil
--            'resume'       nothing: ends the parking, too
--            'set_limits'   limits as JSON (nil: removes them), maximum number of lanes of the
--                           tenant that have limits, quota of lanes of the tenant, or nil
-- reply:   'changed', 'too_many_lanes' or 'too_many_limited'

write_despite_full_memory()
local action, name = unpack(args, 1, 2)

-- Processes read limits and pauses again when this number has changed.
local function count_change_of_settings()
    call('HINCRBY', base .. 'meta', 'limits_version', 1)
end

local function set_limits(limits, max_limited, lane_quota)
    local lane = find_lane(name)
    local tenant = load_tenant(tenant_of(name))
    local had_limits = lane and lane.limits and 1 or 0
    if limits then
        if tenant.limited - had_limits >= max_limited then return 'too_many_limited' end
        if exceeds_lane_quota(name, lane_quota) then return 'too_many_lanes' end
        lane = lane or create_lane(name)
        call('HSET', base .. 'limits', name, limits)
    else
        call('HDEL', base .. 'limits', name)
    end
    if lane then
        lane.limits = limits and true or nil
        change_lane(lane)
        tenant = change_tenant(lane.tenant)
        tenant.limited = tenant.limited - had_limits + (limits and 1 or 0)
    end
    count_change_of_settings()
    flush()
    return 'changed'
end

if action == 'set_limits' then
    return set_limits(args[3], args[4], args[5])
end
if action == 'pause' and exceeds_lane_quota(name, args[3]) then
    return 'too_many_lanes'
end
local creates_lane = action == 'park' or action == 'pause'
local lane = find_lane(name) or creates_lane and create_lane(name)
if not lane then return 'changed' end

if action == 'park' then
    lane.parked_until, lane.probes, lane.opens = args[3], args[4], args[5]
elseif action == 'pause' then
    lane.paused = true
    call('SADD', base .. 'paused_lanes', name)
    count_change_of_settings()
else
    lane.parked_until, lane.probes, lane.opens = nil, 0, 0
    if action == 'resume' and lane.paused then
        lane.paused = nil
        call('SREM', base .. 'paused_lanes', name)
        count_change_of_settings()
    end
end
remove_from_rotation(lane) -- claims find out when to visit it again
flush_and_notify()
return 'changed'
