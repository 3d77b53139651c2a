"""Attacks of another role of the database on the store in PostgreSQL.

The role has no right on the tables, but may create functions in the schema public, as each role may
by default up to PostgreSQL 14. `test_conformance` runs on a database with such functions, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tarry.errors import ConfigurationError
from tarry.service.records.api_keys import list_api_keys
from tarry.service.store import LeaseTerms, NewTask
from tarry.service.stores.postgres import PostgresTaskStore
from tests.integration.postgres import SEARCH_PATH, connected
from tests.integration.postgres_shadows import create_as_attacker
from tests.integration.postgres_store import new_schema_url, open_store, run_case, run_on_store
from tests.integration.servers import pgbouncer_server
from tests.service.stores.conformance.suite import CASES, Case, case_name
from tests.service.stores.harness import success_result, task

LEASE = LeaseTerms("worker", 30_000, 1000)
ADD_API_KEY = """
CREATE FUNCTION public.cardinality(integer[]) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tarry.api_key VALUES ('attack', 'acme', '', '', 0, NULL, 'admin')
    ON CONFLICT DO NOTHING;
    RETURN pg_catalog.cardinality($1);
END $$
"""


@pytest.fixture(scope="module")
def pgbouncer_dsn(shadowed_dsn: str) -> Iterator[str]:
    """Run PgBouncer, which does not forward the `search_path` of its clients."""
    with pgbouncer_server(shadowed_dsn, pool_size=4) as server:
        yield server.address.replace("/postgres?", "/shadowed?")


async def test_a_function_of_another_role_is_not_called(postgres_dsn: str) -> None:
    """A role that creates a function with the name of a built-in one does not get an API key."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await create_as_attacker(postgres_dsn, store.database.sql(ADD_API_KEY))
        try:
            await store.add([NewTask(task(1)), NewTask(task(2, "other"))])
            leased = (await store.claim(LEASE, limit=2, per_lane=2)).tasks
            await store.finish([success_result(each) for each in leased])
            assert 2 == len(leased)
            assert [] == await list_api_keys(store, "acme")
        finally:
            async with connected(postgres_dsn) as connection:
                await connection.execute("DROP FUNCTION public.cardinality(integer[])")


@pytest.mark.parametrize("case", CASES[::5], ids=case_name)
def test_only_built_in_functions_are_called_behind_a_pooler(
    case: Case, pgbouncer_dsn: str, shadowed_dsn: str
) -> None:
    """Behind a pooler, each statement finds the built-in functions and operators."""
    run_case(pgbouncer_dsn, case, shadowed_dsn)


async def test_each_function_has_a_search_path(postgres_dsn: str) -> None:
    """A function finds built-in functions only, or its names were resolved when it was created."""
    functions = """
        SELECT p.proname, p.proconfig, p.prosqlbody IS NOT NULL FROM pg_proc AS p
        WHERE p.pronamespace = $1::regnamespace
    """

    async with open_store(new_schema_url(postgres_dsn)) as store:
        async with connected(postgres_dsn) as connection:
            rows = await connection.fetch(functions, store.database.options.schema)
        unsafe = [
            name
            for name, settings, is_resolved in rows
            if not is_resolved and f"search_path={SEARCH_PATH}" not in (settings or [])
        ]
        assert len(rows) > 20
        assert [] == unsafe


async def test_each_connection_has_a_search_path(postgres_dsn: str) -> None:
    """A setting in the URL or of the role does not change the search_path of the store."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&search_path=public") as store:
        assert not store.database.is_pooled
        path = await store.database.fetch_value("SHOW search_path")
        assert path == SEARCH_PATH


def test_a_schema_in_which_all_roles_may_create_functions_is_refused(
    postgres_dsn: str,
) -> None:
    """Both for a new store and for one that exists; the error has the statement to run."""

    async def execute(statement: str) -> None:
        async with connected(postgres_dsn) as connection:
            await connection.execute(statement)

    async def use(_: PostgresTaskStore) -> None:
        pass

    asyncio.run(execute("CREATE SCHEMA open_to_all; GRANT CREATE ON SCHEMA open_to_all TO PUBLIC"))
    url = f"{postgres_dsn}&schema=open_to_all"
    revoke = 'REVOKE CREATE ON SCHEMA "open_to_all" FROM PUBLIC'
    with pytest.raises(ConfigurationError, match=revoke):
        run_on_store(url, use)
    asyncio.run(execute(revoke))
    run_on_store(url, use)
    asyncio.run(execute("GRANT CREATE ON SCHEMA open_to_all TO PUBLIC"))
    with pytest.raises(ConfigurationError, match=revoke):
        run_on_store(url, use)
