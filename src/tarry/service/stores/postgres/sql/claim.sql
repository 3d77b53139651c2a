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
    v_all_tenants integer[]; -- NULL: too many
    v_tenants integer[];
    v_lane record;
    v_lane_cap integer; -- lanes that are read of each tenant
    v_remaining integer := p_limit;
    v_limit integer;
    v_left integer; -- of `v_limit`, after expired leases
    v_visited integer[] := '{}';
    v_changed integer[] := '{}'; -- tenants whose check times are computed again
    v_served integer[] := '{}'; -- lanes from which tasks were leased
    v_leased_lanes integer[] := '{}'; -- lanes with tasks that were PENDING until this claim,
    v_leased integer[] := '{}'; -- the number of these tasks,
    v_lease_ends bigint[] := '{}'; -- and their earliest end of a lease
    v_half_open integer[] := '{}'; -- lanes from which probes were leased
    v_probes bigint[] := '{}'; -- seq of the last probe of each
    v_is_half_open boolean;
    v_expired bigint[]; -- tasks of the visited lane, by seq: with an expired lease,
    v_first bigint[]; -- without a failed attempt (later: all pending tasks to lease),
    v_retries bigint[]; -- with a failed attempt
    v_ready integer; -- how many of these are due now, without the task of the last probe
    v_third integer; -- of `v_limit`
    v_chosen bigint[];
    v_pending_tenants integer[] := '{}';
    v_pending_seqs bigint[] := '{}';
    v_expired_tenants integer[] := '{}';
    v_expired_seqs bigint[] := '{}';
    v_renewed bigint[];
    v_lost integer := 0;
    v_leased_count integer := 0;
    v_turn bigint;
    v_next_at bigint;
    v record;
