"""The table of PostgresStore, and the connections that it uses."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency.postgres_store import PostgresStore
from tarry.idempotency.store import ExistingRecord
from tests.integration.postgres import asyncpg, connected, open_store
from tests.integration.postgres_shadows import create_as_attacker


async def test_table_can_be_created_concurrently(postgres_dsn: str, table: str) -> None:
    """Stores that create the table concurrently do not fail, and one claim gets the key."""
    stores = [PostgresStore(postgres_dsn, table=table) for _ in range(8)]
    claims = (store.claim("k", "print", str(number), 60) for number, store in enumerate(stores))
    results = await asyncio.gather(*claims, return_exceptions=True)
    await asyncio.gather(*(store.close() for store in stores))

    assert [ExistingRecord] * 7 == [type(result) for result in results if result is not None]


async def test_sweep_runs_in_batches(
    postgres_dsn: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep deletes up to its limit, and skips rows that another transaction has locked."""
    monkeypatch.setattr("tarry.idempotency.postgres_store._SWEEP_BATCH_ROWS", 2)

    async with open_store(postgres_dsn, table) as store:
        for number in range(8):
            await store.claim(f"k{number}", "print", "first", 0)
        async with connected(postgres_dsn) as connection, connection.transaction():
            lock_row = f"SELECT FROM {table} WHERE key = 'k0' FOR UPDATE"
            await connection.execute(lock_row)
            assert [5, 2, 0] == [await store.sweep(5) for _ in range(3)]
        assert 1 == await store.sweep(5)


async def test_role_without_create_privilege_can_use_an_existing_table(
    postgres_dsn: str, table: str
) -> None:
    """Claims and sweeps work with the privileges SELECT, INSERT, UPDATE and DELETE."""
    schema, role = f"Odd_{table}", f"role_{table}"
    grants = f"""
        CREATE ROLE {role} LOGIN;
        GRANT USAGE ON SCHEMA "{schema}" TO {role};
        GRANT SELECT, INSERT, UPDATE, DELETE ON "{schema}"."order" TO {role}
    """

    async with open_store(postgres_dsn, f"{schema}.order") as store:
        async with connected(postgres_dsn) as connection:
            await connection.execute(f'CREATE SCHEMA "{schema}"')
            assert await store.claim("k", "print", "first", 0) is None
            await connection.execute(grants)
        as_role = postgres_dsn.replace("//postgres@", f"//{role}@")
        limited = PostgresStore(as_role, table=f"{schema}.order")
        assert 1 == await limited.sweep(10)
        assert await limited.claim("k", "print", "first", 60) is None
        await limited.close()


PLANT_TABLE = """
CREATE TABLE public.{table} (key text PRIMARY KEY, fingerprint text, owner text,
    free_at timestamptz, status integer, headers text, body bytea);
GRANT ALL ON public.{table} TO PUBLIC;
CREATE FUNCTION public.copy_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE 'the trigger ran as %', CURRENT_USER; END $$;
CREATE TRIGGER copy BEFORE INSERT ON public.{table} FOR EACH ROW
EXECUTE FUNCTION public.copy_{table}();
"""


@pytest.mark.parametrize("is_superuser", [True, False])
async def test_table_of_another_role_is_refused(
    postgres_dsn: str, table: str, *, is_superuser: bool
) -> None:
    """No trigger of another role runs, if that role has created the table first."""
    role = "postgres" if is_superuser else f"role_{table}"
    message = (
        f"table public.{table} belongs to the role mallory, whose triggers would run with the "
        f"rights of {role}. Pass another table=, drop this one, or, if you trust mallory, run: "
        f"GRANT mallory TO {role}"
    )

    await create_as_attacker(postgres_dsn, PLANT_TABLE.format(table=table))
    if not is_superuser:
        async with connected(postgres_dsn) as connection:
            await connection.execute(f"CREATE ROLE {role} LOGIN")
    dsn = postgres_dsn.replace("//postgres@", f"//{role}@")
    for name in (table, f"public.{table}"):
        store = PostgresStore(dsn, table=name)
        with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
            await store.claim("k", "print", "first", 60)
        await store.close()


async def test_table_of_a_trusted_role_can_be_used(postgres_dsn: str, table: str) -> None:
    """The table may belong to the owner of its schema, or to a role that was granted."""
    schema, owner, role = f"{table}_schema", f"{table}_owner", f"{table}_role"
    statements = f"""
        CREATE ROLE {owner};
        CREATE ROLE {role} LOGIN;
        CREATE SCHEMA {schema} AUTHORIZATION {owner};
        GRANT USAGE ON SCHEMA {schema} TO {role};
        ALTER TABLE {table} OWNER TO {owner};
        ALTER TABLE {table} SET SCHEMA {schema};
        GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.{table} TO {role};
        ALTER ROLE {role} SET search_path = {schema};
    """

    async with open_store(postgres_dsn, table) as store:
        assert await store.claim("k", "print", "first", 0) is None
        as_role = postgres_dsn.replace("//postgres@", f"//{role}@")
        named = PostgresStore(as_role, table=f"{schema}.{table}")
        found = PostgresStore(as_role, table=table)
        async with connected(postgres_dsn) as connection:
            await connection.execute(statements)
            assert await named.claim("k2", "print", "first", 60) is None
            with pytest.raises(ConfigurationError, match=f"GRANT {owner} TO {role}$"):
                await found.claim("k3", "print", "first", 60)
            await connection.execute(f"GRANT {owner} TO {role}")
            assert await found.claim("k3", "print", "first", 60) is None
        await named.close()
        await found.close()


async def test_pool_of_the_caller_stays_open(postgres_dsn: str, table: str) -> None:
    """A pool that the caller passes is used and not closed."""
    async with asyncpg.create_pool(postgres_dsn, min_size=0) as pool:
        store = PostgresStore(pool, table=table)
        assert await store.claim("k", "print", "first", 60) is None
        await store.close()
        assert 1 == await pool.fetchval(f"SELECT count(*) FROM {table}")  # noqa: S608


class FaultyPool:
    """A pool whose first INSERT fails."""

    def __init__(self, pool: Any, error: Exception) -> None:
        self.pool = pool
        self.errors = [error]

    async def acquire(self, *, timeout: float | None = None) -> Any:
        """Acquire a connection."""
        return FaultyConnection(self, await self.pool.acquire(timeout=timeout))

    async def release(self, connection: Any, *, timeout: float | None = None) -> None:
        """Release a connection."""
        await self.pool.release(connection.connection, timeout=timeout)

    async def close(self) -> None:
        """Do nothing."""


class FaultyConnection:
    """A connection of a FaultyPool."""

    def __init__(self, pool: FaultyPool, connection: Any) -> None:
        self.pool = pool
        self.connection = connection

    async def fetchrow(self, query: str, /, *args: Any, timeout: float | None = None) -> Any:
        """Run a query; the first INSERT of the pool raises its error."""
        if "INSERT" in query and self.pool.errors:
            raise self.pool.errors.pop()
        return await self.connection.fetchrow(query, *args, timeout=timeout)

    async def execute(self, query: str, /, timeout: float | None = None) -> Any:
        """Execute statements."""
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
async def test_claim_is_retried_on_another_connection(
    postgres_dsn: str, table: str, error: Exception
) -> None:
    """A claim is retried after an error about a closed connection or a serialization failure."""
    async with asyncpg.create_pool(postgres_dsn, min_size=0) as pool:
        store = PostgresStore(FaultyPool(pool, error), table=table)
        assert await store.claim("k", "print", "first", 60) is None
