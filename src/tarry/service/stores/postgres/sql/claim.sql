-- Lease tasks, in the order that `tarry.service.stores.sqlite.claim` explains.
--
-- Unlike in SQLite, lanes and tenants whose check time has come are not made ready first. They are
-- visited together with the ready ones, and written only at the end, so that no row is locked for
-- long. Tasks are locked with SKIP LOCKED, and half-open lanes with an advisory lock, so that the
-- claims of several workers do not wait for each other before they change the lanes that they have
-- visited.
--
-- The index entries of tasks that were leased or finished stay in `live_queue` until they are
-- vacuumed, which a long transaction of another client prevents. In the order of the index, they
-- precede the entries of waiting tasks. To skip them, each search starts at the lane's `due_at` or
-- `lease_end_at`, which are lower bounds. In the same way, a search for lanes starts at
-- `first_turn`, `due_check_at` or `expiry_check_at` of the tenant.
--
-- The row of a lane or tenant is the first of its id by descending `generation`, which grows with
-- every 32nd update: schema.py explains why. An update names the row that was found so by its ctid.

CREATE OR REPLACE FUNCTION tarry.claim_1(
    p_worker text, p_length bigint, p_horizon bigint, p_limit integer, p_per_lane integer,
    p_limited_names text[], p_limits integer[], p_now bigint
) RETURNS TABLE (
    kind smallint, id text, tenant text, lane text, key text, fingerprint bytea, content bytea,
    body_ref text, policy text, policy_version integer, created_at bigint, next_attempt_at bigint,
    first_due_at bigint, status smallint, reason text, attempts integer,
    attempts_before_replay integer, lost_attempts integer, previous_delay double precision,
    backoff_offset integer, last_outcome_kind text, version integer, worker text, wake_at bigint,
    cancelling boolean, replays integer, finished_at bigint, seq bigint
)
${PLAN_SETTINGS} AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_horizon_end bigint := v_now + p_horizon;
    -- Lanes and tenants with a limit of 0. JSON, because a name is found in it by binary search.
    v_skipped jsonb;
    v_all_tenants integer[] := tarry.all_tenants_1(); -- NULL: too many
    v_tenants integer[]; -- to visit
    v_visits tarry.visit_1[] := '{}';
    v_changed integer[] := '{}'; -- tenants whose check times are computed again
    v_turn bigint;
    v_pending tarry.task_1[] := '{}'; -- tasks to lease
    v_expired tarry.task_1[] := '{}'; -- likewise, with an expired lease
    v_renewed tarry.task_1[] := '{}'; -- those of `v_expired` that this worker still has,
    v_taken tarry.task_1[] := '{}'; -- and those that another worker has lost
    v_lost integer := 0;
    v_leased tarry.leased_1[]; -- the number of `v_pending` of each lane
    v_lane_changes tarry.lane_change_1[];
    v_next_at bigint;
