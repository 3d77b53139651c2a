-- Make finished tasks PENDING and due now; the policy will not count their attempts so far.
CREATE OR REPLACE FUNCTION tarry.replay_1(
    p_tenant integer, p_seqs bigint[], p_statuses smallint[], p_now bigint
) RETURNS bigint[]
${PLAN_SETTINGS} AS $$
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
        SELECT i.tenant, i.seq, i.lane, i.policy, ${FIRST_ATTEMPT_QUEUE}, p_now, p_now, p_now,
            i.created_at, i.version + 1, i.attempts, i.attempts, i.replays + 1
        FROM locked AS i
    ), changes AS (
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_REPLAYED},
            0 AS superseded, 0 AS new_lanes, p_now AS due, NULL::bigint AS lease_end
        FROM locked AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
        array_agg(i.seq ORDER BY i.seq) AS seqs
    INTO v FROM locked AS i;
    IF v.changes IS NOT NULL THEN
        PERFORM tarry.apply_1(v.changes);
    END IF;
    RETURN coalesce(v.seqs, '{}');
END $$;

-- Make a task due now, unless it is IN_FLIGHT or SUCCEEDED. NULL: no such task.
CREATE OR REPLACE FUNCTION tarry.retry_now_1(p_tenant text, p_id uuid, p_quota bigint, p_now bigint)
RETURNS smallint
${PLAN_SETTINGS} AS $$
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
        IF v.queue = ${LEASED_QUEUE} THEN
            RETURN ${RETRY_IN_FLIGHT};
        END IF;
        v_due := least(v.next_attempt_at, v_now);
        UPDATE tarry.live AS l SET wake_at = v_due, next_attempt_at = v_due, version = l.version + 1
        WHERE l.tenant = v_tenant AND l.seq = v_seq;
        PERFORM tarry.apply_1(ARRAY[
            ROW(v_tenant, v.lane, v.policy, ${COUNTS_OF_RETRIED}, 0, 0, v_due, NULL)
                ::tarry.change_1]);
        RETURN ${RETRY_DUE};
    END IF;
    IF EXISTS (SELECT 1 FROM tarry.finished AS f
            WHERE f.tenant = v_tenant AND f.status = ${SUCCEEDED} AND f.seq = v_seq) THEN
        RETURN ${RETRY_SUCCEEDED};
    END IF;
    IF p_quota IS NOT NULL AND tarry.lock_quota_1(v_tenant, 1, p_quota) >= p_quota THEN
        RETURN ${RETRY_OVER_QUOTA};
    END IF;
    PERFORM tarry.replay_1(v_tenant, ARRAY[v_seq],
        ARRAY[${EXHAUSTED}, ${CANCELLED}]::smallint[], v_now);
    RETURN ${RETRY_DUE};
END $$;
