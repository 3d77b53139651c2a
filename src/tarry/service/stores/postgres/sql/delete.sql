-- Delete finished tasks. The rows of `content` and `attempt` stay in the partition of their day,
-- which is dropped later, and are deleted from the default partition only.
CREATE OR REPLACE FUNCTION tarry.delete_1(p_tenants integer[], p_seqs bigint[]) RETURNS integer
${PLAN_SETTINGS} AS $$
DECLARE v record;
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT f.* FROM (
            SELECT DISTINCT i.tenant, i.seq FROM unnest(p_tenants, p_seqs) AS i (tenant, seq)) AS i
        JOIN tarry.finished AS f ON f.tenant = i.tenant AND f.seq = i.seq
            AND f.status IN (${SUCCEEDED}, ${EXHAUSTED}, ${CANCELLED})
        ORDER BY f.tenant, f.seq FOR UPDATE OF f
    ), gone AS (
        DELETE FROM tarry.finished AS f USING locked AS i
        WHERE f.tenant = i.tenant AND f.status = i.status AND f.seq = i.seq
    ), keys AS (
        DELETE FROM tarry.task_key AS k USING locked AS i WHERE k.seq = i.seq
    ), content AS MATERIALIZED (
        SELECT i.tenant, i.policy, c.policy_version, c.body_ref
        FROM locked AS i JOIN tarry.content AS c ON c.seq = i.seq
        WHERE c.policy_version IS NOT NULL OR c.body_ref IS NOT NULL
    ), versions AS MATERIALIZED (
        SELECT c.tenant, u.policy, c.policy_version AS version, count(*)::integer AS tasks
        FROM content AS c JOIN tarry.policy_use AS u ON u.id = c.policy
        WHERE c.policy_version IS NOT NULL GROUP BY 1, 2, 3
    ), orphans AS (
        INSERT INTO tarry.orphan SELECT DISTINCT c.body_ref FROM content AS c
        WHERE c.body_ref IS NOT NULL ORDER BY c.body_ref ON CONFLICT DO NOTHING
    ), old_content AS (
        DELETE FROM tarry.content_default AS c USING locked AS i WHERE c.seq = i.seq
    ), old_attempts AS (
        DELETE FROM tarry.attempt_default AS a USING locked AS i WHERE a.seq = i.seq
    ), changes AS (
        SELECT i.tenant, i.lane, i.policy,
            ${COUNTS_OF_DELETED},
            0 AS superseded, 0 AS new_lanes, NULL::bigint AS due, NULL::bigint AS lease_end
        FROM locked AS i GROUP BY i.tenant, i.lane, i.policy
    )
    SELECT (SELECT array_agg(ROW(c.*)::tarry.change_1) FROM changes AS c) AS changes,
        (SELECT count(*)::integer FROM locked) AS deleted,
        array_agg(i.tenant) AS tenants, array_agg(i.policy) AS policies,
        array_agg(i.version) AS versions, array_agg(i.tasks) AS tasks
    INTO v FROM versions AS i;
    IF v.deleted > 0 THEN
        PERFORM tarry.apply_1(v.changes);
        UPDATE tarry.policy AS p SET tasks = p.tasks - d.tasks
        FROM (SELECT * FROM unnest(v.tenants, v.policies, v.versions, v.tasks)
                AS i (tenant, policy, version, tasks) ORDER BY 1, 2, 3) AS d
        WHERE p.tenant = d.tenant AND p.id = d.policy AND p.version = d.version;
    END IF;
    RETURN v.deleted;
END $$;
