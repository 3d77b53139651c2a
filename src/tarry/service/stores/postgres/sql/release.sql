-- Release the leases of tasks: PENDING again, or CANCELLED if that was requested. With a version,
-- only a lease of that version is released. Returns a result for each task.
CREATE OR REPLACE FUNCTION tarry.release_1(
    p_ids uuid[], p_versions integer[], p_due bigint[], p_now bigint
) RETURNS smallint[]
${PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_results smallint[] := array_fill(${SUPERSEDED}::smallint, ARRAY[array_length(p_ids, 1)]);
    v record;
BEGIN
    WITH leased AS MATERIALIZED (
        SELECT i.ord, greatest(l.next_attempt_at, i.due) AS due,
            CASE WHEN l.cancelling THEN ${CANCELLED} ELSE ${PENDING} END AS new_status, l.*
        FROM unnest(p_ids, p_versions, p_due) WITH ORDINALITY AS i (id, version, due, ord)
        JOIN tarry.task_key AS k ON k.id = i.id
        JOIN tarry.live AS l ON l.tenant = k.tenant AND l.seq = k.seq
        WHERE l.queue + 0 = ${LEASED_QUEUE} AND l.version = i.version
        ORDER BY l.tenant, l.seq FOR UPDATE OF l
    ), removed AS (
        DELETE FROM tarry.live AS l USING leased AS i
        WHERE i.cancelling AND l.tenant = i.tenant AND l.seq = i.seq
    ), ended AS (
        ${FINISHED_INSERT}
        SELECT i.tenant, ${CANCELLED}, i.seq, i.lane, i.policy, v_now, i.next_attempt_at,
            i.first_due_at, i.created_at, i.version + 1, i.attempts, i.attempts_before_replay,
            i.lost_attempts, i.backoff_offset, i.replays, i.previous_delay, i.last_outcome_kind,
            NULL
        FROM leased AS i WHERE i.cancelling
    ), continued AS (
        UPDATE tarry.live AS l
        SET queue = CASE WHEN i.last_outcome_kind IS NULL THEN ${FIRST_ATTEMPT_QUEUE}
                ELSE ${RETRY_QUEUE} END, wake_at = i.due,
            version = l.version + 1, worker = NULL
        FROM leased AS i WHERE NOT i.cancelling AND l.tenant = i.tenant AND l.seq = i.seq
    ), changes AS (
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_RELEASED},
            0 AS superseded, 0 AS new_lanes,
            min(i.due) FILTER (WHERE NOT i.cancelling) AS due, NULL::bigint AS lease_end
        FROM leased AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
        array_agg(i.ord) AS ords,
        array_agg(CASE WHEN i.cancelling THEN ${ENDED_AS_CANCELLED} ELSE ${APPLIED} END) AS results
    INTO v FROM leased AS i;
    IF v.changes IS NOT NULL THEN
        FOR i IN 1..array_length(v.ords, 1) LOOP
            v_results[v.ords[i]] := v.results[i];
        END LOOP;
        PERFORM tarry.apply_1(v.changes);
    END IF;
    RETURN v_results;
END $$;
