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
