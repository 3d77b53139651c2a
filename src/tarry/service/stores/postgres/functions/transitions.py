"""Functions that end attempts, release leases, and cancel, retry or replay tasks."""

from __future__ import annotations

from tarry.service.stores.postgres.functions.constants import (
    APPLIED,
    CANCEL_DONE,
    CANCEL_REQUESTED,
    CANCEL_TOO_LATE,
    CANCELLED,
    ENDED_AS_CANCELLED,
    EXHAUSTED,
    FINISHED_INSERT,
    FIRST_ATTEMPT_QUEUE,
    IN_FLIGHT,
    IS_LEASED,
    LEASED_QUEUE,
    PENDING,
    PLAN_SETTINGS,
    RETRY_DUE,
    RETRY_IN_FLIGHT,
    RETRY_OVER_QUOTA,
    RETRY_QUEUE,
    RETRY_SUCCEEDED,
    SUCCEEDED,
    SUPERSEDED,
)

_LOCK = f"""
-- Lock what a transaction with several statements changes. Otherwise its second statement could
-- wait for a lane that is locked by a transaction which waits for a tenant of the first statement.
-- Lanes of `p_new_lanes` that are missing are created first, as by `add_1`: another transaction may
-- be creating the same lane, and lock other lanes and tenants afterwards.
CREATE OR REPLACE FUNCTION tarry.lock_1(
    p_ids uuid[], p_lanes text[], p_new_lanes text[], p_tenants text[]
) RETURNS void
{PLAN_SETTINGS} AS $$
DECLARE
    v_created integer[];
BEGIN
    PERFORM 1 FROM tarry.task_key AS k
    JOIN tarry.live AS l ON l.tenant = k.tenant AND l.seq = k.seq
    WHERE k.id = ANY (p_ids) ORDER BY l.tenant, l.seq FOR UPDATE OF l;
    WITH created AS (
        INSERT INTO tarry.lane AS l (tenant, name)
        SELECT t.id, n.name FROM unnest(p_new_lanes) AS n (name)
        JOIN tarry.tenant AS t ON t.name = split_part(n.name, '/', 1)
        WHERE NOT EXISTS (SELECT 1 FROM tarry.lane AS l WHERE l.name = n.name)
        ORDER BY n.name ON CONFLICT DO NOTHING RETURNING l.tenant
    )
    SELECT array_agg(tenant) INTO v_created FROM created;
    PERFORM 1 FROM tarry.lane AS l WHERE l.name = ANY (p_lanes) ORDER BY l.id FOR NO KEY UPDATE;
    PERFORM 1 FROM tarry.tenant AS t WHERE t.name = ANY (p_tenants) ORDER BY t.id
    FOR NO KEY UPDATE;
    IF v_created IS NOT NULL THEN
        UPDATE tarry.tenant AS t SET lanes = t.lanes + c.count
        FROM (SELECT i.tenant, count(*) FROM unnest(v_created) AS i (tenant) GROUP BY i.tenant) AS c
        WHERE t.id = c.tenant;
    END IF;
END $$;
"""

