"""Functions and operators of another role, with the names of built-in ones.

PostgreSQL prefers a function or operator whose types match exactly to a built-in one for which an
argument must be converted (an array to `anyarray`, an integer to `double precision`), wherever in
the `search_path` they are. On a database with these shadows, each statement that finds one fails.
"""

from __future__ import annotations

from tests.integration.postgres import connected

_ALLOW = """
DO $$ BEGIN
    CREATE ROLE mallory;
EXCEPTION WHEN duplicate_object THEN NULL;
END $$;
GRANT CREATE ON SCHEMA public TO mallory;
SET search_path = pg_catalog, pg_temp;
SET ROLE mallory;
"""
_PLANT = """
CREATE FUNCTION public.called() RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN RAISE 'a function of another role was called'; END $$;
DO $$
DECLARE v record;
BEGIN
    -- Functions of arrays and elements, for each type.
    FOR v IN SELECT DISTINCT p.proname, (
            SELECT string_agg(coalesce(CASE a.typname
                WHEN 'anyarray' THEN e.name || '[]' WHEN 'anycompatiblearray' THEN e.name || '[]'
                WHEN 'anyelement' THEN e.name WHEN 'anycompatible' THEN e.name END,
                format_type(a.oid, NULL)), ', ' ORDER BY i.ord)
            FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS i (type, ord)
            JOIN pg_type AS a ON a.oid = i.type) AS types
        FROM pg_proc AS p, unnest('{integer,bigint,smallint,text,bytea,uuid,boolean,
            double precision}'::text[]) AS e (name)
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f'
            AND proargtypes::oid[] && '{anyarray,anyelement,anycompatible,
                anycompatiblearray}'::regtype[]::oid[]
            AND proargtypes::oid[] <@ '{anyarray,anyelement,anycompatible,anycompatiblearray,
                integer,bigint,boolean,text}'::regtype[]::oid[]
    LOOP
        EXECUTE format('CREATE OR REPLACE FUNCTION public.%I(%s) RETURNS integer LANGUAGE plpgsql
            AS ''BEGIN PERFORM public.called(); RETURN 1; END''', v.proname, v.types);
    END LOOP;
    CREATE FUNCTION public.make_interval(secs double precision) RETURNS interval LANGUAGE plpgsql
        AS 'BEGIN PERFORM public.called(); RETURN ''1 s''; END';
    CREATE FUNCTION public.hashtextextended(text, integer) RETURNS bigint LANGUAGE plpgsql
        AS 'BEGIN PERFORM public.called(); RETURN 1; END';
    -- Functions of one number or text, for other types.
    FOR v IN SELECT DISTINCT p.proname, e.name
        FROM pg_proc AS p, unnest('{smallint,integer,bigint,numeric,double precision,
            character varying,name}'::regtype[]) AS e (name)
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.pronargs = 1
            AND p.proargtypes[0] IN ('bigint'::regtype, 'numeric'::regtype, 'text'::regtype,
                'double precision'::regtype)
            AND NOT EXISTS (SELECT 1 FROM pg_proc AS q WHERE q.proname = p.proname
                AND q.pronamespace = p.pronamespace AND q.pronargs = 1
                AND q.proargtypes[0] = e.name)
    LOOP
        EXECUTE format('CREATE OR REPLACE FUNCTION public.%I(%s) RETURNS integer LANGUAGE plpgsql
            AS ''BEGIN PERFORM public.called(); RETURN 1; END''', v.proname, v.name);
    END LOOP;
    -- Operators, for pairs of types that have none.
    FOR v IN SELECT o.name AS name, l.name AS left_type, r.name AS right_type
        FROM unnest('{+,-,*,/,%,=,<>,<,<=,>,>=,||,<<}'::text[]) AS o (name),
            unnest('{smallint,integer,bigint,numeric,double precision,text,character varying,name,
                integer[],bigint[],text[],uuid,bytea}'::regtype[]) AS l (name),
            unnest('{smallint,integer,bigint,numeric,double precision,text,character varying,name,
                integer[],bigint[],text[],uuid,bytea}'::regtype[]) AS r (name)
        WHERE NOT EXISTS (SELECT 1 FROM pg_operator AS p WHERE p.oprname = o.name
            AND p.oprleft = l.name AND p.oprright = r.name)
    LOOP
        EXECUTE format('CREATE FUNCTION public.operator_%s(%s, %s) RETURNS boolean
            LANGUAGE plpgsql AS ''BEGIN PERFORM public.called(); RETURN true; END''',
            md5(v.name), v.left_type, v.right_type);
        EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s,
            FUNCTION = public.operator_%s)', v.name, v.left_type, v.right_type, md5(v.name));
    END LOOP;
END $$;
"""


async def create_as_attacker(dsn: str, statements: str) -> None:
    """Run statements as a role that may create objects in the schema public, and nothing else."""
    async with connected(dsn) as connection:
        await connection.execute(_ALLOW)
        await connection.execute(statements)


async def plant_shadows(dsn: str) -> None:
    """Create a shadow of each built-in function and operator, as far as the role can."""
    await create_as_attacker(dsn, _PLANT)
