"""What the tests of PostgresStore share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from tarry.idempotency.stores.postgres import PostgresStore

asyncpg = import_module("asyncpg")


@asynccontextmanager
async def connected(dsn: str) -> AsyncGenerator[Any]:
    """A connection beside the store's own."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


def with_store(
    dsn: str, table: str, test: Callable[[PostgresStore], Coroutine[Any, Any, None]]
) -> None:
    """Run a test on a store of its own."""

    async def main() -> None:
        store = PostgresStore(dsn, table=table)
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())
