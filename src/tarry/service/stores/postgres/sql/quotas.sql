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
    p_names tarry.names_1, p_tasks tarry.new_task_1[], p_tenants integer[], p_lanes integer[],
    p_quota bigint, p_lane_quota bigint
) RETURNS smallint[] ${PLPGSQL} AS $$
DECLARE
    v_count integer := array_length(p_tasks, 1);
    v_new_lane_count integer := cardinality(p_lanes) - cardinality(array_remove(p_lanes, NULL));
    v_free bigint[] := array_fill(9000000000000000000, ARRAY[cardinality(p_tenants)]);
    v_free_lanes bigint[] := v_free;
    v_is_checked boolean := FALSE;
    v record;
BEGIN
    IF p_quota IS NOT NULL THEN
        FOR v IN SELECT t.ord, t.id FROM unnest(p_tenants) WITH ORDINALITY AS t (id, ord)
            ORDER BY t.id
        LOOP
            v_free[v.ord] := p_quota - tarry.lock_quota_1(v.id, v_count, p_quota);
            v_is_checked := v_is_checked OR v_free[v.ord] < v_count;
        END LOOP;
    END IF;
    IF p_lane_quota IS NOT NULL AND v_new_lane_count > 0 THEN
        FOR v IN SELECT DISTINCT l.tenant AS ord, p_tenants[l.tenant] AS id
            FROM unnest(p_names.lane_tenants, p_lanes) AS l (tenant, id) WHERE l.id IS NULL
            ORDER BY 2
        LOOP
            PERFORM pg_advisory_xact_lock(${LANE_QUOTA_LOCK}, v.id);
            v_free_lanes[v.ord] := p_lane_quota
                - (SELECT t.lanes FROM tarry.tenant AS t WHERE t.id = v.id
                    ORDER BY t.generation DESC LIMIT 1);
            v_is_checked := v_is_checked OR v_free_lanes[v.ord] < v_new_lane_count;
        END LOOP;
        p_lanes := tarry.lanes_1(p_names.lanes);
    END IF;
    IF NOT v_is_checked THEN
        RETURN NULL;
    END IF;
    RETURN tarry.reject_tasks_1(p_tasks, p_tenants, p_lanes, v_free, v_free_lanes);
END $$;

-- Return the same for tasks of tenants that may have `p_free` new tasks, and `p_free_lanes` new
-- lanes.
CREATE OR REPLACE FUNCTION tarry.reject_tasks_1(
    p_tasks tarry.new_task_1[], p_tenants integer[], p_lanes integer[], p_free bigint[],
    p_free_lanes bigint[]
) RETURNS smallint[] ${PLPGSQL} AS $$
DECLARE
    v_count integer := array_length(p_tasks, 1);
    v_has_lane boolean[] := (SELECT array_agg(l.id IS NOT NULL) FROM unnest(p_lanes) AS l (id));
    v_is_added boolean[] := array_fill(FALSE, ARRAY[v_count]);
    v_rejected smallint[] := array_fill(0::smallint, ARRAY[v_count]);
    v record;
BEGIN
    FOR v IN
        SELECT i.ord, i.tenant, i.lane,
            -- Another task of the batch with the same key is the same task.
            first_value(i.ord) OVER (PARTITION BY i.tenant, i.key ORDER BY i.ord) AS first,
            k.seq IS NOT NULL AND (k.id = i.id OR NOT EXISTS (
                SELECT 1 FROM tarry.finished AS f
                WHERE f.tenant = k.tenant AND f.status = ${CANCELLED} AND f.seq = k.seq))
                AS is_existing
        FROM unnest(p_tasks) WITH ORDINALITY AS i (id, tenant, lane, policy, key, fingerprint,
            body_ref, version, due, delay, lease, ord)
        LEFT JOIN tarry.task_key AS k ON k.tenant = p_tenants[i.tenant] AND k.key = i.key
        ORDER BY i.ord
    LOOP
        CONTINUE WHEN v.is_existing OR v_is_added[v.first];
        IF p_free[v.tenant] <= 0 THEN
            v_rejected[v.ord] := ${OVER_QUOTA};
        ELSIF NOT v_has_lane[v.lane] AND p_free_lanes[v.tenant] <= 0 THEN
            v_rejected[v.ord] := ${TOO_MANY_LANES};
        ELSE
            v_is_added[v.first] := TRUE;
            p_free[v.tenant] := p_free[v.tenant] - 1;
            IF NOT v_has_lane[v.lane] THEN
                v_has_lane[v.lane] := TRUE;
                p_free_lanes[v.tenant] := p_free_lanes[v.tenant] - 1;
            END IF;
        END IF;
    END LOOP;
    RETURN v_rejected;
END $$;
