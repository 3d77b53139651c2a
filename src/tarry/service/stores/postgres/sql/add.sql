-- Add tasks, and lease those with `lease`. Returns a row for each task.
--
-- Of a `new_task_1`, `tenant`, `lane` and `policy` are positions in the arrays of names; the arrays
-- of ids have the same positions. `unnest` expands the composites of `p_tasks`: the columns
-- after the aliased ones keep the field names of `new_task_1`. With ORDINALITY all must be named,
-- to reach `ord`.
CREATE OR REPLACE FUNCTION tarry.add_1(
    p_names tarry.names_1, p_tasks tarry.new_task_1[], p_contents bytea[], p_worker text,
    p_length bigint, p_horizon bigint, p_quota bigint, p_lane_quota bigint, p_now bigint
) RETURNS TABLE (result smallint, created_at bigint, due_at bigint, wake_at bigint)
${PLAN_SETTINGS} AS $$
DECLARE
    v_now bigint := tarry.now_1(p_now);
    v_count integer := array_length(p_tasks, 1);
    v_tenants integer[] := tarry.tenants_1(p_names.tenants);
    v_lanes integer[] := tarry.lanes_1(p_names.lanes);
    v_policies integer[];
    v_rejected smallint[]; -- result for tasks that a quota rejects, else 0; NULL: none
    v_seqs bigint[]; -- NULL for tasks that are not added
    v_inserted bigint[];
    v_tenants_of_new_lanes integer[]; -- one for each lane
    v record;
BEGIN
    v_rejected := tarry.reject_1(p_names, p_tasks, v_tenants, v_lanes, p_quota, p_lane_quota);
    -- The day in the upper bits names the partition, see schema.py.
    SELECT array_agg(CASE WHEN v_rejected[i] > 0 THEN NULL ELSE
        (v_now / 86400000) << ${SEQ_DAY_BITS} | nextval('tarry.task_number') END ORDER BY i)
    INTO v_seqs FROM generate_series(1, v_count) AS i;
    v_inserted := tarry.insert_keys_1(p_tasks, v_seqs, v_tenants);
    IF array_length(v_inserted, 1) IS DISTINCT FROM v_count THEN
        v_inserted := v_inserted
            || tarry.replace_cancelled_1(p_tasks, v_seqs, v_inserted, v_tenants, v_lanes);
        SELECT array_agg(CASE WHEN i.seq = ANY (v_inserted) THEN i.seq END ORDER BY i.ord)
        INTO v_seqs FROM unnest(v_seqs) WITH ORDINALITY AS i (seq, ord);
        PERFORM tarry.check_ids_1(p_tasks, v_seqs, v_rejected, v_tenants);
    END IF;
    -- Lanes and policies are created only for tasks that are added.
    IF array_position(v_lanes, NULL) IS NOT NULL THEN
        v_tenants_of_new_lanes :=
            tarry.create_lanes_1(p_names, p_tasks, v_seqs, v_tenants, v_lanes);
        v_lanes := tarry.lanes_1(p_names.lanes);
    END IF;
    v_policies := tarry.policies_1(p_names, v_tenants);
    INSERT INTO tarry.content (seq, id, policy_version, key, fingerprint, body_ref, content)
    SELECT i.seq, i.id, i.version, i.key, i.fingerprint, i.body_ref, i.content
    FROM unnest(v_seqs, p_contents, p_tasks) AS i (seq, content)
    WHERE i.seq IS NOT NULL;
    SELECT s.* INTO v FROM tarry.store_1(p_tasks, v_seqs, v_tenants, v_lanes, v_policies, p_worker,
        p_length, p_horizon, v_now) AS s;
    IF coalesce(cardinality(v.ords), 0) <> cardinality(array_remove(v_seqs, NULL)) THEN
        RAISE SQLSTATE '40001' USING MESSAGE = 'a lane was removed meanwhile';
    END IF;
    IF v_tenants_of_new_lanes IS NOT NULL THEN
        -- In the order of `change_1` (types.sql): one new lane.
        v.changes := v.changes
            || (SELECT array_agg(ROW(n.tenant, NULL, NULL, 0, 0, 0, 0, 0, 0, 1, NULL, NULL)
                ::tarry.change_1) FROM unnest(v_tenants_of_new_lanes) AS n (tenant));
    END IF;
    IF v.changes IS NOT NULL THEN
        PERFORM tarry.apply_1(v.changes);
        IF v.has_versions THEN
            PERFORM tarry.count_versions_1(p_names, p_tasks, v_seqs, v_tenants);
        END IF;
    END IF;
    IF cardinality(v.ords) = v_count THEN
        RETURN QUERY SELECT i.result::smallint, v_now, i.due, i.wake
        FROM unnest(v.results, v.dues, v.wakes, v.ords) AS i (result, due, wake, ord)
        ORDER BY i.ord;
        RETURN;
    END IF;
    RETURN QUERY SELECT
        coalesce(v.results[p.at], nullif(v_rejected[i], 0), ${EXISTS})::smallint, v_now,
        v.dues[p.at], v.wakes[p.at]
    FROM generate_series(1, v_count) AS i
    CROSS JOIN LATERAL (SELECT array_position(v.ords, i::bigint) AS at) AS p
    ORDER BY i;