_FINISH = f"""
-- Write the results of attempts: log the attempt, and make the task PENDING, IN_FLIGHT (with a new
-- lease, if a length is given) or finished. A result whose task has another version is superseded.
-- `p_tenants` are positions in `p_tenant_names`.
CREATE OR REPLACE FUNCTION tarry.finish_1(
    p_tenant_names text[], p_tenants integer[], p_ids uuid[], p_versions integer[],
    p_outcomes text[], p_logs bytea[], p_statuses smallint[], p_reasons text[], p_due bigint[],
    p_lengths bigint[], p_workers text[], p_delays double precision[], p_offsets integer[],
    p_kinds text[], p_now bigint
) RETURNS smallint[]
{PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_count integer := array_length(p_ids, 1);
    v_results smallint[] := array_fill({SUPERSEDED}::smallint, ARRAY[v_count]);
    v_superseded integer[] := '{{}}';
    v_names text[];
    v record;
BEGIN
    WITH leased AS MATERIALIZED (
        SELECT i.ord, i.outcome, i.log, i.status, i.reason, i.due, i.length, i.worker, i.delay,
            i.backoff, i.kind, l.tenant, l.seq, l.lane, l.policy, l.next_attempt_at, l.first_due_at,
            l.created_at, l.version, l.attempts, l.attempts_before_replay, l.lost_attempts,
            l.replays, l.cancelling
        FROM unnest(p_ids, p_versions, p_outcomes, p_logs, p_statuses, p_reasons, p_due, p_lengths,
            p_workers, p_delays, p_offsets, p_kinds) WITH ORDINALITY
            AS i (id, version, outcome, log, status, reason, due, length, worker, delay, backoff,
                kind, ord)
        JOIN tarry.task_key AS k ON k.id = i.id
        JOIN tarry.live AS l ON l.tenant = k.tenant AND l.seq = k.seq
        WHERE {IS_LEASED} AND l.version = i.version
        ORDER BY l.tenant, l.seq FOR UPDATE OF l
    ), decided AS MATERIALIZED (
        SELECT i.*, i.attempts + CASE WHEN i.outcome IS NULL THEN 0 ELSE 1 END AS new_attempts,
            CASE WHEN i.cancelling AND i.status <> {SUCCEEDED} THEN {CANCELLED}
                WHEN i.status >= {SUCCEEDED} THEN i.status
                WHEN i.length IS NULL THEN {PENDING} ELSE {IN_FLIGHT} END AS new_status
        FROM leased AS i
    ), removed AS (
        DELETE FROM tarry.live AS l USING decided AS i
        WHERE i.new_status >= {SUCCEEDED} AND l.tenant = i.tenant AND l.seq = i.seq
    ), ended AS (
        {FINISHED_INSERT}
        SELECT i.tenant, i.new_status, i.seq, i.lane, i.policy, v_now, i.next_attempt_at,
            i.first_due_at, i.created_at, i.version + 1, i.new_attempts, i.attempts_before_replay,
            i.lost_attempts, i.backoff, i.replays, i.delay, i.kind,
            CASE WHEN i.new_status = i.status THEN i.reason END
        FROM decided AS i WHERE i.new_status >= {SUCCEEDED}
    ), continued AS (
        UPDATE tarry.live AS l
        SET queue = CASE WHEN i.new_status = {IN_FLIGHT} THEN {LEASED_QUEUE}
                WHEN i.kind IS NULL THEN {FIRST_ATTEMPT_QUEUE} ELSE {RETRY_QUEUE} END,
            wake_at = CASE WHEN i.new_status = {IN_FLIGHT} THEN greatest(v_now, i.due) + i.length
                ELSE i.due END,
            next_attempt_at = i.due, version = l.version + 1, attempts = i.new_attempts,
            backoff_offset = i.backoff, previous_delay = i.delay, last_outcome_kind = i.kind,
            worker = CASE WHEN i.new_status = {IN_FLIGHT} THEN i.worker END
        FROM decided AS i
        WHERE i.new_status < {SUCCEEDED} AND l.tenant = i.tenant AND l.seq = i.seq
    ), logged AS (
        INSERT INTO tarry.attempt (seq, number, log)
        SELECT i.seq, i.new_attempts, i.log FROM decided AS i WHERE i.outcome IS NOT NULL
    ), groups AS (
        SELECT i.tenant, i.lane, i.policy,
            count(*) FILTER (WHERE i.new_status = {PENDING})::integer AS pending,
            -count(*) FILTER (WHERE i.new_status <> {IN_FLIGHT})::integer AS in_flight,
            count(*) FILTER (WHERE i.new_status = {SUCCEEDED})::integer AS succeeded,
            count(*) FILTER (WHERE i.new_status = {EXHAUSTED})::integer AS exhausted,
            count(*) FILTER (WHERE i.new_status = {CANCELLED})::integer AS cancelled,
            min(i.due) FILTER (WHERE i.new_status = {PENDING}) AS due,
            min(greatest(v_now, i.due) + i.length) FILTER (WHERE i.new_status = {IN_FLIGHT})
                AS lease_end
        FROM decided AS i GROUP BY i.tenant, i.lane, i.policy
    ), sums AS (
        SELECT array_agg(g.tenant) AS tenants, array_agg(g.lane) AS lanes,
            array_agg(g.policy) AS policies, array_agg(g.pending) AS pending,
            array_agg(g.in_flight) AS in_flight, array_agg(g.succeeded) AS succeeded,
            array_agg(g.exhausted) AS exhausted, array_agg(g.cancelled) AS cancelled,
            array_agg(0) AS zeros, array_agg(g.due) AS dues, array_agg(g.lease_end) AS lease_ends
        FROM groups AS g
    )
    SELECT sums.*, r.* INTO v
    FROM sums, (SELECT array_agg(i.ord ORDER BY i.ord) AS ords,
            array_agg(i.tenant ORDER BY i.ord) AS task_tenants,
            array_agg(i.outcome ORDER BY i.ord) AS outcomes,
            array_agg((CASE WHEN i.new_status = {CANCELLED} AND i.status <> {CANCELLED}
                THEN {ENDED_AS_CANCELLED} ELSE {APPLIED} END)::smallint ORDER BY i.ord) AS results
        FROM decided AS i) AS r;
    IF cardinality(v.results) = v_count THEN
        PERFORM tarry.apply_1(v.tenants, v.lanes, v.policies, v.pending, v.in_flight, v.succeeded,
            v.exhausted, v.cancelled, v.zeros, v.zeros, v.dues, v.lease_ends);
        PERFORM tarry.count_attempts_1(v.task_tenants, v.outcomes, v_now);
        RETURN v.results;
    END IF;
    -- Some results are superseded.
    FOR i IN 1..coalesce(array_length(v.ords, 1), 0) LOOP
        v_results[v.ords[i]] := v.results[i];
    END LOOP;
    SELECT array_agg(p_tenant_names[p_tenants[i.ord]]) INTO v_names
    FROM unnest(v_results) WITH ORDINALITY AS i (result, ord) WHERE i.result = {SUPERSEDED};
    v_superseded := tarry.tenants_1(v_names);
    PERFORM tarry.apply_1(coalesce(v.tenants, '{{}}') || v_superseded,
        v.lanes || array_fill(NULL::integer, ARRAY[cardinality(v_superseded)]),
        v.policies || array_fill(NULL::integer, ARRAY[cardinality(v_superseded)]),
        coalesce(v.pending, '{{}}') || array_fill(0, ARRAY[cardinality(v_superseded)]),
        coalesce(v.in_flight, '{{}}') || array_fill(0, ARRAY[cardinality(v_superseded)]),
        coalesce(v.succeeded, '{{}}') || array_fill(0, ARRAY[cardinality(v_superseded)]),
        coalesce(v.exhausted, '{{}}') || array_fill(0, ARRAY[cardinality(v_superseded)]),
        coalesce(v.cancelled, '{{}}') || array_fill(0, ARRAY[cardinality(v_superseded)]),
        coalesce(v.zeros, '{{}}') || array_fill(1, ARRAY[cardinality(v_superseded)]),
        coalesce(v.zeros, '{{}}') || array_fill(0, ARRAY[cardinality(v_superseded)]),
        v.dues, v.lease_ends);
    IF v.task_tenants IS NOT NULL THEN
        PERFORM tarry.count_attempts_1(v.task_tenants, v.outcomes, v_now);
    END IF;
    RETURN v_results;
END $$;
"""

