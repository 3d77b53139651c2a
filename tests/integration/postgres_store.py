"""Helpers for the tests of the service's store in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from tarry.service.stores.postgres import PostgresTaskStore
from tarry.service.stores.postgres.database import Database
from tests.integration.postgres import SEARCH_PATH, connected
from tests.integration.postgres_parameters import find_wrong_parameters
from tests.service.stores.harness import ManualClock, StoreHarness

_numbers = count()

_EMPTY_TABLES = """
DO $$
DECLARE v_table text;
BEGIN
    FOR v_table IN SELECT tablename FROM pg_tables
        WHERE schemaname = 'tarry' AND tablename <> 'meta'
    LOOP
        EXECUTE 'DELETE FROM tarry.' || v_table;
    END LOOP;
    UPDATE tarry.meta SET value = 0 WHERE name IN ('pinged', 'limits_version');
END $$;
"""


async def empty_tables(dsn: str) -> None:
    """Delete all rows, which is faster than a new schema; tables that are missing are ignored."""
    async with connected(dsn, search_path=SEARCH_PATH) as connection:
        if await connection.fetchval("SELECT to_regclass('tarry.meta') IS NOT NULL"):
            await connection.execute(_EMPTY_TABLES)


def new_schema_url(dsn: str) -> str:
    """Return the URL of a store with a schema that no other test uses."""
    return f"{dsn}&schema=s{next(_numbers)}"


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[PostgresTaskStore]:
    """Open and close a store on a manual clock."""
    store = PostgresTaskStore(url, clock=ManualClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run_on_store(url: str, main: Callable[[PostgresTaskStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store on a manual clock."""

    async def run() -> None:
        async with open_store(url) as store:
            await main(store)

    asyncio.run(run())


def run_case(
    url: str, case: Callable[[StoreHarness], Awaitable[None]], dsn: str | None = None
) -> None:
    """Run a case of the conformance suite on an empty store, and check the types of parameters.

    `dsn` is the address of the server, if `url` is that of a pooler.
    """
    dsn = url if dsn is None else dsn

    async def main() -> None:
        await empty_tables(dsn)
        queries: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            connect = Database.connect

            async def connect_with_logger(database: Database, *args: Any, **options: Any) -> Any:
                connection = await connect(database, *args, **options)
                connection.add_query_logger(queries.append)
                return connection

            patch.setattr(Database, "connect", connect_with_logger)
            await StoreHarness(lambda clock: PostgresTaskStore(url, clock=clock)).run(case)
        statements = [(query.query, query.args) for query in queries if query.exception is None]
        assert statements
        assert [] == await find_wrong_parameters(dsn, statements)

    asyncio.run(main())
