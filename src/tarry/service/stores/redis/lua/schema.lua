-- Shared by all scripts: the keys of a partition, and new records.
--
-- All keys have the prefix `base`. TENANT, LANE and POLICY are names; the other words in capitals
-- are numbers or ids. Sorted sets are described as MEMBER by SCORE. Times are in epoch ms. A record
-- is a MessagePack map without the fields that are nil. replays.lua, policies.lua, keyed.lua and
-- lead.lua describe their own keys.
--
-- What the partition has only once:
--
--   meta                  hash: identity of the store, last numbers, state of the audit, and others
--   counters              hash: numbers of tasks by status, and of superseded results
--   attempts:HOUR         hash MINUTE:OUTCOME -> number of attempts; for a tenant
--                         attempts_of:TENANT:HOUR
--   missing_keys          list of pairs: a key that was found missing, and the consequence
--   orphans               set: references to bodies whose tasks were deleted
--   wake                  channel: a task may be claimable
--
-- Tenants, lanes, and policy uses (policies that tasks name, whether they are stored or not):
--
--   tenant:TENANT         record, see `new_tenant`
--   tenant_names          sorted set of the names, all with the score 0
--   lane:LANE_ID          record, see `new_lane`
--   lane_ids              hash LANE -> LANE_ID
--   lane_names            sorted set of the names, all with the score 0
--   paused_lanes          set of the names of paused lanes
--   limits                hash LANE -> limits that an operator has set, as JSON
--   rated_lanes           LANE with a found rate, by the negative time of its last use (so that the
--                         lane that was used last is the first)
--   unused_lanes          LANE_ID by the time from which on the lane can be removed
--   use:USE_ID            record, see `new_policy_use`
--   use_ids               hash TENANT\0POLICY -> USE_ID
--   unused_uses           set of each USE_ID without tasks
--
-- Tasks; ID is a UUID of 16 bytes:
--
--   state:ID, task:ID     see tasks.lua
--   log:ID                list of the encoded attempts
--   key:TENANT\0KEY       ID of the task with this idempotency key, unless the key is the ID
--   live:TENANT           ID of each PENDING or IN_FLIGHT task by number (the order of adding)
--   ended:STATUS:TENANT   ID of each finished task by number
--   retention:STATUS      ID of each finished task by the time when it finished
--
-- Queues of a lane; their members have 22 bytes, see `queue_member`:
--
--   first:LANE_ID         PENDING tasks without a failed attempt, by wake time
--   retry:LANE_ID         the other PENDING tasks, by wake time
--   leased:LANE_ID        IN_FLIGHT tasks, by the end of the lease
--
-- The rotation of claims, see rotation.lua:
--
--   ready_tenants         TENANT with ready lanes, by turn
--   ready:TENANT          LANE_ID of each ready lane, by turn
--   due:TENANT            LANE_ID of each sleeping lane, by `due_check`
--   expiry:TENANT         LANE_ID of each sleeping lane, by `expiry_check`
--   due_tenants           TENANT by the lowest score of due:TENANT; expiry_tenants likewise

-- Besides, tenants and lanes have `suspect` and `purge`, see audit.lua.
local function new_tenant()
    return {
        pending = 0, in_flight = 0, succeeded = 0, exhausted = 0, cancelled = 0, -- tasks
        superseded = 0, -- results of lost leases
        lanes = 0, -- lanes
        limited = 0, -- lanes with limits that an operator has set
        replays = 0, -- running replays
        turn = 0, -- of the lane that a claim has served last, see `new_lane`
    }
end

-- Besides, a lane can have these fields:
--   parked_until, last_claim_at, rate, concurrency, budget, budget_at: see `LaneRecord` and
--     `LaneExport`
--   paused, limits (an operator has set limits), unused (it is in unused_lanes): true or nil
--   ready, due_check, expiry_check: see rotation.lua
--   last_probe: number of the task that was leased last while the lane was half-open
--   rebuilt: true if the record was lost. Then its finished tasks are not counted, so that the lane
--     is never removed.
local function new_lane(id, name)
    return {
        id = id, name = name, tenant = tenant_of(name),
        pending = 0, in_flight = 0, succeeded = 0, exhausted = 0, cancelled = 0, -- tasks
        turn = 0, -- grows with each lane that a claim serves: the lowest one is served next
        probes = 0, -- how many tasks are leased at a time while the lane is half-open
        opens = 0, -- how often in a row the breaker has opened
    }
end

local function new_policy_use(id, tenant, policy)
    return {
        id = id, tenant = tenant, policy = policy,
        live = 0, -- PENDING and IN_FLIGHT tasks
        tasks = 0, -- all tasks
        deleted = 0, -- last version of the policy, if the policy was deleted
    }
end