BEGIN
    SELECT coalesce(jsonb_object_agg(i.name, 0), '{}') INTO v_skipped
    FROM unnest(p_limited_names, p_limits) AS i (name, value) WHERE i.value = 0;
    v_tenants := tarry.tenants_to_visit_1(v_all_tenants, v_skipped, v_horizon_end, v_now);
    IF p_limit > 0 AND v_tenants IS NOT NULL THEN
        v_visits := tarry.visit_lanes_1(v_tenants, v_skipped, p_limit, p_per_lane, p_limited_names,
            p_limits, v_horizon_end, v_now);
    END IF;
    IF cardinality(v_visits) > 0 THEN
        -- The shift leaves 2^20 numbers for the visits of this claim.
        SELECT array_agg(DISTINCT i.tenant),
            CASE WHEN count(i.turn) > 0 THEN nextval('tarry.turn') << 20 END
        INTO v_changed, v_turn FROM unnest(v_visits) AS i;
        SELECT coalesce(array_agg(ROW(i.tenant, p.seq)::tarry.task_1), '{}') INTO v_pending
        FROM unnest(v_visits) AS i CROSS JOIN LATERAL unnest(i.pending) AS p (seq);
        SELECT coalesce(array_agg(ROW(i.tenant, e.seq)::tarry.task_1), '{}') INTO v_expired
        FROM unnest(v_visits) AS i CROSS JOIN LATERAL unnest(i.expired) AS e (seq);
    END IF;
    -- All lanes were visited if the limit was not reached. The check times of tenants without a
    -- lane to visit are outdated then.
    IF p_limit > cardinality(v_pending) + cardinality(v_expired) THEN
        v_changed := coalesce(v_tenants, '{}');
    END IF;
    IF cardinality(v_expired) > 0 THEN
        v_renewed := tarry.renew_1(v_expired, p_worker, p_length, v_now);
    END IF;
    -- Other transactions wait for lanes and tenants from here to the commit.
    PERFORM tarry.lock_lanes_1((SELECT array_agg(i.lane) FROM unnest(v_visits) AS i));
    PERFORM tarry.lock_tenants_1(v_changed);
    IF cardinality(v_expired) > cardinality(v_renewed) THEN
        SELECT i.leased, i.lost INTO v_taken, v_lost
        FROM tarry.take_expired_1(v_expired, p_worker, p_length, v_now) AS i;
    END IF;
    IF cardinality(v_pending) > 0 THEN
        v_leased := tarry.lease_1(v_pending, p_worker, p_length, v_now);
    END IF;
    RETURN QUERY SELECT (CASE WHEN i.ord <= cardinality(v_renewed) THEN ${RENEWED_ROW}
        ELSE ${LEASED_ROW} END)::smallint, ${LIVE_COLUMNS}
    FROM unnest(v_renewed || v_taken || v_pending) WITH ORDINALITY AS i (tenant, seq, ord)
    JOIN tarry.live AS s ON s.tenant = i.tenant AND s.seq = i.seq
    ${TASK_JOINS};
    IF cardinality(v_changed) > 0 THEN
        IF cardinality(v_visits) > 0 THEN
            v_lane_changes := tarry.write_lanes_1(v_visits, v_leased, v_turn, v_horizon_end, v_now);
        END IF;
        PERFORM tarry.write_tenants_1(v_changed, v_lane_changes, v_turn);
    END IF;
    v_next_at := tarry.next_claim_1(v_all_tenants, v_tenants, v_skipped, p_horizon, v_now);
    -- A claim that leased nothing is not repeated at once.
    IF p_limit > 0 AND v_next_at <= v_now
        AND cardinality(v_renewed) + cardinality(v_taken) + cardinality(v_pending) = 0
    THEN
        v_next_at := v_now + ${MIN_NEXT_CLAIM_MS};
    END IF;
    -- Rows that are not tasks use the columns of tasks for other values. A half-open lane has its
    -- consecutive opens in `attempts`. The header has the time in `created_at`, the time of the
    -- next claim in `next_attempt_at`, and the number of lost attempts in `attempts`.
    RETURN QUERY SELECT ${HALF_OPEN_ROW}::smallint, NULL::text, NULL::text, l.name, NULL::text,
        NULL::bytea, NULL::bytea, NULL::text, NULL::text, NULL::integer, NULL::bigint, NULL::bigint,
        NULL::bigint, NULL::smallint, NULL::text, l.consecutive_opens, NULL::integer, NULL::integer,
        NULL::double precision, NULL::integer, NULL::text, NULL::integer, NULL::text, NULL::bigint,
        NULL::boolean, NULL::integer, NULL::bigint, NULL::bigint
    FROM unnest(v_visits) AS i CROSS JOIN LATERAL (
        SELECT r.name, r.consecutive_opens FROM tarry.lane AS r WHERE r.id = i.lane
        ORDER BY r.generation DESC LIMIT 1) AS l
    WHERE i.probe IS NOT NULL;
    RETURN QUERY SELECT ${HEADER_ROW}::smallint, NULL::text, NULL::text, NULL::text, NULL::text,
        NULL::bytea, NULL::bytea, NULL::text, NULL::text, NULL::integer, v_now,
        CASE WHEN v_next_at IS NOT NULL THEN greatest(v_now, v_next_at) END,
        NULL::bigint, NULL::smallint, NULL::text, v_lost, NULL::integer, NULL::integer,
        NULL::double precision, NULL::integer, NULL::text, NULL::integer, NULL::text, NULL::bigint,
        NULL::boolean, NULL::integer, NULL::bigint, NULL::bigint;
END $$;

-- Return the ids of all tenants; NULL: there are too many to read each of them.
CREATE OR REPLACE FUNCTION tarry.all_tenants_1() RETURNS integer[] ${PLPGSQL} AS $$
DECLARE
    v_ids integer[];
BEGIN
    SELECT array_agg(n.id) INTO v_ids
    FROM (SELECT n.id FROM tarry.tenant_name AS n LIMIT ${MAX_TENANTS_READ} + 1) AS n;
    IF cardinality(v_ids) > ${MAX_TENANTS_READ} THEN
        RETURN NULL;
    END IF;
    RETURN coalesce(v_ids, '{}');
END $$;

