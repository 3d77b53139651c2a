-- Return the ids of tenants, in the order of their names; create tenants that are missing.
CREATE OR REPLACE FUNCTION tarry.tenants_1(p_names text[]) RETURNS integer[] ${PLPGSQL} AS $$
DECLARE v_ids integer[];
BEGIN
    FOR v_try IN 1..2 LOOP
        SELECT array_agg(t.id ORDER BY i.ord) INTO v_ids
        FROM unnest(p_names) WITH ORDINALITY AS i (name, ord)
        LEFT JOIN tarry.tenant_name AS t ON t.name = i.name;
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO tarry.tenant (name)
        SELECT DISTINCT i.name FROM unnest(p_names, v_ids) AS i (name, id)
        WHERE i.id IS NULL ORDER BY i.name
        ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

-- Return the ids of lanes, in the order of their names; NULL for lanes that are missing.
CREATE OR REPLACE FUNCTION tarry.lanes_1(p_names text[]) RETURNS integer[] ${PLPGSQL} AS $$
BEGIN
    RETURN (SELECT array_agg(l.id ORDER BY i.ord)
        FROM unnest(p_names) WITH ORDINALITY AS i (name, ord)
        LEFT JOIN tarry.lane_name AS l ON l.name = i.name);
END $$;