BEGIN
    SELECT coalesce(jsonb_object_agg(i.name, 0), '{}') INTO v_skipped
    FROM unnest(p_limited_names, p_limits) AS i (name, value) WHERE i.value = 0;
    SELECT array_agg(n.id) INTO v_all_tenants
    FROM (SELECT n.id FROM tarry.tenant_name AS n LIMIT ${MAX_TENANTS_READ} + 1) AS n;
    IF cardinality(v_all_tenants) > ${MAX_TENANTS_READ} THEN
        v_all_tenants := NULL;
        SELECT array_agg(t.id ORDER BY t.last_turn, t.id) INTO v_tenants FROM (
            (SELECT t.id, t.last_turn FROM tarry.tenant AS t
                WHERE t.ready AND NOT v_skipped ? t.name
                ORDER BY t.last_turn, t.id LIMIT ${MAX_TENANTS_VISITED})
            UNION
            (SELECT t.id, t.last_turn FROM tarry.tenant AS t
                WHERE NOT t.ready AND t.due_check_at <= v_horizon_end AND NOT v_skipped ? t.name
                ORDER BY t.due_check_at LIMIT ${MAX_TENANTS_VISITED})
            UNION
            (SELECT t.id, t.last_turn FROM tarry.tenant AS t
                WHERE NOT t.ready AND t.expiry_check_at <= v_now AND NOT v_skipped ? t.name
                ORDER BY t.expiry_check_at LIMIT ${MAX_TENANTS_VISITED})
        ) AS t;
    ELSE
        SELECT array_agg(t.id ORDER BY t.last_turn, t.id) INTO v_tenants
        FROM unnest(v_all_tenants) AS i (id) CROSS JOIN LATERAL (
            SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = i.id
            ORDER BY r.generation DESC LIMIT 1) AS t
        WHERE (t.ready OR t.due_check_at <= v_horizon_end OR t.expiry_check_at <= v_now)
            AND NOT v_skipped ? t.name;
    END IF;
    v_lane_cap := 16 + 2 * p_limit / greatest(1, coalesce(cardinality(v_tenants), 1));
    FOR v_lane IN
        SELECT l.*, i.ord AS tenant_order,
            row_number() OVER (PARTITION BY i.ord ORDER BY l.last_turn, l.id) AS round
        FROM unnest(CASE WHEN p_limit > 0 THEN v_tenants END) WITH ORDINALITY AS i (tenant, ord)
        CROSS JOIN LATERAL (
            SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = i.tenant
            ORDER BY r.generation DESC LIMIT 1) AS t
        CROSS JOIN LATERAL (
            SELECT l.* FROM (
                (SELECT l.id FROM tarry.lane AS l
                    WHERE l.tenant = i.tenant AND l.ready AND l.last_turn >= t.first_turn
                        AND NOT v_skipped ? l.name
                    ORDER BY l.last_turn, l.id LIMIT v_lane_cap)
                UNION
                (SELECT l.id FROM tarry.lane AS l
                    WHERE l.tenant = i.tenant AND NOT l.ready
                        AND l.due_check_at BETWEEN t.due_check_at AND v_horizon_end
                        AND NOT v_skipped ? l.name
                    ORDER BY l.due_check_at LIMIT v_lane_cap)
                UNION
                (SELECT l.id FROM tarry.lane AS l
                    WHERE l.tenant = i.tenant AND NOT l.ready
                        AND l.expiry_check_at BETWEEN t.expiry_check_at AND v_now
                        AND NOT v_skipped ? l.name
                    ORDER BY l.expiry_check_at LIMIT v_lane_cap)
            ) AS c CROSS JOIN LATERAL (
                SELECT r.ctid AS tid, r.* FROM tarry.lane AS r WHERE r.id = c.id
                ORDER BY r.generation DESC LIMIT 1) AS l
        ) AS l
        ORDER BY round, tenant_order
    LOOP
        EXIT WHEN v_remaining <= 0;
        v_visited := v_visited || v_lane.id;
        v_changed := v_changed || v_lane.tenant;
        CONTINUE WHEN v_lane.paused OR v_lane.parked_until > v_now;
        v_limit := least(v_remaining, p_per_lane);
        IF v_lane.name = ANY (p_limited_names) THEN
            v_limit := least(v_limit, p_limits[array_position(p_limited_names, v_lane.name)]);
        END IF;
        v_is_half_open := v_lane.parked_until IS NOT NULL;
        IF v_is_half_open THEN
            -- Two claims must not count the running probes at the same time.
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(${PROBE_LOCK}, v_lane.id);
            SELECT l.probes, l.last_probe INTO v FROM tarry.lane AS l
            WHERE l.id = v_lane.id ORDER BY l.generation DESC LIMIT 1;
            v_lane.last_probe := v.last_probe;
            SELECT least(v_limit, v.probes - count(*)) INTO v_limit FROM (
                SELECT 1 FROM tarry.live AS s
                WHERE s.lane = v_lane.id AND s.queue = ${LEASED_QUEUE} AND s.wake_at > v_now
                LIMIT v.probes
            ) AS running;
        END IF;
        CONTINUE WHEN v_limit <= 0;
        v_expired := '{}';
        IF v_lane.lease_end_at <= v_now THEN
            SELECT coalesce(array_agg(s.seq), '{}') INTO v_expired FROM (
                SELECT s.seq FROM tarry.live AS s
                WHERE s.lane = v_lane.id AND s.queue = ${LEASED_QUEUE}
                    AND s.wake_at BETWEEN v_lane.lease_end_at AND v_now
                ORDER BY s.wake_at, s.seq LIMIT v_limit FOR UPDATE SKIP LOCKED) AS s;
        END IF;
        v_left := v_limit - CASE WHEN v_is_half_open THEN 0 ELSE cardinality(v_expired) END;
        SELECT coalesce(array_agg(s.seq), '{}') INTO v_first FROM (
            SELECT s.seq FROM tarry.live AS s
            WHERE s.lane = v_lane.id AND s.queue = ${FIRST_ATTEMPT_QUEUE}
                AND s.wake_at BETWEEN v_lane.due_at AND v_horizon_end
            ORDER BY s.wake_at, s.seq LIMIT v_left FOR UPDATE SKIP LOCKED) AS s;
        -- A third of the tasks are retries. `v_now % 3` sometimes rounds up, so that a limit of 1
        -- also selects retries. A half-open lane reads one more, because the task of the last probe
        -- is used only if there is no other.
        SELECT coalesce(array_agg(s.seq), '{}'), count(*) FILTER (
                WHERE s.wake_at <= v_now AND s.seq IS DISTINCT FROM v_lane.last_probe)
        INTO v_retries, v_ready FROM (
            SELECT s.seq, s.wake_at FROM tarry.live AS s
            WHERE s.lane = v_lane.id AND s.queue = ${RETRY_QUEUE}
                AND s.wake_at BETWEEN v_lane.due_at AND v_horizon_end
            ORDER BY s.wake_at, s.seq
            LIMIT CASE WHEN v_is_half_open THEN v_left + 1 ELSE
                greatest((v_left + v_now % 3) / 3, v_left - cardinality(v_first)) END
            FOR UPDATE SKIP LOCKED) AS s;
        IF v_is_half_open THEN
            IF v_lane.last_probe = ANY (v_retries) THEN
                v_retries := array_remove(v_retries, v_lane.last_probe) || v_lane.last_probe;
            END IF;
            v_third := (v_limit + v_now % 3) / 3; -- rounded as above
            v_chosen := (v_first[1:v_third] || v_retries[1:v_ready] || v_first[v_third + 1:]
                || v_expired || v_retries[v_ready + 1:])[1:v_limit];
            CONTINUE WHEN cardinality(v_chosen) = 0;
            v_half_open := v_half_open || v_lane.id;
            v_probes := v_probes || v_chosen[cardinality(v_chosen)];
            SELECT coalesce(array_agg(i.seq), '{}') INTO v_expired
            FROM unnest(v_chosen) AS i (seq) WHERE i.seq = ANY (v_expired);
            SELECT coalesce(array_agg(i.seq), '{}') INTO v_first
            FROM unnest(v_chosen) AS i (seq) WHERE i.seq <> ALL (v_expired);
        ELSE
            v_retries := v_retries[1:v_left];
            v_first := v_first[1:v_left - cardinality(v_retries)] || v_retries;
            CONTINUE WHEN cardinality(v_first) + cardinality(v_expired) = 0;
        END IF;
        v_served := v_served || v_lane.id;
        v_remaining := v_remaining - cardinality(v_first) - cardinality(v_expired);
        v_pending_seqs := v_pending_seqs || v_first;
        v_pending_tenants := v_pending_tenants
            || array_fill(v_lane.tenant, ARRAY[cardinality(v_first)]);
        v_expired_seqs := v_expired_seqs || v_expired;
        v_expired_tenants := v_expired_tenants
            || array_fill(v_lane.tenant, ARRAY[cardinality(v_expired)]);
    END LOOP;

    IF cardinality(v_expired_seqs) > 0 THEN
        -- The worker that claims still has these tasks: renew its leases.
        WITH renewed AS (
            UPDATE tarry.live AS s SET wake_at = greatest(v_now, s.next_attempt_at) + p_length
            FROM unnest(v_expired_tenants, v_expired_seqs) AS i (tenant, seq)
            WHERE s.tenant = i.tenant AND s.seq = i.seq AND s.worker = p_worker
            RETURNING s.tenant, s.seq
        )
        SELECT array_agg(r.seq) AS seqs, array_agg(r.tenant) AS tenants INTO v FROM renewed AS r;
        v_renewed := v.seqs;
        IF v_renewed IS NOT NULL THEN
            RETURN QUERY SELECT ${RENEWED_ROW}::smallint, ${LIVE_COLUMNS}
            FROM unnest(v.tenants, v.seqs) AS i (tenant, seq)
            JOIN tarry.live AS s ON s.tenant = i.tenant AND s.seq = i.seq ${TASK_JOINS};
            v_leased_count := v_leased_count + cardinality(v_renewed);
        END IF;
    END IF;
    -- All lanes were visited if the limit was not reached. The check times of tenants without a
    -- lane to visit are outdated then.
    IF p_limit > 0 AND v_remaining > 0 THEN
        v_changed := coalesce(v_tenants, '{}');
    ELSE
        SELECT coalesce(array_agg(DISTINCT i.id), '{}') INTO v_changed
        FROM unnest(v_changed) AS i (id);
    END IF;
    -- Other transactions wait for lanes and tenants from here to the commit.
    PERFORM 1 FROM (
            SELECT DISTINCT i.id FROM unnest(v_visited) AS i (id) ORDER BY i.id) AS i
        CROSS JOIN LATERAL (SELECT r.id FROM tarry.lane AS r
            WHERE r.id = i.id ORDER BY r.generation DESC LIMIT 1 FOR NO KEY UPDATE) AS r;
    PERFORM 1 FROM (
            SELECT DISTINCT i.id FROM unnest(v_changed) AS i (id) ORDER BY i.id) AS i
        CROSS JOIN LATERAL (SELECT r.id FROM tarry.tenant AS r
            WHERE r.id = i.id ORDER BY r.generation DESC LIMIT 1 FOR NO KEY UPDATE) AS r;
    IF cardinality(v_expired_seqs) > cardinality(coalesce(v_renewed, '{}')) THEN
        WITH lost AS MATERIALIZED (
            SELECT s.* FROM unnest(v_expired_tenants, v_expired_seqs) AS i (tenant, seq)
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
            SELECT i.tenant, ${CANCELLED}, i.seq, i.lane, i.policy, v_now, i.next_attempt_at,
                i.first_due_at, i.created_at, i.version + 1, i.attempts + 1,
                i.attempts_before_replay, i.lost_attempts, i.backoff_offset, i.replays,
                i.previous_delay, i.last_outcome_kind, NULL
            FROM lost AS i WHERE i.cancelling
        ), leased AS (
            UPDATE tarry.live AS s
            SET version = s.version + 1, worker = p_worker, attempts = s.attempts + 1,
                lost_attempts = s.lost_attempts + 1, next_attempt_at = s.wake_at,
                wake_at = greatest(v_now, s.wake_at) + p_length
            FROM lost AS i WHERE NOT i.cancelling AND s.tenant = i.tenant AND s.seq = i.seq
            RETURNING s.tenant, s.seq
        ), changes AS (
            SELECT i.tenant, i.lane, i.policy,
                ${COUNTS_OF_LOST},
                0 AS superseded, 0 AS new_lanes, NULL::bigint AS due, NULL::bigint AS lease_end
            FROM lost AS i WHERE i.cancelling GROUP BY i.tenant, i.lane, i.policy
        )
        SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
            (SELECT array_agg(s.tenant) FROM leased AS s) AS leased_tenants,
            (SELECT array_agg(s.seq) FROM leased AS s) AS leased_seqs,
            count(*)::integer AS lost, array_agg(s.tenant) AS lost_tenants,
            array_agg('lost'::text) AS outcomes
        INTO v FROM lost AS s;
        v_lost := v.lost;
        IF v.changes IS NOT NULL THEN
            PERFORM tarry.apply_1(v.changes);
        END IF;
        IF v.lost > 0 THEN
            PERFORM tarry.count_attempts_1(v.lost_tenants, v.outcomes, v_now);
        END IF;
        IF v.leased_seqs IS NOT NULL THEN
            RETURN QUERY SELECT ${LEASED_ROW}::smallint, ${LIVE_COLUMNS}
            FROM unnest(v.leased_tenants, v.leased_seqs) AS i (tenant, seq)
            JOIN tarry.live AS s ON s.tenant = i.tenant AND s.seq = i.seq ${TASK_JOINS};
            v_leased_count := v_leased_count + cardinality(v.leased_seqs);
        END IF;
    END IF;
    IF cardinality(v_pending_seqs) > 0 THEN
        WITH leased AS (
            UPDATE tarry.live AS s
            SET queue = ${LEASED_QUEUE}, version = s.version + 1, worker = p_worker,
                wake_at = greatest(v_now, s.wake_at) + p_length
            FROM unnest(v_pending_tenants, v_pending_seqs) AS i (tenant, seq)
            WHERE s.tenant = i.tenant AND s.seq = i.seq
            RETURNING s.lane, s.wake_at
        ), groups AS (
            SELECT s.lane, count(*)::integer AS leased, min(s.wake_at) AS lease_end
            FROM leased AS s GROUP BY s.lane
        )
        SELECT array_agg(g.lane), array_agg(g.leased), array_agg(g.lease_end)
        INTO v_leased_lanes, v_leased, v_lease_ends FROM groups AS g;
        RETURN QUERY SELECT ${LEASED_ROW}::smallint, ${LIVE_COLUMNS}
        FROM unnest(v_pending_tenants, v_pending_seqs) AS i (tenant, seq)
        JOIN tarry.live AS s ON s.tenant = i.tenant AND s.seq = i.seq ${TASK_JOINS};
        v_leased_count := v_leased_count + cardinality(v_pending_seqs);
    END IF;

    SELECT NULL::integer[] AS tenants, NULL::integer[] AS leased, NULL::integer[] AS turns,
        NULL::bigint[] AS first_turns, NULL::bigint[] AS due_checks, NULL::bigint[] AS expiry_checks
    INTO v;
    IF cardinality(v_visited) > 0 THEN
        -- Served lanes go to the end of the rotation. A lane from which nothing can be leased now
        -- is put to sleep.
        IF cardinality(v_served) > 0 THEN
            v_turn := nextval('tarry.turn') << 20;
        END IF;
        WITH changed AS (UPDATE tarry.lane AS l
        SET updates = l.updates + 1, generation = (l.updates + 1) / 32,
            ${LANE_COUNTS_OF_LEASED},
            due_at = x.due, lease_end_at = x.lease_end,
            ready = x.is_ready,
            due_check_at = CASE WHEN x.is_ready OR x.is_full OR l.parked_until > v_now THEN NULL
                ELSE tarry.due_check_1(l.paused, l.parked_until, x.due) END,
            expiry_check_at = CASE WHEN x.is_ready OR l.paused THEN NULL
                WHEN l.parked_until > v_now THEN l.parked_until
                WHEN x.is_full THEN x.first_end
                ELSE tarry.expiry_check_1(l.paused, l.parked_until, x.due, x.lease_end) END,
            last_claim_at = CASE WHEN x.turn IS NULL THEN l.last_claim_at ELSE v_now END,
            last_turn = coalesce(v_turn + x.turn, l.last_turn),
            last_probe = coalesce(x.probe, l.last_probe)
        FROM (
            SELECT y.*, NOT y.is_blocked AND NOT y.is_full
                AND (coalesce(y.due <= v_horizon_end, FALSE)
                    OR coalesce(y.lease_end <= v_now, FALSE)) AS is_ready
            FROM (
                SELECT l.tid, g.leased, t.due, t.lease_end,
                    l.paused OR coalesce(l.parked_until > v_now, FALSE) AS is_blocked,
                    l.parked_until IS NOT NULL AND r.running >= l.probes AS is_full, r.first_end,
                    array_position(v_served, l.id) AS turn,
                    v_probes[array_position(v_half_open, l.id)] AS probe
                FROM unnest(v_visited) AS i (id)
                CROSS JOIN LATERAL (
                    SELECT r.ctid AS tid, r.* FROM tarry.lane AS r WHERE r.id = i.id
                    ORDER BY r.generation DESC LIMIT 1) AS l
                CROSS JOIN LATERAL (
                    SELECT coalesce(v_leased[p.at], 0) AS leased,
                        CASE WHEN l.pending > coalesce(v_leased[p.at], 0) THEN l.due_at END
                            AS first_due,
                        least(l.lease_end_at, v_lease_ends[p.at]) AS first_lease_end
                    FROM array_position(v_leased_lanes, l.id) AS p (at)) AS g
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
                        WHERE s.lane = l.id AND s.queue = ${LEASED_QUEUE} AND s.wake_at > v_now
                            AND l.parked_until IS NOT NULL
                        ORDER BY s.wake_at LIMIT l.probes) AS s) AS r
            ) AS y
        ) AS x
        WHERE l.ctid = x.tid
        RETURNING l.tenant, x.leased, x.turn, CASE WHEN l.ready THEN l.last_turn END AS first_turn,
            l.due_check_at, l.expiry_check_at)
        SELECT array_agg(c.tenant) AS tenants, array_agg(c.leased) AS leased,
            array_agg(c.turn) AS turns, array_agg(c.first_turn) AS first_turns,
            array_agg(c.due_check_at) AS due_checks, array_agg(c.expiry_check_at) AS expiry_checks
        INTO v FROM changed AS c;
    END IF;
    IF cardinality(v_changed) > 0 THEN
        UPDATE tarry.tenant AS t
        SET updates = t.updates + 1, generation = (t.updates + 1) / 32,
            ${TENANT_COUNTS_OF_LEASED},
            ready = x.first_turn IS NOT NULL,
            first_turn = x.first_turn, due_check_at = x.due_check, expiry_check_at = x.expiry_check,
            last_turn = coalesce(x.last_turn, t.last_turn)
        FROM (
            SELECT n.tid, d.leased, v_turn + d.turn AS last_turn,
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
                    SELECT c.* FROM unnest(v.tenants, v.leased, v.turns, v.first_turns,
                        v.due_checks, v.expiry_checks)
                        AS c (tenant, leased, turn, first_turn, due_check, expiry_check)
                    UNION ALL
                    SELECT c.id, 0, NULL, NULL, NULL, NULL FROM unnest(v_changed) AS c (id)
                ) AS i GROUP BY i.tenant
            ) AS d CROSS JOIN LATERAL (
                SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = d.tenant
                ORDER BY r.generation DESC LIMIT 1) AS n
        ) AS x
        WHERE t.ctid = x.tid
            AND (t.first_turn, t.due_check_at, t.expiry_check_at, t.last_turn, t.pending, t.ready)
            IS DISTINCT FROM (x.first_turn, x.due_check, x.expiry_check,
                coalesce(x.last_turn, t.last_turn), t.pending - x.leased,
                x.first_turn IS NOT NULL);
    END IF;

    -- Most claims of a busy service leave ready lanes. Then the check times do not matter.
    IF EXISTS (SELECT 1 FROM unnest(v_tenants) AS i (id) WHERE EXISTS (
            SELECT 1 FROM (
                SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = i.id
                ORDER BY r.generation DESC LIMIT 1) AS t JOIN tarry.lane AS l ON l.tenant = t.id
            WHERE l.ready AND l.last_turn >= t.first_turn AND NOT v_skipped ? l.name)) THEN
        v_next_at := v_now;
    ELSIF v_all_tenants IS NOT NULL THEN
        SELECT min(
    least(
        (SELECT min(l.due_check_at) - p_horizon FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.due_check_at >= t.due_check_at
            AND NOT v_skipped ? l.name),
        (SELECT min(l.expiry_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.expiry_check_at >= t.expiry_check_at
            AND NOT v_skipped ? l.name))
) INTO v_next_at
        FROM unnest(v_all_tenants) AS i (id) CROSS JOIN LATERAL (
            SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = i.id
            ORDER BY r.generation DESC LIMIT 1) AS t
        WHERE NOT v_skipped ? t.name;
    ELSE
        -- The check times of a tenant are lower bounds: they do not change when the check times of
        -- its lanes become later. Correct a few outdated ones, which would make `next_at` too
        -- early.
        FOR v_try IN 1..${MAX_CHECKS_CORRECTED} LOOP
            SELECT t.id, t.due_check_at, t.expiry_check_at, c.due_check, c.expiry_check INTO v
            FROM (
                (SELECT t.id, t.due_check_at - p_horizon AS at FROM tarry.tenant AS t
                    WHERE NOT t.ready AND t.due_check_at > v_horizon_end
                    ORDER BY t.due_check_at LIMIT 1)
                UNION ALL
                (SELECT t.id, t.expiry_check_at AS at FROM tarry.tenant AS t
                    WHERE NOT t.ready AND t.expiry_check_at > v_now
                    ORDER BY t.expiry_check_at LIMIT 1)
                ORDER BY 2 LIMIT 1
            ) AS f CROSS JOIN LATERAL (
                SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = f.id
                ORDER BY r.generation DESC LIMIT 1) AS t
            CROSS JOIN LATERAL (
    SELECT (SELECT min(l.due_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.due_check_at >= t.due_check_at) AS due_check,
        (SELECT min(l.expiry_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.expiry_check_at >= t.expiry_check_at) AS expiry_check
) AS c;
            EXIT WHEN NOT FOUND OR (v.due_check_at, v.expiry_check_at)
                IS NOT DISTINCT FROM (v.due_check, v.expiry_check);
            PERFORM 1 FROM tarry.tenant AS t WHERE t.id = v.id ORDER BY t.generation DESC LIMIT 1
            FOR NO KEY UPDATE SKIP LOCKED;
            EXIT WHEN NOT FOUND; -- other tenants are locked already: waiting could be a deadlock
            UPDATE tarry.tenant AS t
            SET updates = t.updates + 1, generation = (t.updates + 1) / 32,
                due_check_at = c.due_check,
                expiry_check_at = c.expiry_check
            FROM (SELECT t.tid, c.* FROM (
                SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = v.id
                ORDER BY r.generation DESC LIMIT 1) AS t
                CROSS JOIN LATERAL (
    SELECT (SELECT min(l.due_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.due_check_at >= t.due_check_at) AS due_check,
        (SELECT min(l.expiry_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.expiry_check_at >= t.expiry_check_at) AS expiry_check
) AS c) AS c
            WHERE t.ctid = c.tid AND NOT t.ready;
        END LOOP;
        SELECT min(x.at) INTO v_next_at FROM (
            SELECT
    least(
        (SELECT min(l.due_check_at) - p_horizon FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.due_check_at >= t.due_check_at
            AND NOT v_skipped ? l.name),
        (SELECT min(l.expiry_check_at) FROM tarry.lane AS l WHERE l.tenant = t.id
            AND NOT l.ready AND l.expiry_check_at >= t.expiry_check_at
            AND NOT v_skipped ? l.name))
 AS at
            FROM unnest(v_tenants) AS i (id) CROSS JOIN LATERAL (
                SELECT r.ctid AS tid, r.* FROM tarry.tenant AS r WHERE r.id = i.id
                ORDER BY r.generation DESC LIMIT 1) AS t
            UNION ALL
            SELECT min(t.due_check_at) - p_horizon FROM tarry.tenant AS t
            WHERE NOT t.ready AND t.due_check_at > v_horizon_end AND NOT v_skipped ? t.name
                AND t.id <> ALL (coalesce(v_tenants, '{}'))
            UNION ALL
            SELECT min(t.expiry_check_at) FROM tarry.tenant AS t
            WHERE NOT t.ready AND t.expiry_check_at > v_now AND NOT v_skipped ? t.name
                AND t.id <> ALL (coalesce(v_tenants, '{}'))
        ) AS x;
    END IF;
    IF cardinality(v_tenants) >= ${MAX_TENANTS_VISITED} THEN
        v_next_at := v_now; -- there may be other tenants with due tasks
    END IF;
    IF p_limit > 0 AND v_leased_count = 0 AND v_next_at <= v_now THEN
        v_next_at := v_now + ${MIN_NEXT_CLAIM_MS};
    END IF;
    RETURN QUERY SELECT ${HALF_OPEN_ROW}::smallint, NULL::text, NULL::text, l.name, NULL::text,
        NULL::bytea, NULL::bytea, NULL::text, NULL::text, NULL::integer, NULL::bigint, NULL::bigint,
        NULL::bigint, NULL::smallint, NULL::text, l.consecutive_opens, NULL::integer, NULL::integer,
        NULL::double precision, NULL::integer, NULL::text, NULL::integer, NULL::text, NULL::bigint,
        NULL::boolean, NULL::integer, NULL::bigint, NULL::bigint
    FROM unnest(v_half_open) AS i (id) CROSS JOIN LATERAL (
        SELECT r.ctid AS tid, r.* FROM tarry.lane AS r WHERE r.id = i.id
        ORDER BY r.generation DESC LIMIT 1) AS l;
    RETURN QUERY SELECT ${HEADER_ROW}::smallint, NULL::text, NULL::text, NULL::text, NULL::text,
        NULL::bytea, NULL::bytea, NULL::text, NULL::text, NULL::integer, v_now,
        CASE WHEN v_next_at IS NOT NULL THEN greatest(v_now, v_next_at) END,
        NULL::bigint, NULL::smallint, NULL::text, v_lost, NULL::integer, NULL::integer,
        NULL::double precision, NULL::integer, NULL::text, NULL::integer, NULL::text, NULL::bigint,
        NULL::boolean, NULL::integer, NULL::bigint, NULL::bigint;
END $$;
