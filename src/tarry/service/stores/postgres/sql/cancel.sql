-- Cancel a PENDING task; request the cancellation of an IN_FLIGHT task. NULL: no such task.
CREATE OR REPLACE FUNCTION tarry.cancel_1(p_tenant text, p_id uuid, p_now bigint) RETURNS smallint
${PLAN_SETTINGS} AS $$
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
        RETURN ${CANCEL_TOO_LATE};
    END IF;
    IF v.queue = ${LEASED_QUEUE} THEN
        UPDATE tarry.live AS l SET cancelling = TRUE
        WHERE l.tenant = v.tenant AND l.seq = v.seq AND NOT l.cancelling;
        RETURN ${CANCEL_REQUESTED};
    END IF;
    DELETE FROM tarry.live AS l WHERE l.tenant = v.tenant AND l.seq = v.seq;
    ${FINISHED_INSERT}
    VALUES (v.tenant, ${CANCELLED}, v.seq, v.lane, v.policy, v_now, v.next_attempt_at,
        v.first_due_at, v.created_at, v.version + 1, v.attempts, v.attempts_before_replay,
        v.lost_attempts, v.backoff_offset, v.replays, v.previous_delay, v.last_outcome_kind, NULL);
    PERFORM tarry.apply_1(ARRAY[
        ROW(v.tenant, v.lane, v.policy, ${COUNTS_OF_CANCELLED}, 0, 0, NULL, NULL)::tarry.change_1]);
    RETURN ${CANCEL_DONE};
END $$;