END $$;

-- Insert the keys of tasks that have a seq. Return the seqs of those whose key was new.
CREATE OR REPLACE FUNCTION tarry.insert_keys_1(
    p_tasks tarry.new_task_1[], p_seqs bigint[], p_tenants integer[]
) RETURNS bigint[] ${PLPGSQL} AS $$
DECLARE
    v_inserted bigint[];
BEGIN
    -- Ordered by tenant and key, so that batches with the same keys cannot deadlock.
    WITH inserted AS (
        INSERT INTO tarry.task_key AS k (seq, id, tenant, key)
        SELECT i.seq, i.id, p_tenants[i.tenant], i.key
        FROM unnest(p_seqs, p_tasks) WITH ORDINALITY AS i (seq, id, tenant, lane, policy, key,
            fingerprint, body_ref, version, due, delay, lease, ord)
        WHERE i.seq IS NOT NULL ORDER BY p_tenants[i.tenant], i.key, i.ord
        ON CONFLICT DO NOTHING RETURNING k.seq
    )
    SELECT array_agg(i.seq) INTO v_inserted FROM inserted AS i;
    RETURN v_inserted;
END $$;

-- Delete CANCELLED tasks that have the idempotency key of a new task, and insert the keys of these
-- new tasks. Return the seqs of those that were inserted.
CREATE OR REPLACE FUNCTION tarry.replace_cancelled_1(
    p_tasks tarry.new_task_1[], p_seqs bigint[], p_inserted bigint[], p_tenants integer[],
    p_lanes integer[]
) RETURNS bigint[] ${PLPGSQL} AS $$
DECLARE
    v record;
BEGIN
    SELECT array_agg(k.tenant) AS tenants, array_agg(k.seq) AS seqs, array_agg(i.seq) AS new_seqs,
        array_agg(f.lane) AS lanes INTO v
    FROM unnest(p_seqs, p_tasks) AS i (seq)
    JOIN tarry.task_key AS k ON k.tenant = p_tenants[i.tenant] AND k.key = i.key
    JOIN tarry.finished AS f
        ON f.tenant = k.tenant AND f.status = ${CANCELLED} AND f.seq = k.seq
    WHERE i.seq IS NOT NULL AND k.id <> i.id AND i.seq <> ALL (coalesce(p_inserted, '{}'));
    IF v.seqs IS NULL THEN
        RETURN NULL;
    END IF;
    -- Both `delete_1` and the end of `add_1` change counters. So all rows are locked here, in the
    -- order that all functions use.
    PERFORM 1 FROM tarry.finished AS f
    WHERE f.tenant = ANY (v.tenants) AND f.status = ${CANCELLED} AND f.seq = ANY (v.seqs)
    ORDER BY f.tenant, f.seq FOR UPDATE;
    PERFORM 1 FROM tarry.lane AS l
    WHERE l.id = ANY (p_lanes || v.lanes) ORDER BY l.id FOR NO KEY UPDATE;
    PERFORM 1 FROM tarry.tenant AS t WHERE t.id = ANY (p_tenants) ORDER BY t.id FOR NO KEY UPDATE;
    PERFORM tarry.delete_1(v.tenants, v.seqs);
    RETURN tarry.insert_keys_1(p_tasks,
        (SELECT array_agg(CASE WHEN i.seq = ANY (v.new_seqs) THEN i.seq END ORDER BY i.ord)
            FROM unnest(p_seqs) WITH ORDINALITY AS i (seq, ord)), p_tenants);
