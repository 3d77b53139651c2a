-- Add changes to the counters of lanes, tenants and policies, and update the check times of lanes
-- and tenants. `d` has the changes that the constants with assignments add. The order by
-- `generation` finds a row without reading all of its old versions: see schema.py.
CREATE OR REPLACE FUNCTION tarry.apply_1(p_changes tarry.change_1[]) RETURNS void ${PLPGSQL} AS $$
DECLARE
    v_tenants integer[];
    v_due_checks bigint[];
    v_expiry_checks bigint[];
BEGIN
    IF array_length(p_changes, 1) = 1 AND (p_changes[1]).lane IS NOT NULL THEN
        PERFORM tarry.apply_to_one_lane_1(p_changes[1]);
        RETURN;
    END IF;
    IF EXISTS (SELECT 1 FROM unnest(p_changes) AS i WHERE i.lane IS NOT NULL) THEN
        SELECT c.tenants, c.due_checks, c.expiry_checks
        INTO v_tenants, v_due_checks, v_expiry_checks FROM tarry.apply_to_lanes_1(p_changes) AS c;
    END IF;
    PERFORM tarry.lock_tenants_1((SELECT array_agg(i.tenant) FROM unnest(p_changes) AS i));
    UPDATE tarry.tenant AS t SET ${TENANT_CHANGES},
        due_check_at = least(t.due_check_at, d.due_check),
        expiry_check_at = least(t.expiry_check_at, d.expiry_check)
    FROM (
        SELECT i.tenant, sum(i.pending) AS pending, sum(i.in_flight) AS in_flight,
            sum(i.succeeded) AS succeeded, sum(i.exhausted) AS exhausted,
            sum(i.cancelled) AS cancelled, sum(i.superseded) AS superseded,
            sum(i.new_lanes) AS new_lanes, min(i.due_check) AS due_check,
            min(i.expiry_check) AS expiry_check
        FROM (
            SELECT i.tenant, i.pending, i.in_flight, i.succeeded, i.exhausted, i.cancelled,
                i.superseded, i.new_lanes, NULL::bigint AS due_check, NULL::bigint AS expiry_check
            FROM unnest(p_changes) AS i
            UNION ALL
            SELECT c.tenant, 0, 0, 0, 0, 0, 0, 0, c.due_check, c.expiry_check
            FROM unnest(v_tenants, v_due_checks, v_expiry_checks)
                AS c (tenant, due_check, expiry_check)
        ) AS i GROUP BY i.tenant
    ) AS d CROSS JOIN LATERAL (
        SELECT r.ctid AS tid FROM tarry.tenant AS r WHERE r.id = d.tenant
        ORDER BY r.generation DESC LIMIT 1) AS n
    WHERE t.ctid = n.tid;
    IF EXISTS (SELECT 1 FROM unnest(p_changes) AS i WHERE i.pending + i.in_flight <> 0
            OR i.succeeded + i.exhausted + i.cancelled <> 0) THEN
        PERFORM tarry.apply_to_policies_1(p_changes);
    END IF;
END $$;

-- Do the same for a change of one lane, like that of many batches: without joins, it takes a third
-- of the time. If another transaction has just changed the generation of a row, the update does not
-- find the row. The next try then finds the new generation.
CREATE OR REPLACE FUNCTION tarry.apply_to_one_lane_1(d tarry.change_1) RETURNS void ${PLPGSQL} AS $$
DECLARE
    v_due_check bigint;
    v_expiry_check bigint;
BEGIN
    FOR v_try IN 1..${MAX_UPDATE_TRIES} LOOP
        UPDATE tarry.lane AS l SET ${LANE_CHANGES}
        WHERE l.id = d.lane AND l.generation = (
            SELECT r.generation FROM tarry.lane AS r WHERE r.id = d.lane
            ORDER BY r.generation DESC LIMIT 1)
        RETURNING l.due_check_at, l.expiry_check_at INTO v_due_check, v_expiry_check;
        EXIT WHEN FOUND;
    END LOOP;
    IF NOT FOUND THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a lane was removed meanwhile';
    END IF;
    FOR v_try IN 1..${MAX_UPDATE_TRIES} LOOP
        UPDATE tarry.tenant AS t SET ${TENANT_CHANGES},
            due_check_at = least(t.due_check_at, v_due_check),
            expiry_check_at = least(t.expiry_check_at, v_expiry_check)
        WHERE t.id = d.tenant AND t.generation = (
            SELECT r.generation FROM tarry.tenant AS r WHERE r.id = d.tenant
            ORDER BY r.generation DESC LIMIT 1);
        EXIT WHEN FOUND;
    END LOOP;
    IF NOT FOUND THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a tenant was changed too often';
    END IF;
    IF d.policy IS NULL
        OR d.pending + d.in_flight = 0 AND d.succeeded + d.exhausted + d.cancelled = 0
    THEN
        RETURN;
    END IF;
    FOR v_try IN 1..${MAX_UPDATE_TRIES} LOOP
        UPDATE tarry.policy_use AS u SET ${POLICY_CHANGES}
        WHERE u.id = d.policy AND u.generation = (
            SELECT r.generation FROM tarry.policy_use AS r WHERE r.id = d.policy
            ORDER BY r.generation DESC LIMIT 1);
        EXIT WHEN FOUND;
    END LOOP;
    IF NOT FOUND THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a policy was removed meanwhile';
    END IF;
