-- Create a lane if it is missing, and lock it, so that it is not swept before it is changed. Return
-- its id, or NULL if its tenant has `p_lane_quota` lanes.
CREATE OR REPLACE FUNCTION tarry.lane_1(p_name text, p_lane_quota bigint) RETURNS integer
${PLPGSQL} AS $$
DECLARE v_id integer; v_tenant integer;
BEGIN
    SELECT l.id INTO v_id FROM tarry.lane AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    IF FOUND THEN
        RETURN v_id;
    END IF;
    v_tenant := (tarry.tenants_1(ARRAY[split_part(p_name, '/', 1)]))[1];
    PERFORM pg_advisory_xact_lock(${LANE_QUOTA_LOCK}, v_tenant);
    SELECT l.id INTO v_id FROM tarry.lane AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    IF FOUND THEN
        RETURN v_id;
    END IF;
    IF (SELECT t.lanes >= p_lane_quota FROM tarry.tenant AS t WHERE t.id = v_tenant) THEN
        RETURN NULL;
    END IF;
    INSERT INTO tarry.lane (tenant, name) VALUES (v_tenant, p_name)
    ON CONFLICT DO NOTHING RETURNING id INTO v_id;
    IF NOT FOUND THEN
        SELECT l.id INTO v_id FROM tarry.lane AS l WHERE l.name = p_name FOR NO KEY UPDATE;
        RETURN v_id;
    END IF;
    UPDATE tarry.tenant AS t SET lanes = t.lanes + 1 WHERE t.id = v_tenant;
    RETURN v_id;
END $$;

-- Change the parking and the pause of a lane (NULL: no change), and put it to sleep.
CREATE OR REPLACE FUNCTION tarry.change_lane_1(
    p_name text, p_changes_parking boolean, p_parked_until bigint, p_probes integer,
    p_consecutive_opens integer, p_paused boolean
) RETURNS void LANGUAGE sql SET search_path = ${SEARCH_PATH} AS $$
    WITH changed AS (
        UPDATE tarry.lane AS l
        SET updates = l.updates + 1, generation = (l.updates + 1) / 32,
            parked_until = x.parked_until, paused = x.paused,
            ready = FALSE,
            probes = CASE WHEN p_changes_parking THEN p_probes ELSE l.probes END,
            consecutive_opens = CASE WHEN p_changes_parking THEN p_consecutive_opens
                ELSE l.consecutive_opens END,
            due_check_at = tarry.due_check_1(x.paused, x.parked_until, x.due_at),
            expiry_check_at = tarry.expiry_check_1(x.paused, x.parked_until, x.due_at,
                x.lease_end_at)
        FROM (
            SELECT l.id, l.due_at, l.lease_end_at, coalesce(p_paused, l.paused) AS paused,
                CASE WHEN p_changes_parking THEN p_parked_until ELSE l.parked_until END
                    AS parked_until
            FROM tarry.lane AS l WHERE l.name = p_name FOR NO KEY UPDATE
        ) AS x
        WHERE l.id = x.id
        RETURNING l.tenant, l.due_check_at, l.expiry_check_at
    )
    UPDATE tarry.tenant AS t
    SET updates = t.updates + 1, generation = (t.updates + 1) / 32,
        due_check_at = least(t.due_check_at, c.due_check_at),
        expiry_check_at = least(t.expiry_check_at, c.expiry_check_at)
    FROM changed AS c WHERE t.id = c.tenant
$$;
