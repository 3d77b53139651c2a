--! uses records
-- Stores limits that a process has found for lanes.
--
-- args:    limits, each an array: lane, rate or nil, concurrency

write_despite_full_memory()
for _, limits in ipairs(args[1]) do
    local name, rate, concurrency = unpack(limits, 1, 3)
    local lane = find_lane(name)
    if lane then
        lane.rate, lane.concurrency = rate, concurrency
        if not rate then
            call('ZREM', base .. 'rated_lanes', name)
        end
        change_lane(lane)
    end
end
flush()