-- Return the tenants that are ready or have to be checked, in the order of their turns. `p_tenants`
-- are all tenants, if they are few.
CREATE OR REPLACE FUNCTION tarry.tenants_to_visit_1(
    p_tenants integer[], p_skipped jsonb, p_horizon_end bigint, p_now bigint
) RETURNS integer[] ${PLPGSQL} AS $$
BEGIN
    IF p_tenants IS NOT NULL THEN
        RETURN (SELECT array_agg(t.id ORDER BY t.last_turn, t.id)
            FROM unnest(p_tenants) AS i (id) CROSS JOIN LATERAL (
                SELECT r.* FROM tarry.tenant AS r WHERE r.id = i.id
                ORDER BY r.generation DESC LIMIT 1) AS t
            WHERE (t.ready OR t.due_check_at <= p_horizon_end OR t.expiry_check_at <= p_now)
                AND NOT p_skipped ? t.name);
    END IF;
    RETURN (SELECT array_agg(t.id ORDER BY t.last_turn, t.id) FROM (
        (SELECT t.id, t.last_turn FROM tarry.tenant AS t
            WHERE t.ready AND NOT p_skipped ? t.name
            ORDER BY t.last_turn, t.id LIMIT ${MAX_TENANTS_VISITED})
        UNION
        (SELECT t.id, t.last_turn FROM tarry.tenant AS t
            WHERE NOT t.ready AND t.due_check_at <= p_horizon_end AND NOT p_skipped ? t.name
            ORDER BY t.due_check_at LIMIT ${MAX_TENANTS_VISITED})
        UNION
        (SELECT t.id, t.last_turn FROM tarry.tenant AS t
            WHERE NOT t.ready AND t.expiry_check_at <= p_now AND NOT p_skipped ? t.name
            ORDER BY t.expiry_check_at LIMIT ${MAX_TENANTS_VISITED})
    ) AS t);
END $$;

-- Return the lanes of tenants that are ready or have to be checked, up to `p_lane_cap` of each: the
-- first lane of each tenant, then the second, and so on.
CREATE OR REPLACE FUNCTION tarry.lanes_to_visit_1(
    p_tenants integer[], p_skipped jsonb, p_lane_cap integer, p_horizon_end bigint, p_now bigint
) RETURNS SETOF tarry.lane ${PLPGSQL} AS $$
BEGIN
    RETURN QUERY SELECT l.*
    FROM unnest(p_tenants) WITH ORDINALITY AS i (tenant, ord)
    CROSS JOIN LATERAL (
        SELECT r.* FROM tarry.tenant AS r WHERE r.id = i.tenant
        ORDER BY r.generation DESC LIMIT 1) AS t
    CROSS JOIN LATERAL (
        SELECT l.* FROM (
            (SELECT l.id FROM tarry.lane AS l
                WHERE l.tenant = i.tenant AND l.ready AND l.last_turn >= t.first_turn
                    AND NOT p_skipped ? l.name
                ORDER BY l.last_turn, l.id LIMIT p_lane_cap)
            UNION
            (SELECT l.id FROM tarry.lane AS l
                WHERE l.tenant = i.tenant AND NOT l.ready
                    AND l.due_check_at BETWEEN t.due_check_at AND p_horizon_end
                    AND NOT p_skipped ? l.name
                ORDER BY l.due_check_at LIMIT p_lane_cap)
            UNION
            (SELECT l.id FROM tarry.lane AS l
                WHERE l.tenant = i.tenant AND NOT l.ready
                    AND l.expiry_check_at BETWEEN t.expiry_check_at AND p_now
                    AND NOT p_skipped ? l.name
                ORDER BY l.expiry_check_at LIMIT p_lane_cap)
        ) AS c CROSS JOIN LATERAL (
            SELECT r.* FROM tarry.lane AS r WHERE r.id = c.id
            ORDER BY r.generation DESC LIMIT 1) AS l
    ) AS l
    ORDER BY row_number() OVER (PARTITION BY i.ord ORDER BY l.last_turn, l.id), i.ord;
END $$;

-- Visit the lanes of tenants in turn, and lock the tasks that can be leased, up to the limits.
CREATE OR REPLACE FUNCTION tarry.visit_lanes_1(
    p_tenants integer[], p_skipped jsonb, p_limit integer, p_per_lane integer,
    p_limited_names text[], p_limits integer[], p_horizon_end bigint, p_now bigint
) RETURNS tarry.visit_1[] ${PLPGSQL} AS $$
DECLARE
    v_remaining integer := p_limit;
    v_limit integer;
    v_left integer; -- of `v_limit`, after expired leases
    v_turn integer := 0;
    v_is_half_open boolean;
    v_expired bigint[]; -- tasks of the visited lane, by seq: with an expired lease,
    v_first bigint[]; -- without a failed attempt (later: all pending tasks to lease),
    v_retries bigint[]; -- with a failed attempt
    v_ready integer; -- how many of these are due now, without the task of the last probe
    v_probe bigint;
    v_visits tarry.visit_1[] := '{}';
    v_lane record;