END $$;

-- Raise an error if a task was not added because a task with another key has the same id.
CREATE OR REPLACE FUNCTION tarry.check_ids_1(
    p_tasks tarry.new_task_1[], p_seqs bigint[], p_rejected smallint[], p_tenants integer[]
) RETURNS void ${PLPGSQL} AS $$
DECLARE
    v record;
BEGIN
    SELECT i.id INTO v FROM unnest(p_seqs, p_rejected, p_tasks) AS i (seq, rejected)
    JOIN tarry.task_key AS k ON k.id = i.id
    WHERE i.seq IS NULL AND coalesce(i.rejected, 0) = 0
        AND (k.tenant <> p_tenants[i.tenant] OR k.key <> i.key) LIMIT 1;
    IF FOUND THEN
        RAISE SQLSTATE '${ID_CONFLICT_STATE}' USING MESSAGE = v.id::text;
    END IF;
END $$;

-- Create the lanes of added tasks that are missing. Return the tenants of those that were created.
CREATE OR REPLACE FUNCTION tarry.create_lanes_1(
    p_names tarry.names_1, p_tasks tarry.new_task_1[], p_seqs bigint[], p_tenants integer[],
    p_lanes integer[]
) RETURNS integer[] ${PLPGSQL} AS $$
DECLARE
    v_tenants integer[];
BEGIN
    WITH created AS (
        INSERT INTO tarry.lane AS l (tenant, name)
        SELECT p_tenants[n.tenant], n.name
        FROM unnest(p_names.lanes, p_names.lane_tenants, p_lanes) WITH ORDINALITY
            AS n (name, tenant, id, ord)
        WHERE n.id IS NULL AND EXISTS (
            SELECT 1 FROM unnest(p_seqs, p_tasks) AS i (seq)
            WHERE i.lane = n.ord AND i.seq IS NOT NULL)
        ORDER BY n.name ON CONFLICT DO NOTHING RETURNING l.tenant
    )
    SELECT array_agg(c.tenant) INTO v_tenants FROM created AS c;
    RETURN v_tenants;
END $$;

-- Return the ids of policies, in the order of their names; create those that are missing.
CREATE OR REPLACE FUNCTION tarry.policies_1(p_names tarry.names_1, p_tenants integer[])
RETURNS integer[] ${PLPGSQL} AS $$
DECLARE
    v_ids integer[];
BEGIN
    FOR v_try IN 1..2 LOOP
        SELECT array_agg(u.id ORDER BY n.ord) INTO v_ids
        FROM unnest(p_names.policies, p_names.policy_tenants) WITH ORDINALITY
            AS n (name, tenant, ord)
        LEFT JOIN LATERAL (SELECT u.id FROM tarry.policy_use AS u
            WHERE u.tenant = p_tenants[n.tenant] AND u.policy = n.name
            -- The visible row version, see schema.py.
            ORDER BY u.generation DESC LIMIT 1) AS u ON TRUE;
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO tarry.policy_use (tenant, policy)
        SELECT p_tenants[n.tenant], n.name
        FROM unnest(p_names.policies, p_names.policy_tenants, v_ids) AS n (name, tenant, id)
        WHERE n.id IS NULL ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

-- Insert tasks that have a seq, if their lanes exist. Return for each its position in `p_tasks`,
-- the result, and the times; and the changes of the counters.
CREATE OR REPLACE FUNCTION tarry.store_1(
    p_tasks tarry.new_task_1[], p_seqs bigint[], p_tenants integer[], p_lanes integer[],
    p_policies integer[], p_worker text, p_length bigint, p_horizon bigint, p_now bigint,
    OUT ords bigint[], OUT results integer[], OUT dues bigint[], OUT wakes bigint[],
    OUT has_versions boolean, OUT changes tarry.change_1[]
) ${PLPGSQL} AS $$
#variable_conflict use_column
DECLARE
    v_open boolean[]; -- whether tasks of the lane may be leased; NULL: the lane was removed
