"""The table of PostgresStore, and the connections that it uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency.postgres_store import PostgresStore
from tarry.idempotency.store import ExistingRecord
from tests.integration.postgres import asyncpg, connected, with_store


def test_concurrent_creation_of_the_table(postgres_dsn: str, table: str) -> None:
    """Stores that find no table create it together, none fails, and one claim gets the key."""

    async def main() -> None:
        stores = [PostgresStore(postgres_dsn, table=table) for _ in range(8)]
        claims = (store.claim("k", "print", str(number), 60) for number, store in enumerate(stores))
        answers = await asyncio.gather(*claims, return_exceptions=True)
        await asyncio.gather(*(store.close() for store in stores))

        assert [ExistingRecord] * 7 == [type(answer) for answer in answers if answer is not None]

    asyncio.run(main())


def test_large_sweep_runs_in_batches(
    postgres_dsn: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep runs until its limit and skips rows that another transaction has locked."""
    monkeypatch.setattr("tarry.idempotency.postgres_store._SWEEP_BATCH_ROWS", 2)

    async def test(store: PostgresStore) -> None:
        for number in range(8):
            await store.claim(f"k{number}", "print", "first", 0)
        async with connected(postgres_dsn) as connection, connection.transaction():
            held = f"SELECT FROM {table} WHERE key = 'k0' FOR UPDATE"
            await connection.execute(held)
            assert [5, 2, 0] == [await store.sweep(5) for _ in range(3)]
        assert 1 == await store.sweep(5)

    with_store(postgres_dsn, table, test)


def test_role_without_create_privilege(postgres_dsn: str, table: str) -> None:
    """An existing table can be used by a role that could not create it."""
    schema, role = f"Odd_{table}", f"role_{table}"
    rights = f"""
        CREATE ROLE {role} LOGIN;
        GRANT USAGE ON SCHEMA "{schema}" TO {role};
        GRANT SELECT, INSERT, UPDATE, DELETE ON "{schema}"."order" TO {role}
    """

    async def test(store: PostgresStore) -> None:
        async with connected(postgres_dsn) as connection:
            await connection.execute(f'CREATE SCHEMA "{schema}"')
            assert await store.claim("k", "print", "first", 0) is None
            await connection.execute(rights)
        as_role = postgres_dsn.replace("//postgres@", f"//{role}@")
        limited = PostgresStore(as_role, table=f"{schema}.order")
        assert 1 == await limited.sweep(10)
        assert await limited.claim("k", "print", "first", 60) is None
        await limited.close()

    with_store(postgres_dsn, f"{schema}.order", test)


def test_pool_of_the_caller_stays_open(postgres_dsn: str, table: str) -> None:
    """A pool that was passed in is used and not closed."""

    async def main() -> None:
        async with asyncpg.create_pool(postgres_dsn, min_size=0) as pool:
            store = PostgresStore(pool, table=table)
            assert await store.claim("k", "print", "first", 60) is None
            await store.close()
            assert 1 == await pool.fetchval(f"SELECT count(*) FROM {table}")  # noqa: S608

    asyncio.run(main())


class DyingPool:
    """A pool whose first connection is dead when it is used."""

    def __init__(self, pool: Any, error: Exception) -> None:
        self.pool = pool
        self.errors = [error]

    async def acquire(self, *, timeout: float | None = None) -> Any:
        """Return a connection."""
        return DeadConnection(self, await self.pool.acquire(timeout=timeout))

    async def release(self, connection: Any, *, timeout: float | None = None) -> None:
        """Take a connection back."""
        await self.pool.release(connection.connection, timeout=timeout)

    async def close(self) -> None:
        """Do nothing."""


class DeadConnection:
    """A connection of such a pool."""

    def __init__(self, pool: DyingPool, connection: Any) -> None:
        self.pool = pool
        self.connection = connection

    async def fetchrow(self, query: str, /, *args: Any, timeout: float | None = None) -> Any:
        """Fail once."""
        if "INSERT" in query and self.pool.errors:
            raise self.pool.errors.pop()
        return await self.connection.fetchrow(query, *args, timeout=timeout)

    async def execute(self, query: str, /, timeout: float | None = None) -> Any:
        """Run statements."""
        return await self.connection.execute(query, timeout=timeout)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.InternalClientError("cannot switch to state 11"),
        asyncpg.ConnectionDoesNotExistError(),
        asyncpg.AdminShutdownError(),
        asyncpg.CrashShutdownError(),
        asyncpg.SerializationError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_next_connection_is_tried(postgres_dsn: str, table: str, error: Exception) -> None:
    """Each error of asyncpg about a dead connection or a lost race is retried."""

    async def main() -> None:
        async with asyncpg.create_pool(postgres_dsn, min_size=0) as pool:
            store = PostgresStore(DyingPool(pool, error), table=table)
            assert await store.claim("k", "print", "first", 60) is None

    asyncio.run(main())
