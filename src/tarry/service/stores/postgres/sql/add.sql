-- Add tasks, and lease those with `p_lease`. `p_tenants`, `p_lanes` and `p_policies` are positions
-- in the arrays of names, so that each name is sent and searched once. Returns a row for each task.
CREATE OR REPLACE FUNCTION tarry.add_1(
    p_tenant_names text[], p_lane_names text[], p_lane_tenants integer[], p_policy_names text[],
    p_policy_tenants integer[], p_ids uuid[], p_tenants integer[], p_lanes integer[],
    p_policies integer[], p_keys text[], p_fingerprints bytea[], p_contents bytea[], p_refs text[],
    p_versions integer[], p_due bigint[], p_delays bigint[], p_lease boolean[], p_worker text,
    p_length bigint, p_horizon bigint, p_quota bigint, p_lane_quota bigint, p_now bigint
) RETURNS TABLE (result smallint, created_at bigint, due_at bigint, wake_at bigint)
${PLAN_SETTINGS} AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_count integer := array_length(p_ids, 1);
    v_tenants integer[] := tarry.tenants_1(p_tenant_names);
    v_lanes integer[];
    v_policies integer[];
    v_rejected smallint[]; -- result for tasks that a quota rejects, else 0; NULL: none
    v_seqs bigint[]; -- NULL for tasks that are not added
    v_inserted bigint[];
    v_replaced record;
    v_new_lanes integer[];
    v_open boolean[]; -- whether tasks of the lane may be leased; NULL: the lane was removed
    v_results smallint[];
    v_dues bigint[];
    v_wakes bigint[];
    v record;