BEGIN
    SELECT array_agg(l.parked_until IS NULL AND NOT l.paused ORDER BY n.ord) INTO v_open
    FROM unnest(p_lanes) WITH ORDINALITY AS n (id, ord)
    LEFT JOIN LATERAL (
        SELECT r.parked_until, r.paused FROM tarry.lane AS r WHERE r.id = n.id
        -- The visible row version, see schema.py.
        ORDER BY r.generation DESC LIMIT 1) AS l ON TRUE;
    WITH new AS MATERIALIZED (
        SELECT s.*, CASE WHEN s.status = ${IN_FLIGHT} THEN s.due + p_length ELSE s.due END AS wake
        FROM (
            SELECT d.ord, d.seq, p_tenants[d.tenant] AS tenant, p_lanes[d.lane] AS lane,
                p_policies[d.policy] AS policy, d.version, d.due,
                CASE WHEN d.lease AND v_open[d.lane] AND d.due <= p_now + p_horizon
                    THEN ${IN_FLIGHT} ELSE ${PENDING} END AS status
            FROM (
                SELECT i.seq, i.tenant, i.lane, i.policy, i.version, i.lease, i.ord,
                    greatest(p_now, coalesce(p_now + i.delay, i.due)) AS due
                FROM unnest(p_seqs, p_tasks) WITH ORDINALITY AS i (seq, id, tenant, lane, policy,
                    key, fingerprint, body_ref, version, due, delay, lease, ord)
            ) AS d
            WHERE d.seq IS NOT NULL AND v_open[d.lane] IS NOT NULL
        ) AS s
    ), stored AS (
        INSERT INTO tarry.live (tenant, seq, lane, policy, queue, wake_at, next_attempt_at,
            first_due_at, created_at, worker)
        SELECT i.tenant, i.seq, i.lane, i.policy,
            CASE i.status WHEN ${IN_FLIGHT} THEN ${LEASED_QUEUE} ELSE ${FIRST_ATTEMPT_QUEUE} END,
            i.wake, i.due, i.due, p_now, CASE WHEN i.status = ${IN_FLIGHT} THEN p_worker END
        FROM new AS i
    ), changes AS ( -- in the order of `change_1` (types.sql)
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_ADDED},
            0 AS superseded, 0 AS new_lanes,
            min(i.due) FILTER (WHERE i.status = ${PENDING}) AS due,
            min(i.wake) FILTER (WHERE i.status = ${IN_FLIGHT}) AS lease_end
        FROM new AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT array_agg(i.ord),
        array_agg(CASE i.status WHEN ${IN_FLIGHT} THEN ${ADDED_LEASED} ELSE ${ADDED} END),
        array_agg(i.due), array_agg(i.wake), count(i.version) > 0,
        (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c)
    INTO ords, results, dues, wakes, has_versions, changes FROM new AS i;
END $$;

-- Add the added tasks to the numbers of tasks of the policy versions that they name.
CREATE OR REPLACE FUNCTION tarry.count_versions_1(
    p_names tarry.names_1, p_tasks tarry.new_task_1[], p_seqs bigint[], p_tenants integer[]
) RETURNS void ${PLPGSQL} AS $$
BEGIN
    UPDATE tarry.policy AS p SET tasks = p.tasks + d.tasks
    FROM (SELECT p_tenants[i.tenant] AS tenant, p_names.policies[i.policy] AS policy,
            i.version, count(*) AS tasks
        FROM unnest(p_seqs, p_tasks) AS i (seq)
        WHERE i.seq IS NOT NULL AND i.version IS NOT NULL GROUP BY 1, 2, 3
        ORDER BY 1, 2, 3) AS d
    WHERE p.tenant = d.tenant AND p.id = d.policy AND p.version = d.version;
END $$;