BEGIN
    FOR v_lane IN
        SELECT * FROM tarry.lanes_to_visit_1(p_tenants, p_skipped,
            16 + 2 * p_limit / cardinality(p_tenants), p_horizon_end, p_now)
    LOOP
        EXIT WHEN v_remaining <= 0;
        v_expired := '{}';
        v_first := '{}';
        v_probe := NULL;
        v_limit := least(v_remaining, p_per_lane);
        IF v_lane.name = ANY (p_limited_names) THEN
            v_limit := least(v_limit, p_limits[array_position(p_limited_names, v_lane.name)]);
        END IF;
        v_is_half_open := v_lane.parked_until IS NOT NULL;
        IF v_lane.paused OR v_lane.parked_until > p_now THEN
            v_limit := 0;
        ELSIF v_is_half_open THEN
            SELECT i.probes, i.last_probe INTO v_limit, v_lane.last_probe
            FROM tarry.probes_1(v_lane.id, v_limit, p_now) AS i;
        END IF;
        IF v_limit > 0 THEN
            IF v_lane.lease_end_at <= p_now THEN
                SELECT coalesce(array_agg(s.seq), '{}') INTO v_expired FROM (
                    SELECT s.seq FROM tarry.live AS s
                    WHERE s.lane = v_lane.id AND s.queue = ${LEASED_QUEUE}
                        AND s.wake_at BETWEEN v_lane.lease_end_at AND p_now
                    ORDER BY s.wake_at, s.seq LIMIT v_limit FOR UPDATE SKIP LOCKED) AS s;
            END IF;
            v_left := v_limit - CASE WHEN v_is_half_open THEN 0 ELSE cardinality(v_expired) END;
            SELECT coalesce(array_agg(s.seq), '{}') INTO v_first FROM (
                SELECT s.seq FROM tarry.live AS s
                WHERE s.lane = v_lane.id AND s.queue = ${FIRST_ATTEMPT_QUEUE}
                    AND s.wake_at BETWEEN v_lane.due_at AND p_horizon_end
                ORDER BY s.wake_at, s.seq LIMIT v_left FOR UPDATE SKIP LOCKED) AS s;
            -- A third of the tasks are retries. `p_now % 3` sometimes rounds up, so that a limit of
            -- 1 also selects retries. A half-open lane reads one more, because the task of the last
            -- probe is used only if there is no other.
            SELECT coalesce(array_agg(s.seq), '{}'), count(*) FILTER (
                    WHERE s.wake_at <= p_now AND s.seq IS DISTINCT FROM v_lane.last_probe)
            INTO v_retries, v_ready FROM (
                SELECT s.seq, s.wake_at FROM tarry.live AS s
                WHERE s.lane = v_lane.id AND s.queue = ${RETRY_QUEUE}
                    AND s.wake_at BETWEEN v_lane.due_at AND p_horizon_end
                ORDER BY s.wake_at, s.seq
                LIMIT CASE WHEN v_is_half_open THEN v_left + 1 ELSE
                    greatest((v_left + p_now % 3) / 3, v_left - cardinality(v_first)) END
                FOR UPDATE SKIP LOCKED) AS s;
            IF v_is_half_open THEN
                SELECT i.pending, i.expired, i.last INTO v_first, v_expired, v_probe
                FROM tarry.choose_probes_1(v_first, v_retries, v_ready, v_expired,
                    v_lane.last_probe, v_limit, p_now) AS i;
            ELSE
                v_retries := v_retries[1:v_left];
                v_first := v_first[1:v_left - cardinality(v_retries)] || v_retries;
            END IF;
        END IF;
        v_limit := cardinality(v_first) + cardinality(v_expired);
        v_remaining := v_remaining - v_limit;
        v_turn := v_turn + (v_limit > 0)::integer;
        v_visits := v_visits || ROW(v_lane.id, v_lane.tenant, CASE WHEN v_limit > 0 THEN v_turn END,
            v_probe, v_first, v_expired)::tarry.visit_1;
    END LOOP;
    RETURN v_visits;
END $$;

-- Return how many probes of a half-open lane may be leased now, and the last one. Two claims must
-- not count the running probes at the same time: while another claim does, the number is NULL.
CREATE OR REPLACE FUNCTION tarry.probes_1(
    p_lane integer, p_limit integer, p_now bigint, OUT probes integer, OUT last_probe bigint
) ${PLPGSQL} AS $$
#variable_conflict use_column
DECLARE
    v_lane record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(${PROBE_LOCK}, p_lane) THEN
        RETURN;
    END IF;
    SELECT l.probes, l.last_probe INTO v_lane FROM tarry.lane AS l
    WHERE l.id = p_lane ORDER BY l.generation DESC LIMIT 1;
    last_probe := v_lane.last_probe;
    SELECT least(p_limit, v_lane.probes - count(*)) INTO probes FROM (
        SELECT 1 FROM tarry.live AS s
        WHERE s.lane = p_lane AND s.queue = ${LEASED_QUEUE} AND s.wake_at > p_now
        LIMIT v_lane.probes
    ) AS running;
END $$;