BEGIN
    v_lanes := tarry.lanes_1(p_lane_names);
    v_rejected := tarry.reject_1(v_tenants, p_lane_names, p_lane_tenants, v_lanes, p_ids, p_tenants,
        p_lanes, p_keys, p_quota, p_lane_quota);
    -- The day in the upper bits names the partition, see the schema.
    SELECT array_agg(CASE WHEN v_rejected[i] > 0 THEN NULL ELSE
        (v_now / 86400000) << ${SEQ_DAY_BITS} | nextval('tarry.task_number') END ORDER BY i)
    INTO v_seqs FROM generate_series(1, v_count) AS i;
    -- Ordered by tenant and key, so that batches with the same keys cannot deadlock.
    WITH inserted AS (
        INSERT INTO tarry.task_key AS k (seq, id, tenant, key)
        SELECT i.seq, i.id, v_tenants[i.tenant], i.key
        FROM unnest(v_seqs, p_ids, p_tenants, p_keys) WITH ORDINALITY
            AS i (seq, id, tenant, key, ord)
        WHERE i.seq IS NOT NULL ORDER BY v_tenants[i.tenant], i.key, i.ord
        ON CONFLICT DO NOTHING RETURNING k.seq
    )
    SELECT array_agg(seq) INTO v_inserted FROM inserted;
    IF array_length(v_inserted, 1) IS DISTINCT FROM v_count THEN
        -- A new task replaces a CANCELLED task that has the same idempotency key.
        SELECT array_agg(k.tenant) AS tenants, array_agg(k.seq) AS seqs, array_agg(i.ord) AS ords,
            array_agg(f.lane) AS lanes INTO v_replaced
        FROM unnest(v_seqs, p_ids, p_tenants, p_keys) WITH ORDINALITY
            AS i (seq, id, tenant, key, ord)
        JOIN tarry.task_key AS k ON k.tenant = v_tenants[i.tenant] AND k.key = i.key
        JOIN tarry.finished AS f
            ON f.tenant = k.tenant AND f.status = ${CANCELLED} AND f.seq = k.seq
        WHERE i.seq IS NOT NULL AND k.id <> i.id AND i.seq <> ALL (coalesce(v_inserted, '{}'));
        IF v_replaced.seqs IS NOT NULL THEN
            -- Both `delete_1` and the end of this function change counters. So all rows are locked
            -- here, in the order that all functions use.
            PERFORM 1 FROM tarry.finished AS f
            WHERE f.tenant = ANY (v_replaced.tenants) AND f.status = ${CANCELLED}
                AND f.seq = ANY (v_replaced.seqs)
            ORDER BY f.tenant, f.seq FOR UPDATE;
            PERFORM 1 FROM tarry.lane AS l
            WHERE l.id = ANY (v_lanes || v_replaced.lanes) ORDER BY l.id FOR NO KEY UPDATE;
            PERFORM 1 FROM tarry.tenant AS t WHERE t.id = ANY (v_tenants) ORDER BY t.id
            FOR NO KEY UPDATE;
            PERFORM tarry.delete_1(v_replaced.tenants, v_replaced.seqs);
            WITH inserted AS (
                INSERT INTO tarry.task_key AS k (seq, id, tenant, key)
                SELECT i.seq, i.id, v_tenants[i.tenant], i.key
                FROM unnest(v_seqs, p_ids, p_tenants, p_keys) WITH ORDINALITY
                    AS i (seq, id, tenant, key, ord)
                WHERE i.ord = ANY (v_replaced.ords)
                ORDER BY v_tenants[i.tenant], i.key, i.ord
                ON CONFLICT DO NOTHING RETURNING k.seq
            )
            SELECT coalesce(v_inserted, '{}') || coalesce(array_agg(seq), '{}') INTO v_inserted
            FROM inserted;
        END IF;
        SELECT array_agg(CASE WHEN i.seq = ANY (v_inserted) THEN i.seq END ORDER BY i.ord)
        INTO v_seqs FROM unnest(v_seqs) WITH ORDINALITY AS i (seq, ord);
        SELECT i.id INTO v FROM unnest(v_seqs, p_ids, p_tenants, p_keys) WITH ORDINALITY
            AS i (seq, id, tenant, key, ord)
        JOIN tarry.task_key AS k ON k.id = i.id
        WHERE i.seq IS NULL AND coalesce(v_rejected[i.ord], 0) = 0
            AND (k.tenant <> v_tenants[i.tenant] OR k.key <> i.key) LIMIT 1;
        IF FOUND THEN
            RAISE SQLSTATE '${ID_CONFLICT_STATE}' USING MESSAGE = v.id::text;
        END IF;
    END IF;
    -- Lanes and policies are created only for tasks that are added.
    IF array_position(v_lanes, NULL) IS NOT NULL THEN
        WITH created AS (
            INSERT INTO tarry.lane AS l (tenant, name)
            SELECT v_tenants[n.tenant], n.name
            FROM unnest(p_lane_names, p_lane_tenants, v_lanes) WITH ORDINALITY
                AS n (name, tenant, id, ord)
            WHERE n.id IS NULL AND EXISTS (
                SELECT 1 FROM unnest(v_seqs, p_lanes) AS i (seq, lane)
                WHERE i.lane = n.ord AND i.seq IS NOT NULL)
            ORDER BY n.name ON CONFLICT DO NOTHING RETURNING l.tenant
        )
        SELECT array_agg(tenant) INTO v_new_lanes FROM created;
        v_lanes := tarry.lanes_1(p_lane_names);
    END IF;
    FOR v_try IN 1..2 LOOP
        SELECT array_agg(u.id ORDER BY n.ord) INTO v_policies
        FROM unnest(p_policy_names, p_policy_tenants) WITH ORDINALITY AS n (name, tenant, ord)
        LEFT JOIN LATERAL (SELECT u.id FROM tarry.policy_use AS u
            WHERE u.tenant = v_tenants[n.tenant] AND u.policy = n.name
            ORDER BY u.generation DESC LIMIT 1) AS u ON TRUE;
        EXIT WHEN array_position(v_policies, NULL) IS NULL;
        INSERT INTO tarry.policy_use (tenant, policy)
        SELECT v_tenants[n.tenant], n.name
        FROM unnest(p_policy_names, p_policy_tenants, v_policies) AS n (name, tenant, id)
        WHERE n.id IS NULL ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END LOOP;
    INSERT INTO tarry.content (seq, id, policy_version, key, fingerprint, body_ref, content)
    SELECT i.seq, i.id, i.version, i.key, i.fingerprint, i.ref, i.content
    FROM unnest(v_seqs, p_ids, p_versions, p_keys, p_fingerprints, p_refs, p_contents)
        AS i (seq, id, version, key, fingerprint, ref, content)
    WHERE i.seq IS NOT NULL;
    SELECT array_agg(l.parked_until IS NULL AND NOT l.paused ORDER BY n.ord) INTO v_open
    FROM unnest(v_lanes) WITH ORDINALITY AS n (id, ord)
    LEFT JOIN LATERAL (
        SELECT r.ctid AS tid, r.* FROM tarry.lane AS r WHERE r.id = n.id
        ORDER BY r.generation DESC LIMIT 1) AS l ON TRUE;
    WITH new AS MATERIALIZED (
        SELECT i.*, i.status = ${IN_FLIGHT} AS is_leased
        FROM (SELECT i.seq, i.ord, v_tenants[i.tenant] AS tenant, v_lanes[i.lane] AS lane,
                v_policies[i.policy] AS policy, i.due,
                CASE WHEN i.lease AND v_open[i.lane] AND i.due <= v_now + p_horizon
                    THEN ${IN_FLIGHT} ELSE ${PENDING} END AS status
            FROM (SELECT i.seq, i.ord, i.tenant, i.lane, i.policy, i.lease,
                    greatest(v_now, coalesce(v_now + i.delay, i.due)) AS due
                FROM unnest(v_seqs, p_tenants, p_lanes, p_policies, p_due, p_delays, p_lease)
                    WITH ORDINALITY AS i (seq, tenant, lane, policy, due, delay, lease, ord)) AS i
            WHERE i.seq IS NOT NULL AND v_open[i.lane] IS NOT NULL) AS i
    ), stored AS (
        INSERT INTO tarry.live (tenant, seq, lane, policy, queue, wake_at, next_attempt_at,
            first_due_at, created_at, worker)
        SELECT i.tenant, i.seq, i.lane, i.policy,
            CASE WHEN i.is_leased THEN ${LEASED_QUEUE} ELSE ${FIRST_ATTEMPT_QUEUE} END,
            CASE WHEN i.is_leased THEN i.due + p_length ELSE i.due END, i.due, i.due, v_now,
            CASE WHEN i.is_leased THEN p_worker END
        FROM new AS i
    ), changes AS (
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_ADDED},
            0 AS superseded, 0 AS new_lanes,
            min(i.due) FILTER (WHERE NOT i.is_leased) AS due,
            min(i.due + p_length) FILTER (WHERE i.is_leased) AS lease_end
        FROM new AS i GROUP BY i.tenant, i.lane, i.policy
        UNION ALL
        SELECT n.tenant, NULL, NULL, 0, 0, 0, 0, 0, 0, 1, NULL, NULL
        FROM unnest(v_new_lanes) AS n (tenant)
    )
    SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
        array_agg(i.ord) AS ords, array_agg(i.due) AS dues, array_agg(i.is_leased) AS leased
    INTO v FROM new AS i;
    IF coalesce(cardinality(v.ords), 0) <> cardinality(array_remove(v_seqs, NULL)) THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a lane was removed meanwhile';
    END IF;
    IF v.changes IS NOT NULL THEN
        PERFORM tarry.apply_1(v.changes);
        IF cardinality(array_remove(p_versions, NULL)) > 0 THEN
            UPDATE tarry.policy AS p SET tasks = p.tasks + d.tasks
            FROM (SELECT v_tenants[i.tenant] AS tenant, p_policy_names[i.policy] AS policy,
                    i.version, count(*) AS tasks
                FROM unnest(v_seqs, p_tenants, p_policies, p_versions)
                    AS i (seq, tenant, policy, version)
                WHERE i.seq IS NOT NULL AND i.version IS NOT NULL GROUP BY 1, 2, 3
                ORDER BY 1, 2, 3) AS d
            WHERE p.tenant = d.tenant AND p.id = d.policy AND p.version = d.version;
        END IF;
    END IF;
    IF cardinality(v.ords) = v_count THEN
        RETURN QUERY SELECT
            CASE WHEN i.is_leased THEN ${ADDED_LEASED} ELSE ${ADDED} END::smallint, v_now, i.due,
            CASE WHEN i.is_leased THEN i.due + p_length ELSE i.due END
        FROM unnest(v.ords, v.dues, v.leased) AS i (ord, due, is_leased) ORDER BY i.ord;
        RETURN;
    END IF;
    v_results := coalesce(v_rejected, array_fill(0::smallint, ARRAY[v_count]));
    FOR i IN 1..v_count LOOP
        IF v_results[i] = 0 AND v_seqs[i] IS NULL THEN
            v_results[i] := ${EXISTS};
        END IF;
    END LOOP;
    v_dues := array_fill(NULL::bigint, ARRAY[v_count]);
    v_wakes := v_dues;
    FOR i IN 1..coalesce(array_length(v.ords, 1), 0) LOOP
        v_dues[v.ords[i]] := v.dues[i];
        v_wakes[v.ords[i]] := v.dues[i] + CASE WHEN v.leased[i] THEN p_length ELSE 0 END;
        IF v.leased[i] THEN
            v_results[v.ords[i]] := ${ADDED_LEASED};
        END IF;
    END LOOP;
    RETURN QUERY SELECT i.result, v_now, i.due, i.wake
    FROM unnest(v_results, v_dues, v_wakes) WITH ORDINALITY AS i (result, due, wake, ord)
    ORDER BY i.ord;
END $$;