END $$;

-- Add changes to the counters of lanes; return the new check times, with the tenant of each lane.
CREATE OR REPLACE FUNCTION tarry.apply_to_lanes_1(
    p_changes tarry.change_1[], OUT tenants integer[], OUT due_checks bigint[],
    OUT expiry_checks bigint[]
) ${PLPGSQL} AS $$
DECLARE
    v_changed integer;
BEGIN
    PERFORM tarry.lock_lanes_1((SELECT array_agg(i.lane) FROM unnest(p_changes) AS i));
    WITH change AS (
        SELECT i.lane, sum(i.pending) AS pending, sum(i.in_flight) AS in_flight,
            sum(i.succeeded) AS succeeded, sum(i.exhausted) AS exhausted,
            sum(i.cancelled) AS cancelled, min(i.due) AS due, min(i.lease_end) AS lease_end
        FROM unnest(p_changes) AS i WHERE i.lane IS NOT NULL GROUP BY i.lane
    ), changed AS (
        UPDATE tarry.lane AS l SET ${LANE_CHANGES}
        FROM change AS d CROSS JOIN LATERAL (
            SELECT r.ctid AS tid FROM tarry.lane AS r WHERE r.id = d.lane
            ORDER BY r.generation DESC LIMIT 1) AS n
        WHERE l.ctid = n.tid
        RETURNING l.tenant, l.due_check_at, l.expiry_check_at
    )
    SELECT count(*), array_agg(c.tenant), array_agg(c.due_check_at), array_agg(c.expiry_check_at)
    INTO v_changed, tenants, due_checks, expiry_checks FROM changed AS c;
    IF v_changed <> (SELECT count(DISTINCT i.lane) FROM unnest(p_changes) AS i) THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a lane was removed meanwhile';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION tarry.apply_to_policies_1(p_changes tarry.change_1[]) RETURNS void
${PLPGSQL} AS $$
DECLARE
    v_changed integer;
BEGIN
    PERFORM tarry.lock_policies_1((SELECT array_agg(i.policy) FROM unnest(p_changes) AS i));
    UPDATE tarry.policy_use AS u SET ${POLICY_CHANGES}
    FROM (
        SELECT i.policy, sum(i.pending) AS pending, sum(i.in_flight) AS in_flight,
            sum(i.succeeded) AS succeeded, sum(i.exhausted) AS exhausted,
            sum(i.cancelled) AS cancelled
        FROM unnest(p_changes) AS i WHERE i.policy IS NOT NULL GROUP BY i.policy
    ) AS d CROSS JOIN LATERAL (
        SELECT r.ctid AS tid FROM tarry.policy_use AS r WHERE r.id = d.policy
        ORDER BY r.generation DESC LIMIT 1) AS n
    WHERE u.ctid = n.tid;
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    IF v_changed <> (SELECT count(DISTINCT i.policy) FROM unnest(p_changes) AS i) THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a policy was removed meanwhile';
    END IF;
END $$;

-- Count attempts in their minute, for their tenant and for all tenants (0). The column `shard`
-- spreads the rows over connections, so that processes do not wait for each other.
CREATE OR REPLACE FUNCTION tarry.count_attempts_1(
    p_tenants integer[], p_outcomes text[], p_now bigint
) RETURNS void ${PLPGSQL} AS $$
BEGIN
    INSERT INTO tarry.series AS s (tenant, minute, outcome, shard, count)
    SELECT g.tenant, p_now - p_now % 60000, i.outcome, pg_backend_pid() % 16, count(*)
    FROM unnest(p_tenants, p_outcomes) AS i (tenant, outcome)
    CROSS JOIN LATERAL (VALUES (0), (i.tenant)) AS g (tenant)
    WHERE i.outcome IS NOT NULL
    GROUP BY g.tenant, i.outcome ORDER BY g.tenant, i.outcome
    ON CONFLICT (tenant, minute, outcome, shard) DO UPDATE SET count = s.count + excluded.count;
END $$;
