"""Functions that the others call: names, quotas, counters, and the deletion of tasks."""

from __future__ import annotations

from tarry.service.stores.postgres.functions.constants import (
    CANCELLED,
    EXHAUSTED,
    NEXT_GENERATION,
    PLAN_SETTINGS,
    PLPGSQL,
    QUOTA_LOCK,
    SUCCEEDED,
    lock_rows,
    newest,
    newest_first,
)

_MAX_UPDATE_TRIES = 10

_HELPERS = f"""
CREATE OR REPLACE FUNCTION tarry.now_1(p_now bigint) RETURNS bigint LANGUAGE sql
    RETURN coalesce(p_now, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);

-- The check times of a lane that is asleep. No task of a parked lane is leased before the parking
-- ends: if a task is due before that time, the lane is visited exactly when the parking ends.
CREATE OR REPLACE FUNCTION tarry.due_check_1(
    p_paused boolean, p_parked_until bigint, p_due_at bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE
    RETURN CASE WHEN p_paused OR p_due_at <= p_parked_until THEN NULL ELSE p_due_at END;
CREATE OR REPLACE FUNCTION tarry.expiry_check_1(
    p_paused boolean, p_parked_until bigint, p_due_at bigint, p_lease_end_at bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE
    RETURN CASE WHEN p_paused THEN NULL
        WHEN p_due_at <= p_parked_until THEN p_parked_until
        WHEN p_lease_end_at IS NULL THEN NULL
        ELSE greatest(p_lease_end_at, p_parked_until) END;

-- Return the ids of tenants, in the order of their names; create tenants that are missing.
CREATE OR REPLACE FUNCTION tarry.tenants_1(p_names text[]) RETURNS integer[] {PLPGSQL} AS $$
DECLARE v_ids integer[];
BEGIN
    FOR v_try IN 1..2 LOOP
        SELECT array_agg(t.id ORDER BY i.ord) INTO v_ids
        FROM unnest(p_names) WITH ORDINALITY AS i (name, ord)
        LEFT JOIN tarry.tenant_name AS t ON t.name = i.name;
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO tarry.tenant (name)
        SELECT DISTINCT i.name FROM unnest(p_names, v_ids) AS i (name, id)
        WHERE i.id IS NULL ORDER BY i.name
        ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

-- Return the ids of lanes, in the order of their names; NULL for lanes that are missing.
CREATE OR REPLACE FUNCTION tarry.lanes_1(p_names text[]) RETURNS integer[] {PLPGSQL} AS $$
BEGIN
    RETURN (SELECT array_agg(l.id ORDER BY i.ord)
        FROM unnest(p_names) WITH ORDINALITY AS i (name, ord)
        LEFT JOIN tarry.lane_name AS l ON l.name = i.name);
END $$;

-- Return the number of live tasks of a tenant after locking its quota, so that two processes
-- cannot exceed the quota together. While many more tasks are allowed, the lock is shared.
CREATE OR REPLACE FUNCTION tarry.lock_quota_1(p_tenant integer, p_count integer, p_quota bigint)
RETURNS bigint {PLPGSQL} AS $$
DECLARE
    v_margin bigint := greatest(p_quota / 10, 20 * p_count);
    v_is_exclusive boolean;
    v_live bigint;
BEGIN
    SELECT t.pending + t.in_flight + p_count > p_quota - v_margin INTO v_is_exclusive
    FROM tarry.tenant AS t WHERE {newest_first("p_tenant", "t")};
    IF v_is_exclusive THEN
        PERFORM pg_advisory_xact_lock({QUOTA_LOCK}, p_tenant);
    ELSE
        PERFORM pg_advisory_xact_lock_shared({QUOTA_LOCK}, p_tenant);
    END IF;
    SELECT t.pending + t.in_flight INTO v_live FROM tarry.tenant AS t
    WHERE {newest_first("p_tenant", "t")};
    IF NOT v_is_exclusive AND v_live + p_count > p_quota THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'the quota was reached meanwhile';
    END IF;
    RETURN v_live;
END $$;
"""


def _lane_changes(change: str) -> str:
    """Return the assignments for a lane; `change` is the prefix of the names of the changes."""
    due = f"CASE WHEN l.pending + {change}pending > 0 THEN least(l.due_at, {change}due) END"
    lease_end = (
        f"CASE WHEN l.in_flight + {change}in_flight > 0 "
        f"THEN least(l.lease_end_at, {change}lease_end) END"
    )
    return f"""
        pending = l.pending + {change}pending, in_flight = l.in_flight + {change}in_flight,
        {NEXT_GENERATION.format("l")},
        exhausted = l.exhausted + {change}exhausted, tasks = l.tasks + {change}tasks,
        unused = l.tasks + {change}tasks = 0, due_at = {due}, lease_end_at = {lease_end},
        due_check_at = CASE WHEN NOT l.ready
            THEN tarry.due_check_1(l.paused, l.parked_until, {due}) END,
        expiry_check_at = CASE WHEN NOT l.ready
            THEN tarry.expiry_check_1(l.paused, l.parked_until, {due}, {lease_end}) END
    """