-- Choose the tasks that a half-open lane probes: new tasks and due retries, then expired leases,
-- then retries that are not due yet, and the task of the last probe only if there is no other.
CREATE OR REPLACE FUNCTION tarry.choose_probes_1(
    p_first bigint[], p_retries bigint[], p_ready integer, p_expired bigint[],
    p_last_probe bigint, p_limit integer, p_now bigint,
    OUT pending bigint[], OUT expired bigint[], OUT last bigint
) ${PLPGSQL} AS $$
DECLARE
    v_third integer := (p_limit + p_now % 3) / 3; -- rounded as in `visit_lanes_1`
    v_chosen bigint[];
BEGIN
    IF p_last_probe = ANY (p_retries) THEN
        p_retries := array_remove(p_retries, p_last_probe) || p_last_probe;
    END IF;
    v_chosen := (p_first[1:v_third] || p_retries[1:p_ready] || p_first[v_third + 1:]
        || p_expired || p_retries[p_ready + 1:])[1:p_limit];
    last := v_chosen[cardinality(v_chosen)];
    SELECT coalesce(array_agg(i.seq) FILTER (WHERE i.seq <> ALL (p_expired)), '{}'),
        coalesce(array_agg(i.seq) FILTER (WHERE i.seq = ANY (p_expired)), '{}')
    INTO pending, expired FROM unnest(v_chosen) AS i (seq);
END $$;

-- Renew the expired leases of the worker that claims, which still has these tasks.
CREATE OR REPLACE FUNCTION tarry.renew_1(
    p_tasks tarry.task_1[], p_worker text, p_length bigint, p_now bigint
) RETURNS tarry.task_1[] ${PLPGSQL} AS $$
DECLARE
    v_renewed tarry.task_1[];
BEGIN
    WITH renewed AS (
        UPDATE tarry.live AS s SET wake_at = greatest(p_now, s.next_attempt_at) + p_length
        FROM unnest(p_tasks) AS i
        WHERE s.tenant = i.tenant AND s.seq = i.seq AND s.worker = p_worker
        RETURNING s.tenant, s.seq
    )
    SELECT array_agg(ROW(r.tenant, r.seq)::tarry.task_1) INTO v_renewed FROM renewed AS r;
    RETURN coalesce(v_renewed, '{}');
END $$;

-- Log the attempts whose workers have not ended them in time. Lease their tasks, or end those whose
-- cancellation was requested.
CREATE OR REPLACE FUNCTION tarry.take_expired_1(
    p_tasks tarry.task_1[], p_worker text, p_length bigint, p_now bigint,
    OUT leased tarry.task_1[], OUT lost integer
) ${PLPGSQL} AS $$
#variable_conflict use_column
DECLARE
    v record;
BEGIN
    WITH lost AS MATERIALIZED (
        SELECT s.* FROM unnest(p_tasks) AS i
        JOIN tarry.live AS s ON s.tenant = i.tenant AND s.seq = i.seq
        WHERE s.worker <> p_worker
    ), logged AS (
        INSERT INTO tarry.attempt (seq, number, due_at, worker)
        SELECT s.seq, s.attempts + 1, s.next_attempt_at, s.worker FROM lost AS s
    ), removed AS (
        DELETE FROM tarry.live AS s USING lost AS i
        WHERE i.cancelling AND s.tenant = i.tenant AND s.seq = i.seq
    ), ended AS (
        ${FINISHED_INSERT}
        SELECT i.tenant, ${CANCELLED}, i.seq, i.lane, i.policy, p_now, i.next_attempt_at,
            i.first_due_at, i.created_at, i.version + 1, i.attempts + 1,
            i.attempts_before_replay, i.lost_attempts, i.backoff_offset, i.replays,
            i.previous_delay, i.last_outcome_kind, NULL
        FROM lost AS i WHERE i.cancelling
    ), leased AS (
        UPDATE tarry.live AS s
        SET version = s.version + 1, worker = p_worker, attempts = s.attempts + 1,
            lost_attempts = s.lost_attempts + 1, next_attempt_at = s.wake_at,
            wake_at = greatest(p_now, s.wake_at) + p_length
        FROM lost AS i WHERE NOT i.cancelling AND s.tenant = i.tenant AND s.seq = i.seq
        RETURNING s.tenant, s.seq
    ), changes AS (
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_LOST},
            0 AS superseded, 0 AS new_lanes, NULL::bigint AS due, NULL::bigint AS lease_end
        FROM lost AS i WHERE i.cancelling GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
        (SELECT array_agg(ROW(s.*)::tarry.task_1) FROM leased AS s) AS leased,
        count(*)::integer AS lost, array_agg(s.tenant) AS tenants,
        array_agg('lost'::text) AS outcomes
    INTO v FROM lost AS s;
    leased := coalesce(v.leased, '{}');
    lost := v.lost;
    IF v.changes IS NOT NULL THEN
        PERFORM tarry.apply_1(v.changes);
    END IF;
    IF v.lost > 0 THEN
        PERFORM tarry.count_attempts_1(v.tenants, v.outcomes, p_now);
    END IF;
END $$;

