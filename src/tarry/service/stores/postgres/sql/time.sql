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
