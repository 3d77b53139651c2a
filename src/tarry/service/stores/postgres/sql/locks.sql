-- Each function locks rows in the order of their ids. NULL and missing ids are ignored. The row of
-- an id is the first by descending generation, see schema.py. `_1` is the version of a function.
CREATE OR REPLACE FUNCTION tarry.lock_lanes_1(p_ids integer[]) RETURNS void ${PLPGSQL} AS $$
BEGIN
    PERFORM 1 FROM (SELECT DISTINCT i.id FROM unnest(p_ids) AS i (id) ORDER BY i.id) AS i
    CROSS JOIN LATERAL (
        SELECT r.id FROM tarry.lane AS r WHERE r.id = i.id
        ORDER BY r.generation DESC LIMIT 1 FOR NO KEY UPDATE) AS r;
END $$;

CREATE OR REPLACE FUNCTION tarry.lock_tenants_1(p_ids integer[]) RETURNS void ${PLPGSQL} AS $$
BEGIN
    PERFORM 1 FROM (SELECT DISTINCT i.id FROM unnest(p_ids) AS i (id) ORDER BY i.id) AS i
    CROSS JOIN LATERAL (
        SELECT r.id FROM tarry.tenant AS r WHERE r.id = i.id
        ORDER BY r.generation DESC LIMIT 1 FOR NO KEY UPDATE) AS r;
END $$;

CREATE OR REPLACE FUNCTION tarry.lock_policies_1(p_ids integer[]) RETURNS void ${PLPGSQL} AS $$
BEGIN
    PERFORM 1 FROM (SELECT DISTINCT i.id FROM unnest(p_ids) AS i (id) ORDER BY i.id) AS i
    CROSS JOIN LATERAL (
        SELECT r.id FROM tarry.policy_use AS r WHERE r.id = i.id
        ORDER BY r.generation DESC LIMIT 1 FOR NO KEY UPDATE) AS r;
END $$;