-- Lease PENDING tasks. Return the number, and the first end of a lease, by lane.
CREATE OR REPLACE FUNCTION tarry.lease_1(
    p_tasks tarry.task_1[], p_worker text, p_length bigint, p_now bigint
) RETURNS tarry.leased_1[] ${PLPGSQL} AS $$
DECLARE
    v_leased tarry.leased_1[];
BEGIN
    WITH leased AS (
        UPDATE tarry.live AS s
        SET queue = ${LEASED_QUEUE}, version = s.version + 1, worker = p_worker,
            wake_at = greatest(p_now, s.wake_at) + p_length
        FROM unnest(p_tasks) AS i
        WHERE s.tenant = i.tenant AND s.seq = i.seq
        RETURNING s.lane, s.wake_at
    ), groups AS (
        SELECT s.lane, count(*)::integer AS leased, min(s.wake_at) AS lease_end
        FROM leased AS s GROUP BY s.lane
    )
    SELECT array_agg(ROW(g.*)::tarry.leased_1) INTO v_leased FROM groups AS g;
    RETURN v_leased;
END $$;

-- Count the leases of the visited lanes, and compute their check times. Served lanes go to the end
-- of the rotation. A lane from which nothing can be leased now is put to sleep. Return the changes
-- for their tenants.
CREATE OR REPLACE FUNCTION tarry.write_lanes_1(
    p_visits tarry.visit_1[], p_leased tarry.leased_1[], p_turn bigint, p_horizon_end bigint,
    p_now bigint
) RETURNS tarry.lane_change_1[] ${PLPGSQL} AS $$
DECLARE
    v_lanes integer[] := (SELECT array_agg(i.lane) FROM unnest(p_leased) AS i);
    v_changes tarry.lane_change_1[];
BEGIN
    WITH changed AS (
        UPDATE tarry.lane AS l
        SET updates = l.updates + 1, generation = (l.updates + 1) / 32,
            ${LANE_COUNTS_OF_LEASED},
            due_at = x.due, lease_end_at = x.lease_end, ready = x.is_ready,
            due_check_at = CASE WHEN x.is_ready OR x.is_full OR l.parked_until > p_now THEN NULL
                ELSE tarry.due_check_1(l.paused, l.parked_until, x.due) END,
            expiry_check_at = CASE WHEN x.is_ready OR l.paused THEN NULL
                WHEN l.parked_until > p_now THEN l.parked_until
                WHEN x.is_full THEN x.first_end
                ELSE tarry.expiry_check_1(l.paused, l.parked_until, x.due, x.lease_end) END,
            last_claim_at = CASE WHEN x.turn IS NULL THEN l.last_claim_at ELSE p_now END,
            last_turn = coalesce(p_turn + x.turn, l.last_turn),
            last_probe = coalesce(x.probe, l.last_probe)
        FROM (
            SELECT y.*, NOT y.is_blocked AND NOT y.is_full
                AND (coalesce(y.due <= p_horizon_end, FALSE)
                    OR coalesce(y.lease_end <= p_now, FALSE)) AS is_ready
            FROM (
                SELECT l.tid, i.turn, i.probe, g.leased, t.due, t.lease_end,
                    l.paused OR coalesce(l.parked_until > p_now, FALSE) AS is_blocked,
                    l.parked_until IS NOT NULL AND r.running >= l.probes AS is_full, r.first_end
                FROM unnest(p_visits) AS i
                CROSS JOIN LATERAL (
                    SELECT r.ctid AS tid, r.* FROM tarry.lane AS r WHERE r.id = i.lane
                    ORDER BY r.generation DESC LIMIT 1) AS l
                CROSS JOIN LATERAL (
                    SELECT coalesce((p_leased[p.at]).leased, 0) AS leased,
                        CASE WHEN l.pending > coalesce((p_leased[p.at]).leased, 0)
                            THEN l.due_at END AS first_due,
                        least(l.lease_end_at, (p_leased[p.at]).lease_end) AS first_lease_end
                    FROM array_position(v_lanes, l.id) AS p (at)) AS g
                CROSS JOIN LATERAL (SELECT
                    least((SELECT min(s.wake_at) FROM tarry.live AS s
                            WHERE s.lane = l.id AND s.queue = ${FIRST_ATTEMPT_QUEUE}
                                AND s.wake_at >= g.first_due),
                        (SELECT min(s.wake_at) FROM tarry.live AS s
                            WHERE s.lane = l.id AND s.queue = ${RETRY_QUEUE}
                                AND s.wake_at >= g.first_due))
                        AS due,
                    (SELECT min(s.wake_at) FROM tarry.live AS s
                        WHERE s.lane = l.id AND s.queue = ${LEASED_QUEUE}
                            AND s.wake_at >= g.first_lease_end)
                        AS lease_end) AS t
                CROSS JOIN LATERAL (
                    SELECT count(*) AS running, min(s.wake_at) AS first_end FROM (
                        SELECT s.wake_at FROM tarry.live AS s
                        WHERE s.lane = l.id AND s.queue = ${LEASED_QUEUE} AND s.wake_at > p_now
                            AND l.parked_until IS NOT NULL
                        ORDER BY s.wake_at LIMIT l.probes) AS s) AS r
            ) AS y
        ) AS x
        WHERE l.ctid = x.tid
        RETURNING l.tenant, x.leased, x.turn, CASE WHEN l.ready THEN l.last_turn END AS first_turn,
            l.due_check_at, l.expiry_check_at
    )
    SELECT array_agg(ROW(c.*)::tarry.lane_change_1) INTO v_changes FROM changed AS c;
    RETURN v_changes;
