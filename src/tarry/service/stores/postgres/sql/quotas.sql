-- Return the number of live tasks of a tenant after locking its quota, so that two processes
-- cannot exceed the quota together. While many more tasks are allowed, the lock is shared.
CREATE OR REPLACE FUNCTION tarry.lock_quota_1(p_tenant integer, p_count integer, p_quota bigint)
RETURNS bigint ${PLPGSQL} AS $$
DECLARE
    v_margin bigint := greatest(p_quota / 10, 20 * p_count);
    v_is_exclusive boolean;
    v_live bigint;
BEGIN
    SELECT t.pending + t.in_flight + p_count > p_quota - v_margin INTO v_is_exclusive
    FROM tarry.tenant AS t WHERE t.id = p_tenant ORDER BY t.generation DESC LIMIT 1;
    IF v_is_exclusive THEN
        PERFORM pg_advisory_xact_lock(${QUOTA_LOCK}, p_tenant);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(${QUOTA_LOCK}, p_tenant);
    END IF;
    SELECT t.pending + t.in_flight INTO v_live FROM tarry.tenant AS t
    WHERE t.id = p_tenant ORDER BY t.generation DESC LIMIT 1;
    IF NOT v_is_exclusive AND v_live + p_count > p_quota THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'the quota was reached meanwhile';
    END IF;
    RETURN v_live;
END $$;

-- Return for each task OVER_QUOTA or TOO_MANY_LANES if a quota rejects it, else 0. Return NULL if
-- no quota can be exceeded, even if all tasks are new and of one tenant.
CREATE OR REPLACE FUNCTION tarry.reject_1(
    p_tenant_ids integer[], p_lane_names text[], p_lane_tenants integer[], p_lane_ids integer[],
    p_ids uuid[], p_tenants integer[], p_lanes integer[], p_keys text[], p_quota bigint,
    p_lane_quota bigint
) RETURNS smallint[] ${PLPGSQL} AS $$
DECLARE
    v_count integer := array_length(p_ids, 1);
    v_new_lane_count integer := cardinality(p_lane_names)
        - cardinality(array_remove(p_lane_ids, NULL));
    v_is_checked boolean := FALSE;
    v_free bigint[] := array_fill(9000000000000000000, ARRAY[cardinality(p_tenant_ids)]);
    v_free_lanes bigint[] := v_free;
    v_has_lane boolean[];
    v_exists boolean[];
    v_first integer[];
    v_is_added boolean[] := array_fill(FALSE, ARRAY[v_count]);
    v_rejected smallint[] := array_fill(0::smallint, ARRAY[v_count]);
    v_lane_ids integer[] := p_lane_ids;
    v record;
BEGIN
    FOR v IN SELECT t.ord, t.id FROM unnest(p_tenant_ids) WITH ORDINALITY AS t (id, ord)
        ORDER BY t.id
    LOOP
        IF p_quota IS NOT NULL THEN
            v_free[v.ord] := p_quota - tarry.lock_quota_1(v.id, v_count, p_quota);
            v_is_checked := v_is_checked OR v_free[v.ord] < v_count;
        END IF;
    END LOOP;
    IF p_lane_quota IS NOT NULL AND v_new_lane_count > 0 THEN
        FOR v IN SELECT DISTINCT l.tenant AS ord, p_tenant_ids[l.tenant] AS id
            FROM unnest(p_lane_tenants, p_lane_ids) AS l (tenant, id) WHERE l.id IS NULL ORDER BY 2
        LOOP
            PERFORM pg_advisory_xact_lock(${LANE_QUOTA_LOCK}, v.id);
            v_free_lanes[v.ord] := p_lane_quota
                - (SELECT t.lanes FROM tarry.tenant AS t WHERE t.id = v.id
                    ORDER BY t.generation DESC LIMIT 1);
            v_is_checked := v_is_checked OR v_free_lanes[v.ord] < v_new_lane_count;
        END LOOP;
        v_lane_ids := tarry.lanes_1(p_lane_names);
    END IF;
    IF NOT v_is_checked THEN
        RETURN NULL;
    END IF;
    SELECT array_agg(id IS NOT NULL) INTO v_has_lane FROM unnest(v_lane_ids) AS l (id);
    SELECT array_agg(i.is_existing ORDER BY i.ord), array_agg(i.first ORDER BY i.ord)
    INTO v_exists, v_first FROM (
        SELECT i.ord,
            first_value(i.ord) OVER (PARTITION BY i.tenant, i.key ORDER BY i.ord) AS first,
            k.seq IS NOT NULL AND (k.id = i.id OR NOT EXISTS (
                SELECT 1 FROM tarry.finished AS f
                WHERE f.tenant = k.tenant AND f.status = ${CANCELLED} AND f.seq = k.seq))
                AS is_existing
        FROM unnest(p_ids, p_tenants, p_keys) WITH ORDINALITY AS i (id, tenant, key, ord)
        LEFT JOIN tarry.task_key AS k ON k.tenant = p_tenant_ids[i.tenant] AND k.key = i.key
    ) AS i;
    FOR i IN 1..v_count LOOP
        CONTINUE WHEN v_exists[i] OR v_is_added[v_first[i]];
        IF v_free[p_tenants[i]] <= 0 THEN
            v_rejected[i] := ${OVER_QUOTA};
        ELSIF NOT v_has_lane[p_lanes[i]] AND v_free_lanes[p_tenants[i]] <= 0 THEN
            v_rejected[i] := ${TOO_MANY_LANES};
        ELSE
            v_is_added[v_first[i]] := TRUE;
            v_free[p_tenants[i]] := v_free[p_tenants[i]] - 1;
            IF NOT v_has_lane[p_lanes[i]] THEN
                v_has_lane[p_lanes[i]] := TRUE;
                v_free_lanes[p_tenants[i]] := v_free_lanes[p_tenants[i]] - 1;
            END IF;
        END IF;
    END LOOP;
    RETURN v_rejected;
END $$;