def _tenant_changes(change: str) -> str:
    """Return the assignments for a tenant."""
    names = ("pending", "in_flight", "succeeded", "exhausted", "cancelled", "superseded")
    counters = ", ".join(f"{name} = t.{name} + {change}{name}" for name in names)
    return f"""
        {counters}, lanes = t.lanes + {change}new_lanes, {NEXT_GENERATION.format("t")},
        due_check_at = least(t.due_check_at, {change}due_check),
        expiry_check_at = least(t.expiry_check_at, {change}expiry_check)
    """


def _policy_changes(change: str) -> str:
    """Return the assignments for a policy."""
    return f"""
        live_tasks = u.live_tasks + {change}live, tasks = u.tasks + {change}tasks,
        {NEXT_GENERATION.format("u")}
    """


def _update_row(table: str, alias: str, row_id: str, changes: str, returning: str = "") -> str:
    """Return statements that update one row, which is not locked yet; they set FOUND.

    A transaction that has just changed the generation of the row makes the condition false. The
    next try then finds the new generation.
    """
    return f"""FOR v_try IN 1..{_MAX_UPDATE_TRIES} LOOP
            UPDATE tarry.{table} AS {alias} SET {changes}
            WHERE {alias}.id = {row_id} AND {alias}.generation
                = (SELECT r.generation FROM tarry.{table} AS r WHERE {newest_first(row_id)})
            {returning};
            EXIT WHEN FOUND;
        END LOOP;"""