END $$;

-- Count the leases of tenants, and compute the bounds for the search of their lanes.
CREATE OR REPLACE FUNCTION tarry.write_tenants_1(
    p_tenants integer[], p_changes tarry.lane_change_1[], p_turn bigint
) RETURNS void ${PLPGSQL} AS $$
BEGIN
    UPDATE tarry.tenant AS t
    SET updates = t.updates + 1, generation = (t.updates + 1) / 32,
        ${TENANT_COUNTS_OF_LEASED},
        ready = x.first_turn IS NOT NULL, first_turn = x.first_turn, due_check_at = x.due_check,
        expiry_check_at = x.expiry_check, last_turn = coalesce(x.last_turn, t.last_turn)
    FROM (
        SELECT n.tid, d.leased, p_turn + d.turn AS last_turn,
            (SELECT min(l.last_turn) FROM tarry.lane AS l WHERE l.tenant = d.tenant AND l.ready
                AND l.last_turn >= least(n.first_turn, d.first_turn)) AS first_turn,
            (SELECT min(l.due_check_at) FROM tarry.lane AS l
                WHERE l.tenant = d.tenant AND NOT l.ready
                    AND l.due_check_at >= least(n.due_check_at, d.due_check)) AS due_check,
            (SELECT min(l.expiry_check_at) FROM tarry.lane AS l
                WHERE l.tenant = d.tenant AND NOT l.ready
                    AND l.expiry_check_at >= least(n.expiry_check_at, d.expiry_check))
                AS expiry_check
        FROM (
            SELECT i.tenant, sum(i.leased) AS leased, max(i.turn) AS turn,
                min(i.first_turn) AS first_turn, min(i.due_check) AS due_check,
                min(i.expiry_check) AS expiry_check
            FROM (
                SELECT c.* FROM unnest(p_changes) AS c
                UNION ALL
                SELECT i.tenant, 0, NULL, NULL, NULL, NULL FROM unnest(p_tenants) AS i (tenant)
            ) AS i GROUP BY i.tenant
        ) AS d CROSS JOIN LATERAL (
            SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = d.tenant
            ORDER BY r.generation DESC LIMIT 1) AS n
    ) AS x
    WHERE t.ctid = x.tid
        AND (t.first_turn, t.due_check_at, t.expiry_check_at, t.last_turn, t.pending, t.ready)
        IS DISTINCT FROM (x.first_turn, x.due_check, x.expiry_check,
            coalesce(x.last_turn, t.last_turn), t.pending - x.leased, x.first_turn IS NOT NULL);
END $$;

-- Return the time of the next claim, or NULL. `p_all_tenants` are all tenants, if they are few, and
-- `p_tenants` those that were visited.
CREATE OR REPLACE FUNCTION tarry.next_claim_1(
    p_all_tenants integer[], p_tenants integer[], p_skipped jsonb, p_horizon bigint, p_now bigint
) RETURNS bigint ${PLPGSQL} AS $$
DECLARE
    v_next_at bigint;
BEGIN
    IF cardinality(p_tenants) >= ${MAX_TENANTS_VISITED} THEN
        RETURN p_now; -- there may be other tenants with due tasks
    END IF;
    -- Most claims of a busy service leave ready lanes. Then the check times do not matter.
    IF EXISTS (SELECT 1 FROM unnest(p_tenants) AS i (id) WHERE EXISTS (
            SELECT 1 FROM (
                SELECT r.* FROM tarry.tenant AS r WHERE r.id = i.id
                ORDER BY r.generation DESC LIMIT 1) AS t
            JOIN tarry.lane AS l ON l.tenant = t.id
            WHERE l.ready AND l.last_turn >= t.first_turn AND NOT p_skipped ? l.name))
    THEN
        RETURN p_now;
    END IF;
    IF p_all_tenants IS NOT NULL THEN
        RETURN tarry.next_check_1(p_all_tenants, p_skipped, p_horizon);
    END IF;
    PERFORM tarry.correct_checks_1(p_horizon, p_now);
    SELECT min(x.at) INTO v_next_at FROM (
        SELECT tarry.next_check_1(p_tenants, p_skipped, p_horizon) AS at
        UNION ALL
        SELECT min(t.due_check_at) - p_horizon FROM tarry.tenant AS t
        WHERE NOT t.ready AND t.due_check_at > p_now + p_horizon AND NOT p_skipped ? t.name
            AND t.id <> ALL (coalesce(p_tenants, '{}'))
        UNION ALL
        SELECT min(t.expiry_check_at) FROM tarry.tenant AS t
        WHERE NOT t.ready AND t.expiry_check_at > p_now AND NOT p_skipped ? t.name
            AND t.id <> ALL (coalesce(p_tenants, '{}'))
    ) AS x;
    RETURN v_next_at;
