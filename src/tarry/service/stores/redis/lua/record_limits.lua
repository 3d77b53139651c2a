--! uses records
-- Stores limits that a process has found. args: limits, each an array: lane, rate or nil,
-- concurrency.

write_despite_full_memory()
for _, limits in ipairs(args[1]) do
    local lane = find_lane(limits[1])
    if lane then
        lane.rate, lane.concurrency = limits[2], limits[3]
        if not lane.rate then
            call('ZREM', base .. 'rated_lanes', lane.name)
        end
        change_lane(lane)
    end
end
flush(false)
