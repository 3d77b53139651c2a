-- Names that a batch of new tasks has, so that each is sent and searched once.
CREATE TYPE tarry.names_1 AS (
    tenants text[],
    lanes text[],
    lane_tenants integer[], -- positions in `tenants`
    policies text[],
    policy_tenants integer[] -- likewise
);

-- A task to add. Its content is in an array of its own, because the tasks are read several times.
CREATE TYPE tarry.new_task_1 AS (
    id uuid,
    tenant integer, -- the position in `names_1.tenants`
    lane integer, -- likewise
    policy integer, -- likewise
    key text,
    fingerprint bytea,
    body_ref text,
    version integer, -- of the policy
    due bigint,
    delay bigint, -- NULL: `due` applies
    lease boolean
);

-- The result of an attempt.
CREATE TYPE tarry.result_1 AS (
    tenant text,
    id uuid,
    version integer, -- of the task whose lease has ended
    outcome text, -- NULL: no attempt is logged
    status smallint,
    reason text,
    due bigint,
    length bigint, -- of a new lease; NULL: none
    worker text, -- of a new lease
    delay double precision,
    backoff integer,
    kind text
);

-- The change of the counters of a lane, a tenant and a policy; with a NULL lane, of a tenant only.
-- `due` and `lease_end` are the earliest of the tasks that have become PENDING or IN_FLIGHT.
CREATE TYPE tarry.change_1 AS (
    tenant integer,
    lane integer,
    policy integer,
    pending integer,
    in_flight integer,
    succeeded integer,
    exhausted integer,
    cancelled integer,
    superseded integer,
    new_lanes integer,
    due bigint,
    lease_end bigint
);

CREATE TYPE tarry.task_1 AS (
    tenant integer,
    seq bigint
);

-- A lane that a claim has visited, and its tasks that the claim leases.
CREATE TYPE tarry.visit_1 AS (
    lane integer,
    tenant integer,
    turn integer, -- the number of the visit, if tasks are leased
    probe bigint, -- the last task, if the lane is half-open
    pending bigint[], -- tasks by seq
    expired bigint[] -- tasks with an expired lease
);

-- The PENDING tasks of a lane that a claim has leased.
CREATE TYPE tarry.leased_1 AS (
    lane integer,
    leased integer, -- number of tasks
    lease_end bigint -- the earliest
);

-- What a claim has changed in a lane, as far as it matters for the tenant.
CREATE TYPE tarry.lane_change_1 AS (
    tenant integer,
    leased integer,
    turn integer, -- see `visit_1`
    first_turn bigint, -- the turn of the lane, if it is ready
    due_check bigint,
    expiry_check bigint
);