_RELEASE = f"""
-- Release the leases of tasks: PENDING again, or CANCELLED if that was requested. With a version,
-- only a lease of that version is released. Returns a result for each task.
CREATE OR REPLACE FUNCTION tarry.release_1(
    p_ids uuid[], p_versions integer[], p_due bigint[], p_now bigint
) RETURNS smallint[]
{PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_results smallint[] := array_fill({SUPERSEDED}::smallint, ARRAY[array_length(p_ids, 1)]);
    v record;
BEGIN
    WITH leased AS MATERIALIZED (
        SELECT i.ord, greatest(l.next_attempt_at, i.due) AS due, l.*
        FROM unnest(p_ids, p_versions, p_due) WITH ORDINALITY AS i (id, version, due, ord)
        JOIN tarry.task_key AS k ON k.id = i.id
        JOIN tarry.live AS l ON l.tenant = k.tenant AND l.seq = k.seq
        WHERE {IS_LEASED} AND l.version = i.version
        ORDER BY l.tenant, l.seq FOR UPDATE OF l
    ), removed AS (
        DELETE FROM tarry.live AS l USING leased AS i
        WHERE i.cancelling AND l.tenant = i.tenant AND l.seq = i.seq
    ), ended AS (
        {FINISHED_INSERT}
        SELECT i.tenant, {CANCELLED}, i.seq, i.lane, i.policy, v_now, i.next_attempt_at,
            i.first_due_at, i.created_at, i.version + 1, i.attempts, i.attempts_before_replay,
            i.lost_attempts, i.backoff_offset, i.replays, i.previous_delay, i.last_outcome_kind,
            NULL
        FROM leased AS i WHERE i.cancelling
    ), continued AS (
        UPDATE tarry.live AS l
        SET queue = CASE WHEN i.last_outcome_kind IS NULL THEN {FIRST_ATTEMPT_QUEUE}
                ELSE {RETRY_QUEUE} END, wake_at = i.due,
            version = l.version + 1, worker = NULL
        FROM leased AS i WHERE NOT i.cancelling AND l.tenant = i.tenant AND l.seq = i.seq
    ), groups AS (
        SELECT i.tenant, i.lane, i.policy,
            count(*) FILTER (WHERE NOT i.cancelling)::integer AS pending,
            -count(*)::integer AS in_flight,
            count(*) FILTER (WHERE i.cancelling)::integer AS cancelled,
            min(i.due) FILTER (WHERE NOT i.cancelling) AS due
        FROM leased AS i GROUP BY i.tenant, i.lane, i.policy
    ), sums AS (
        SELECT array_agg(g.tenant) AS tenants, array_agg(g.lane) AS lanes,
            array_agg(g.policy) AS policies, array_agg(g.pending) AS pending,
            array_agg(g.in_flight) AS in_flight, array_agg(g.cancelled) AS cancelled,
            array_agg(0) AS zeros, array_agg(g.due) AS dues
        FROM groups AS g
    )
    SELECT sums.*, r.* INTO v
    FROM sums, (SELECT array_agg(i.ord) AS ords,
            array_agg(CASE WHEN i.cancelling THEN {ENDED_AS_CANCELLED} ELSE {APPLIED} END)
                AS results
        FROM leased AS i) AS r;
    IF v.tenants IS NOT NULL THEN
        FOR i IN 1..array_length(v.ords, 1) LOOP
            v_results[v.ords[i]] := v.results[i];
        END LOOP;
        PERFORM tarry.apply_1(v.tenants, v.lanes, v.policies, v.pending, v.in_flight, v.zeros,
            v.zeros, v.cancelled, v.zeros, v.zeros, v.dues, NULL);
    END IF;
    RETURN v_results;
END $$;

-- Cancel a PENDING task; request the cancellation of an IN_FLIGHT task. NULL: no such task.
CREATE OR REPLACE FUNCTION tarry.cancel_1(p_tenant text, p_id uuid, p_now bigint) RETURNS smallint
{PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v record;
BEGIN
    SELECT k.tenant, k.seq INTO v FROM tarry.task_key AS k JOIN tarry.tenant AS t ON t.id = k.tenant
    WHERE k.id = p_id AND t.name = p_tenant;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT l.* INTO v FROM tarry.live AS l WHERE l.tenant = v.tenant AND l.seq = v.seq FOR UPDATE;
    IF NOT FOUND THEN
        RETURN {CANCEL_TOO_LATE};
    END IF;
    IF v.queue = {LEASED_QUEUE} THEN
        UPDATE tarry.live AS l SET cancelling = true
        WHERE l.tenant = v.tenant AND l.seq = v.seq AND NOT l.cancelling;
        RETURN {CANCEL_REQUESTED};
    END IF;
    DELETE FROM tarry.live AS l WHERE l.tenant = v.tenant AND l.seq = v.seq;
    {FINISHED_INSERT}
    VALUES (v.tenant, {CANCELLED}, v.seq, v.lane, v.policy, v_now, v.next_attempt_at,
        v.first_due_at, v.created_at, v.version + 1, v.attempts, v.attempts_before_replay,
        v.lost_attempts, v.backoff_offset, v.replays, v.previous_delay, v.last_outcome_kind, NULL);
    PERFORM tarry.apply_1(ARRAY[v.tenant], ARRAY[v.lane], ARRAY[v.policy], ARRAY[-1], ARRAY[0],
        ARRAY[0], ARRAY[0], ARRAY[1], ARRAY[0], ARRAY[0], NULL, NULL);
    RETURN {CANCEL_DONE};
END $$;

-- Make finished tasks PENDING and due now; the policy will not count their attempts so far.
CREATE OR REPLACE FUNCTION tarry.replay_1(
    p_tenant integer, p_seqs bigint[], p_statuses smallint[], p_now bigint
) RETURNS bigint[]
{PLAN_SETTINGS} AS $$
DECLARE v record;
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT f.* FROM tarry.finished AS f
        WHERE f.tenant = p_tenant AND f.status = ANY (p_statuses) AND f.seq = ANY (p_seqs)
        ORDER BY f.seq FOR UPDATE
    ), gone AS (
        DELETE FROM tarry.finished AS f USING locked AS i
        WHERE f.tenant = i.tenant AND f.status = i.status AND f.seq = i.seq
    ), stored AS (
        INSERT INTO tarry.live (tenant, seq, lane, policy, queue, wake_at, next_attempt_at,
            first_due_at, created_at, version, attempts, attempts_before_replay, replays)
        SELECT i.tenant, i.seq, i.lane, i.policy, {FIRST_ATTEMPT_QUEUE}, p_now, p_now, p_now,
            i.created_at, i.version + 1, i.attempts, i.attempts, i.replays + 1
        FROM locked AS i
    ), groups AS (
        SELECT i.tenant, i.lane, i.policy, count(*)::integer AS pending,
            -count(*) FILTER (WHERE i.status = {EXHAUSTED})::integer AS exhausted,
            -count(*) FILTER (WHERE i.status = {CANCELLED})::integer AS cancelled
        FROM locked AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT array_agg(g.tenant) AS tenants, array_agg(g.lane) AS lanes,
        array_agg(g.policy) AS policies, array_agg(g.pending) AS pending, array_agg(0) AS zeros,
        array_agg(g.exhausted) AS exhausted, array_agg(g.cancelled) AS cancelled,
        array_agg(p_now) AS dues, (SELECT array_agg(i.seq ORDER BY i.seq) FROM locked AS i) AS seqs
    INTO v FROM groups AS g;
    IF v.tenants IS NOT NULL THEN
        PERFORM tarry.apply_1(v.tenants, v.lanes, v.policies, v.pending, v.zeros, v.zeros,
            v.exhausted, v.cancelled, v.zeros, v.zeros, v.dues, NULL);
    END IF;
    RETURN coalesce(v.seqs, '{{}}');
END $$;

-- Make a task due now, unless it is IN_FLIGHT or SUCCEEDED. NULL: no such task.
CREATE OR REPLACE FUNCTION tarry.retry_now_1(p_tenant text, p_id uuid, p_quota bigint, p_now bigint)
RETURNS smallint
{PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_tenant integer;
    v_seq bigint;
    v_due bigint;
    v record;
BEGIN
    SELECT k.tenant, k.seq INTO v_tenant, v_seq
    FROM tarry.task_key AS k JOIN tarry.tenant AS t ON t.id = k.tenant
    WHERE k.id = p_id AND t.name = p_tenant;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT l.* INTO v FROM tarry.live AS l WHERE l.tenant = v_tenant AND l.seq = v_seq FOR UPDATE;
    IF FOUND THEN
        IF v.queue = {LEASED_QUEUE} THEN
            RETURN {RETRY_IN_FLIGHT};
        END IF;
        v_due := least(v.next_attempt_at, v_now);
        UPDATE tarry.live AS l SET wake_at = v_due, next_attempt_at = v_due, version = l.version + 1
        WHERE l.tenant = v_tenant AND l.seq = v_seq;
        PERFORM tarry.apply_1(ARRAY[v_tenant], ARRAY[v.lane], ARRAY[v.policy], ARRAY[0], ARRAY[0],
            ARRAY[0], ARRAY[0], ARRAY[0], ARRAY[0], ARRAY[0], ARRAY[v_due], NULL);
        RETURN {RETRY_DUE};
    END IF;
    IF EXISTS (SELECT 1 FROM tarry.finished AS f
            WHERE f.tenant = v_tenant AND f.status = {SUCCEEDED} AND f.seq = v_seq) THEN
        RETURN {RETRY_SUCCEEDED};
    END IF;
    IF p_quota IS NOT NULL AND tarry.lock_quota_1(v_tenant, 1, p_quota) >= p_quota THEN
        RETURN {RETRY_OVER_QUOTA};
    END IF;
    PERFORM tarry.replay_1(v_tenant, ARRAY[v_seq],
        ARRAY[{EXHAUSTED}, {CANCELLED}]::smallint[], v_now);
    RETURN {RETRY_DUE};
END $$;
"""

TRANSITION_FUNCTIONS = _LOCK + _FINISH + _RELEASE
