"""Helpers for the tests of the service's store in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from itertools import count

from tarry.service.stores.postgres import PostgresStore
from tests.service.stores.harness import ManualClock, StoreHarness

asyncpg = import_module("asyncpg")
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
    connection = await asyncpg.connect(dsn)
    try:
        if await connection.fetchval("SELECT to_regclass('tarry.meta') IS NOT NULL"):
            await connection.execute(_EMPTY_TABLES)
    finally:
        await connection.close()


def new_schema_url(dsn: str) -> str:
    """Return the URL of a store with a schema that no other test uses."""
    return f"{dsn}&schema=s{next(_numbers)}"


def run_on_store(url: str, main: Callable[[PostgresStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store on a manual clock."""

    async def run() -> None:
        store = PostgresStore(url, clock=ManualClock())
        await store.open()
        try:
            await main(store)
        finally:
            await store.close()

    asyncio.run(run())


def run_case(url: str, case: Callable[[StoreHarness], Awaitable[None]]) -> None:
    """Run a case of the conformance suite on an empty store."""

    async def main() -> None:
        await empty_tables(url)
        await StoreHarness(lambda clock: PostgresStore(url, clock=clock)).run(case)

    asyncio.run(main())