_APPLY = f"""
-- Add changes to the counters of lanes, tenants and policies, and update the check times of lanes
-- and tenants. Each position of the arrays is one change; with a NULL lane, of a tenant only. The
-- due times and lease ends are those of tasks that have become PENDING or IN_FLIGHT.
CREATE OR REPLACE FUNCTION tarry.apply_1(
    p_tenants integer[], p_lanes integer[], p_policies integer[], p_pending integer[],
    p_in_flight integer[], p_succeeded integer[], p_exhausted integer[], p_cancelled integer[],
    p_superseded integer[], p_new_lanes integer[], p_due bigint[], p_lease_end bigint[]
) RETURNS void {PLPGSQL} AS $$
DECLARE
    v_lane_count integer;
    v_changed integer;
    v_tenants integer[];
    v_due_checks bigint[];
    v_expiry_checks bigint[];
    -- The change of a batch with one lane.
    v_pending integer := p_pending[1];
    v_in_flight integer := p_in_flight[1];
    v_succeeded integer := p_succeeded[1];
    v_exhausted integer := p_exhausted[1];
    v_cancelled integer := p_cancelled[1];
    v_superseded integer := p_superseded[1];
    v_new_lanes integer := p_new_lanes[1];
    v_due bigint := p_due[1];
    v_lease_end bigint := p_lease_end[1];
    v_live integer := v_pending + v_in_flight;
    v_ended integer := v_succeeded + v_exhausted + v_cancelled;
    v_tasks integer := v_live + v_ended;
    v_due_check bigint;
    v_expiry_check bigint;
BEGIN
    IF array_length(p_tenants, 1) = 1 AND p_lanes[1] IS NOT NULL THEN
        -- Many batches change one lane only. Without joins, this takes a third of the time.
        {
    _update_row(
        "lane",
        "l",
        "p_lanes[1]",
        _lane_changes("v_"),
        "RETURNING l.due_check_at, l.expiry_check_at INTO v_due_check, v_expiry_check",
    )
}
        IF NOT FOUND THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a lane was removed meanwhile';
        END IF;
        {_update_row("tenant", "t", "p_tenants[1]", _tenant_changes("v_"))}
        IF NOT FOUND THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a tenant was changed too often';
        END IF;
        IF p_policies[1] IS NOT NULL AND (v_live <> 0 OR v_ended <> 0) THEN
            {_update_row("policy_use", "u", "p_policies[1]", _policy_changes("v_"))}
            IF NOT FOUND THEN
                RAISE SQLSTATE '40001' USING MESSAGE = 'a policy was removed meanwhile';
            END IF;
        END IF;
        RETURN;
    END IF;
    SELECT count(DISTINCT i.lane) INTO v_lane_count FROM unnest(p_lanes) AS i (lane);
    IF v_lane_count > 0 THEN
        {lock_rows("lane", "p_lanes")}
        WITH change AS (
            SELECT i.lane, sum(i.pending) AS pending, sum(i.in_flight) AS in_flight,
                sum(i.exhausted) AS exhausted,
                sum(i.pending + i.in_flight + i.succeeded + i.exhausted + i.cancelled) AS tasks,
                min(i.due) AS due, min(i.lease_end) AS lease_end
            FROM unnest(p_lanes, p_pending, p_in_flight, p_succeeded, p_exhausted, p_cancelled,
                p_due, p_lease_end)
                AS i (lane, pending, in_flight, succeeded, exhausted, cancelled, due, lease_end)
            WHERE i.lane IS NOT NULL GROUP BY i.lane
        ), changed AS (
            UPDATE tarry.lane AS l SET {_lane_changes("d.")}
            FROM change AS d CROSS JOIN LATERAL {newest("lane", "d.lane")} AS n
            WHERE l.ctid = n.tid
            RETURNING l.tenant, l.due_check_at, l.expiry_check_at
        )
        SELECT count(*), array_agg(c.tenant), array_agg(c.due_check_at),
            array_agg(c.expiry_check_at)
        INTO v_changed, v_tenants, v_due_checks, v_expiry_checks FROM changed AS c;
        IF v_changed <> v_lane_count THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a lane was removed meanwhile';
        END IF;
    END IF;
    {lock_rows("tenant", "p_tenants")}
    UPDATE tarry.tenant AS t SET {_tenant_changes("d.")} FROM (
        SELECT i.tenant, sum(i.pending) AS pending, sum(i.in_flight) AS in_flight,
            sum(i.succeeded) AS succeeded, sum(i.exhausted) AS exhausted,
            sum(i.cancelled) AS cancelled, sum(i.superseded) AS superseded,
            sum(i.new_lanes) AS new_lanes, min(i.due_check) AS due_check,
            min(i.expiry_check) AS expiry_check
        FROM (
            SELECT *, NULL::bigint AS due_check, NULL::bigint AS expiry_check
            FROM unnest(p_tenants, p_pending, p_in_flight, p_succeeded, p_exhausted, p_cancelled,
                p_superseded, p_new_lanes)
                AS i (tenant, pending, in_flight, succeeded, exhausted, cancelled, superseded,
                    new_lanes)
            UNION ALL
            SELECT c.tenant, 0, 0, 0, 0, 0, 0, 0, c.due_check, c.expiry_check
            FROM unnest(v_tenants, v_due_checks, v_expiry_checks)
                AS c (tenant, due_check, expiry_check)
        ) AS i GROUP BY i.tenant
    ) AS d CROSS JOIN LATERAL {newest("tenant", "d.tenant")} AS n
    WHERE t.ctid = n.tid;
    IF EXISTS (SELECT 1 FROM unnest(p_policies, p_pending, p_in_flight, p_succeeded, p_exhausted,
            p_cancelled) AS i (policy, pending, in_flight, succeeded, exhausted, cancelled)
            WHERE i.pending + i.in_flight <> 0 OR i.succeeded + i.exhausted + i.cancelled <> 0)
    THEN
        {lock_rows("policy_use", "p_policies")}
        UPDATE tarry.policy_use AS u SET {_policy_changes("d.")}
        FROM (
            SELECT i.policy, sum(i.pending + i.in_flight) AS live,
                sum(i.pending + i.in_flight + i.succeeded + i.exhausted + i.cancelled) AS tasks
            FROM unnest(p_policies, p_pending, p_in_flight, p_succeeded, p_exhausted, p_cancelled)
                AS i (policy, pending, in_flight, succeeded, exhausted, cancelled)
            WHERE i.policy IS NOT NULL GROUP BY i.policy
        ) AS d CROSS JOIN LATERAL {newest("policy_use", "d.policy")} AS n
        WHERE u.ctid = n.tid;
        GET DIAGNOSTICS v_changed = ROW_COUNT;
        IF v_changed <> (SELECT count(DISTINCT i.policy) FROM unnest(p_policies) AS i (policy)) THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a policy was removed meanwhile';
        END IF;
    END IF;
END $$;

-- Count attempts in their minute. The column `shard` spreads the rows over connections, so that
-- processes do not wait for each other.
CREATE OR REPLACE FUNCTION tarry.count_attempts_1(
    p_tenants integer[], p_outcomes text[], p_now bigint
) RETURNS void {PLPGSQL} AS $$
BEGIN
    INSERT INTO tarry.series AS s (tenant, minute, outcome, shard, count)
    SELECT g.tenant, p_now - p_now % 60000, i.outcome, pg_backend_pid() % 16, count(*)
    FROM unnest(p_tenants, p_outcomes) AS i (tenant, outcome)
    CROSS JOIN LATERAL (VALUES (0), (i.tenant)) AS g (tenant)
    WHERE i.outcome IS NOT NULL
    GROUP BY g.tenant, i.outcome ORDER BY g.tenant, i.outcome
    ON CONFLICT (tenant, minute, outcome, shard) DO UPDATE SET count = s.count + excluded.count;
END $$;
"""

