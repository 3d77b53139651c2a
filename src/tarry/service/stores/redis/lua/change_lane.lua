--! uses records
-- Changes the state of a lane. args: action, name, and then
--   park: until, probes, consecutive opens
--   pause: lane quota
--   set_limits: limits as JSON or nil, maximum number of limited lanes, lane quota
-- Returns 'changed', 'too_many_lanes' or 'too_many_limited'.

write_despite_full_memory()
local action, name = args[1], args[2]
local tenant_name = tenant_of(name)
local lane = find_lane(name)

if action == 'set_limits' then
    local limits, max_limited, lane_quota = args[3], args[4], args[5]
    local tenant = load_tenant(tenant_name)
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
        tenant = change_tenant(tenant_name)
        tenant.limited = tenant.limited - had_limits + (limits and 1 or 0)
    end
    call('HINCRBY', base .. 'meta', 'limits_version', 1)
    flush(false)
    return 'changed'
end

if action == 'park' then
    lane = lane or create_lane(name)
    lane.parked_until, lane.probes, lane.opens = args[3], args[4], args[5]
elseif action == 'pause' then
    if exceeds_lane_quota(name, args[3]) then return 'too_many_lanes' end
    lane = lane or create_lane(name)
    lane.paused = true
    call('SADD', base .. 'paused_lanes', name)
    call('HINCRBY', base .. 'meta', 'limits_version', 1)
elseif lane then -- unpark, resume
    lane.parked_until, lane.probes, lane.opens = nil, 0, 0
    if action == 'resume' and lane.paused then
        lane.paused = nil
        call('SREM', base .. 'paused_lanes', name)
        call('HINCRBY', base .. 'meta', 'limits_version', 1)
    end
end
if lane then
    remove_from_rotation(lane)
    flush(true)
end
return 'changed'
