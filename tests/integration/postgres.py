"""Helpers for the tests of PostgresStore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from tarry.idempotency.postgres_store import PostgresStore

asyncpg = import_module("asyncpg")
SEARCH_PATH = "pg_catalog, pg_temp"
"""With this `search_path`, only built-in functions are called."""


@asynccontextmanager
async def connected(dsn: str, **settings: str) -> AsyncGenerator[Any]:
    """Open a connection that the store does not use, with settings of the server."""
    connection = await asyncpg.connect(dsn, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close()


def with_store(
    dsn: str, table: str, test: Callable[[PostgresStore], Coroutine[Any, Any, None]]
) -> None:
    """Run a test with a new store."""

    async def main() -> None:
        store = PostgresStore(dsn, table=table)
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())