_DELETE = f"""
-- Delete finished tasks. The rows of `content` and `attempt` stay in the partition of their day,
-- which is dropped later, and are deleted from the default partition only.
CREATE OR REPLACE FUNCTION tarry.delete_1(p_tenants integer[], p_seqs bigint[]) RETURNS integer
{PLAN_SETTINGS} AS $$
DECLARE v record;
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT f.* FROM (
            SELECT DISTINCT i.tenant, i.seq FROM unnest(p_tenants, p_seqs) AS i (tenant, seq)) AS i
        JOIN tarry.finished AS f ON f.tenant = i.tenant AND f.seq = i.seq
            AND f.status IN ({SUCCEEDED}, {EXHAUSTED}, {CANCELLED})
        ORDER BY f.tenant, f.seq FOR UPDATE OF f
    ), gone AS (
        DELETE FROM tarry.finished AS f USING locked AS i
        WHERE f.tenant = i.tenant AND f.status = i.status AND f.seq = i.seq
    ), keys AS (
        DELETE FROM tarry.task_key AS k USING locked AS i WHERE k.seq = i.seq
    ), content AS MATERIALIZED (
        SELECT i.tenant, i.policy, c.policy_version, c.body_ref
        FROM locked AS i JOIN tarry.content AS c ON c.seq = i.seq
        WHERE c.policy_version IS NOT NULL OR c.body_ref IS NOT NULL
    ), versions AS MATERIALIZED (
        SELECT c.tenant, u.policy, c.policy_version AS version, count(*)::integer AS tasks
        FROM content AS c JOIN tarry.policy_use AS u ON u.id = c.policy
        WHERE c.policy_version IS NOT NULL GROUP BY 1, 2, 3
    ), orphans AS (
        INSERT INTO tarry.orphan SELECT DISTINCT c.body_ref FROM content AS c
        WHERE c.body_ref IS NOT NULL ORDER BY c.body_ref ON CONFLICT DO NOTHING
    ), old_content AS (
        DELETE FROM tarry.content_default AS c USING locked AS i WHERE c.seq = i.seq
    ), old_attempts AS (
        DELETE FROM tarry.attempt_default AS a USING locked AS i WHERE a.seq = i.seq
    ), groups AS (
        SELECT i.tenant, i.lane, i.policy,
            -count(*) FILTER (WHERE i.status = {SUCCEEDED})::integer AS succeeded,
            -count(*) FILTER (WHERE i.status = {EXHAUSTED})::integer AS exhausted,
            -count(*) FILTER (WHERE i.status = {CANCELLED})::integer AS cancelled
        FROM locked AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT array_agg(g.tenant) AS tenants, array_agg(g.lane) AS lanes,
        array_agg(g.policy) AS policies, array_agg(0) AS zeros, array_agg(g.succeeded) AS succeeded,
        array_agg(g.exhausted) AS exhausted, array_agg(g.cancelled) AS cancelled,
        coalesce(-sum(g.succeeded + g.exhausted + g.cancelled), 0)::integer AS deleted,
        (SELECT array_agg(i.tenant) FROM versions AS i) AS version_tenants,
        (SELECT array_agg(i.policy) FROM versions AS i) AS version_policies,
        (SELECT array_agg(i.version) FROM versions AS i) AS versions,
        (SELECT array_agg(i.tasks) FROM versions AS i) AS version_tasks
    INTO v FROM groups AS g;
    IF v.deleted > 0 THEN
        PERFORM tarry.apply_1(v.tenants, v.lanes, v.policies, v.zeros, v.zeros, v.succeeded,
            v.exhausted, v.cancelled, v.zeros, v.zeros, NULL, NULL);
        UPDATE tarry.policy AS p SET tasks = p.tasks - d.tasks
        FROM (SELECT * FROM unnest(v.version_tenants, v.version_policies, v.versions,
                v.version_tasks) AS i (tenant, policy, version, tasks) ORDER BY 1, 2, 3) AS d
        WHERE p.tenant = d.tenant AND p.id = d.policy AND p.version = d.version;
    END IF;
    RETURN v.deleted;
END $$;
"""

COMMON_FUNCTIONS = _HELPERS + _APPLY + _DELETE