END $$;

-- Return when lanes of the tenants have to be visited, without lanes that the claim skips.
CREATE OR REPLACE FUNCTION tarry.next_check_1(
    p_tenants integer[], p_skipped jsonb, p_horizon bigint
) RETURNS bigint ${PLPGSQL} AS $$
BEGIN
    RETURN (SELECT min(least(
            (SELECT min(l.due_check_at) - p_horizon FROM tarry.lane AS l WHERE l.tenant = t.id
                AND NOT l.ready AND l.due_check_at >= t.due_check_at
                AND NOT p_skipped ? l.name),
            (SELECT min(l.expiry_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
                AND NOT l.ready AND l.expiry_check_at >= t.expiry_check_at
                AND NOT p_skipped ? l.name)))
        FROM unnest(p_tenants) AS i (id) CROSS JOIN LATERAL (
            SELECT r.* FROM tarry.tenant AS r WHERE r.id = i.id
            ORDER BY r.generation DESC LIMIT 1) AS t
        WHERE NOT p_skipped ? t.name);
END $$;

-- Return the earliest check times of the lanes of a tenant, given those of the tenant.
CREATE OR REPLACE FUNCTION tarry.exact_checks_1(
    p_tenant integer, p_due_check bigint, p_expiry_check bigint,
    OUT due_check bigint, OUT expiry_check bigint
) ${PLPGSQL} AS $$
BEGIN
    due_check := (SELECT min(l.due_check_at) FROM tarry.lane AS l
        WHERE l.tenant = p_tenant AND NOT l.ready AND l.due_check_at >= p_due_check);
    expiry_check := (SELECT min(l.expiry_check_at) FROM tarry.lane AS l
        WHERE l.tenant = p_tenant AND NOT l.ready AND l.expiry_check_at >= p_expiry_check);
END $$;

-- The check times of a tenant are lower bounds: they do not change when the check times of its
-- lanes become later. Correct a few outdated ones, which would make the next claim too early.
CREATE OR REPLACE FUNCTION tarry.correct_checks_1(p_horizon bigint, p_now bigint) RETURNS void
${PLPGSQL} AS $$
DECLARE
    v record;
BEGIN
    FOR v_try IN 1..${MAX_CHECKS_CORRECTED} LOOP
        SELECT t.id, t.due_check_at, t.expiry_check_at, c.due_check, c.expiry_check INTO v
        FROM (
            (SELECT t.id, t.due_check_at - p_horizon AS at FROM tarry.tenant AS t
                WHERE NOT t.ready AND t.due_check_at > p_now + p_horizon
                ORDER BY t.due_check_at LIMIT 1)
            UNION ALL
            (SELECT t.id, t.expiry_check_at AS at FROM tarry.tenant AS t
                WHERE NOT t.ready AND t.expiry_check_at > p_now
                ORDER BY t.expiry_check_at LIMIT 1)
            ORDER BY 2 LIMIT 1
        ) AS f CROSS JOIN LATERAL (
            SELECT r.* FROM tarry.tenant AS r WHERE r.id = f.id
            ORDER BY r.generation DESC LIMIT 1) AS t
        CROSS JOIN LATERAL tarry.exact_checks_1(t.id, t.due_check_at, t.expiry_check_at) AS c;
        EXIT WHEN NOT FOUND OR (v.due_check_at, v.expiry_check_at)
            IS NOT DISTINCT FROM (v.due_check, v.expiry_check);
        PERFORM 1 FROM tarry.tenant AS t WHERE t.id = v.id ORDER BY t.generation DESC LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED;
        EXIT WHEN NOT FOUND; -- other tenants are locked already: waiting could be a deadlock
        UPDATE tarry.tenant AS t
        SET updates = t.updates + 1, generation = (t.updates + 1) / 32,
            due_check_at = c.due_check, expiry_check_at = c.expiry_check
        FROM (
            SELECT t.tid, c.* FROM (
                SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = v.id
                ORDER BY r.generation DESC LIMIT 1) AS t
            CROSS JOIN LATERAL tarry.exact_checks_1(t.id, t.due_check_at, t.expiry_check_at) AS c
        ) AS c
        WHERE t.ctid = c.tid AND NOT t.ready;
    END LOOP;
END $$;
