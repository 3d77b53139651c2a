--! uses records
-- Adds to the values of retry budgets. args: changes, each an array: lane, change; decay time.
-- Returns names and new values of the lanes that exist, the values as text.

write_despite_full_memory()
local reply = {}
for _, change in ipairs(args[1]) do
    local lane = find_lane(change[1])
    if lane then
        local elapsed = math.max(0, now - (lane.budget_at or 0))
        lane.budget = (lane.budget or 0) * math.exp(-elapsed / args[2]) + change[2]
        lane.budget_at = now
        change_lane(lane)
        reply[#reply + 1] = lane.name
        reply[#reply + 1] = string.format('%.17g', lane.budget)
    end
end
flush(false)
return reply
