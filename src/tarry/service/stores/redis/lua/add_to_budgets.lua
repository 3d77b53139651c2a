--! uses records
-- Adds to the values of retry budgets.
--
-- args:    changes, each an array: lane, number to add
--          time in ms in which a value decays to 1/e
-- reply:   pairs of the name and the new value, as text, of each lane that exists

local changes, decay_ms = unpack(args, 1, 2)

write_despite_full_memory()
local reply = {}
for _, change in ipairs(changes) do
    local name, added = unpack(change)
    local lane = find_lane(name)
    if lane then
        local elapsed_ms = math.max(0, now - (lane.budget_at or 0))
        lane.budget = (lane.budget or 0) * math.exp(-elapsed_ms / decay_ms) + added
        lane.budget_at = now
        change_lane(lane)
        reply[#reply + 1] = lane.name
        reply[#reply + 1] = string.format('%.17g', lane.budget)
    end
end
flush()
return reply
