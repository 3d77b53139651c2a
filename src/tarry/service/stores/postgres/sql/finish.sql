-- Lock what a transaction with several statements changes. Otherwise its second statement could
-- wait for a lane that is locked by a transaction which waits for a tenant of the first statement.
-- Lanes of `p_new_lanes` that are missing are created before lanes and tenants are locked, as by
-- `add_1`: another transaction may be creating the same lane, and lock other lanes and tenants
-- afterwards.
CREATE OR REPLACE FUNCTION tarry.lock_1(
    p_ids uuid[], p_lanes text[], p_new_lanes text[], p_tenants text[]
) RETURNS void
${PLAN_SETTINGS} AS $$
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

-- Write the results of attempts: log the attempt, and make the task PENDING, IN_FLIGHT (with a new
-- lease, if a length is given) or finished. A result whose task has another version is superseded.
-- `queue + 0` does not match the index `live_queue`: the primary key finds the tasks. A task
-- without `kind`, the kind of its last failed attempt, waits in the queue of first attempts.
CREATE OR REPLACE FUNCTION tarry.finish_1(
    p_results tarry.result_1[], p_logs bytea[], p_now bigint
) RETURNS smallint[]
${PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_count integer := array_length(p_results, 1);
    v_results smallint[] := array_fill(${SUPERSEDED}::smallint, ARRAY[v_count]);
    v record;
BEGIN
    WITH leased AS MATERIALIZED (
        SELECT i.ord, i.outcome, i.log, i.status, i.reason, i.due, i.length, i.worker, i.delay,
            i.backoff, i.kind, l.tenant, l.seq, l.lane, l.policy, l.next_attempt_at, l.first_due_at,
            l.created_at, l.version, l.attempts, l.attempts_before_replay, l.lost_attempts,
            l.replays, l.cancelling
        FROM unnest(p_logs, p_results) WITH ORDINALITY AS i (log, tenant_name, id, version, outcome,
            status, reason, due, length, worker, delay, backoff, kind, ord)
        JOIN tarry.task_key AS k ON k.id = i.id
        JOIN tarry.live AS l ON l.tenant = k.tenant AND l.seq = k.seq
        WHERE l.queue + 0 = ${LEASED_QUEUE} AND l.version = i.version
        ORDER BY l.tenant, l.seq FOR UPDATE OF l
    ), decided AS MATERIALIZED (
        SELECT i.*, i.attempts + CASE WHEN i.outcome IS NULL THEN 0 ELSE 1 END AS new_attempts,
            CASE WHEN i.cancelling AND i.status <> ${SUCCEEDED} THEN ${CANCELLED}
                WHEN i.status >= ${SUCCEEDED} THEN i.status
                WHEN i.length IS NULL THEN ${PENDING} ELSE ${IN_FLIGHT} END AS new_status
        FROM leased AS i
    ), removed AS (
        DELETE FROM tarry.live AS l USING decided AS i
        WHERE i.new_status >= ${SUCCEEDED} AND l.tenant = i.tenant AND l.seq = i.seq
    ), ended AS (
        ${FINISHED_INSERT}
        SELECT i.tenant, i.new_status, i.seq, i.lane, i.policy, v_now, i.next_attempt_at,
            i.first_due_at, i.created_at, i.version + 1, i.new_attempts, i.attempts_before_replay,
            i.lost_attempts, i.backoff, i.replays, i.delay, i.kind,
            CASE WHEN i.new_status = i.status THEN i.reason END
        FROM decided AS i WHERE i.new_status >= ${SUCCEEDED}
    ), continued AS (
        UPDATE tarry.live AS l
        SET queue = CASE WHEN i.new_status = ${IN_FLIGHT} THEN ${LEASED_QUEUE}
                WHEN i.kind IS NULL THEN ${FIRST_ATTEMPT_QUEUE} ELSE ${RETRY_QUEUE} END,
            wake_at = CASE WHEN i.new_status = ${IN_FLIGHT} THEN greatest(v_now, i.due) + i.length
                ELSE i.due END,
            next_attempt_at = i.due, version = l.version + 1, attempts = i.new_attempts,
            backoff_offset = i.backoff, previous_delay = i.delay, last_outcome_kind = i.kind,
            worker = CASE WHEN i.new_status = ${IN_FLIGHT} THEN i.worker END
        FROM decided AS i
        WHERE i.new_status < ${SUCCEEDED} AND l.tenant = i.tenant AND l.seq = i.seq
    ), logged AS (
        INSERT INTO tarry.attempt (seq, number, log)
        SELECT i.seq, i.new_attempts, i.log FROM decided AS i WHERE i.outcome IS NOT NULL
    ), changes AS (
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_FINISHED},
            0 AS superseded, 0 AS new_lanes,
            min(i.due) FILTER (WHERE i.new_status = ${PENDING}) AS due,
            min(greatest(v_now, i.due) + i.length) FILTER (WHERE i.new_status = ${IN_FLIGHT})
                AS lease_end
        FROM decided AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
        array_agg(i.ord ORDER BY i.ord) AS ords, array_agg(i.tenant ORDER BY i.ord) AS tenants,
        array_agg(i.outcome ORDER BY i.ord) AS outcomes,
        array_agg((CASE WHEN i.new_status = ${CANCELLED} AND i.status <> ${CANCELLED}
            THEN ${ENDED_AS_CANCELLED} ELSE ${APPLIED} END)::smallint ORDER BY i.ord) AS results
    INTO v FROM decided AS i;
    IF cardinality(v.results) = v_count THEN
        PERFORM tarry.apply_1(v.changes);
        PERFORM tarry.count_attempts_1(v.tenants, v.outcomes, v_now);
        RETURN v.results;
    END IF;
    -- Some results are superseded.
    FOR i IN 1..coalesce(array_length(v.ords, 1), 0) LOOP
        v_results[v.ords[i]] := v.results[i];
    END LOOP;
    PERFORM tarry.apply_1(v.changes || tarry.superseded_1((
        SELECT array_agg(i.tenant_name)
        FROM unnest(v_results, p_results) AS i (result, tenant_name)
        WHERE i.result = ${SUPERSEDED})));
    IF v.tenants IS NOT NULL THEN
        PERFORM tarry.count_attempts_1(v.tenants, v.outcomes, v_now);
    END IF;
    RETURN v_results;
END $$;

-- Return changes that count a superseded result for each name of a tenant.
CREATE OR REPLACE FUNCTION tarry.superseded_1(p_tenant_names text[]) RETURNS tarry.change_1[]
${PLPGSQL} AS $$
BEGIN
    RETURN (SELECT
        array_agg(ROW(i.id, NULL, NULL, 0, 0, 0, 0, 0, 1, 0, NULL, NULL)::tarry.change_1)
        FROM unnest(tarry.tenants_1(p_tenant_names)) AS i (id));
END $$;
