"""Helpers for the tests of PostgresStore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from tarry.idempotency.postgres_store import PostgresStore

asyncpg = import_module("asyncpg")


@asynccontextmanager
async def connected(dsn: str) -> AsyncGenerator[Any]:
    """Open a connection that the store does not use."""
    connection = await asyncpg.connect(dsn)
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
