"""PostgresStore with a real server: the conformance suite, and failures of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tarry.idempotency.postgres_store import PostgresStore
from tarry.idempotency.store import ExistingRecord, StoredResponse
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name
from tests.integration.claimants import CLAIMS_PER_PROCESS, count_winners
from tests.integration.postgres import asyncpg, connected, open_store
from tests.integration.postgres_parameters import find_wrong_parameters
from tests.integration.servers import Server, postgres_server

OK = StoredResponse(200, ((b"content-type", b"text/plain"),), b"done")


@pytest.fixture(scope="module")
def restartable_server() -> Iterator[Server]:
    """Run a server that a test may restart."""
    with postgres_server() as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=case_name)
async def test_conformance(case: Case, shadowed_dsn: str, table: str) -> None:
    """PostgresStore passes the conformance suite, and calls only built-in functions.

    Its arguments have exactly the types that PostgreSQL infers.
    """
    queries: list[Any] = []

    async def log_queries(connection: Any) -> None:
        connection.add_query_logger(queries.append)

    async with (
        connected(shadowed_dsn) as connection,
        asyncpg.create_pool(shadowed_dsn, min_size=0, init=log_queries) as pool,
    ):
        store = PostgresStore(pool, table=table)
        twin = PostgresStore(shadowed_dsn, table=table)

        async def advance(seconds: float) -> None:
            # The clock of a database cannot be set, so the records are moved into the past.
            move_to_past = f"UPDATE {table} SET free_at = free_at - $1 * interval '1 s'"  # noqa: S608
            await connection.execute(move_to_past, seconds)

        try:
            await case(StoreHarness(store, twin, advance))
        finally:
            await store.close()
            await twin.close()
    statements = [(query.query, query.args) for query in queries if query.exception is None]
    assert statements
    assert [] == await find_wrong_parameters(shadowed_dsn, statements)


async def test_lease_expires_by_the_clock_of_the_server(postgres_dsn: str, table: str) -> None:
    """A second claim gets the key when the lease of the first has expired on the server."""
    async with open_store(postgres_dsn, table) as store:
        assert await store.claim("k", "print", "first", 0.05) is None
        claims: list[ExistingRecord | None] = []
        while not claims or claims[-1] is not None:
            claims.append(await store.claim("k", "print", "second", 60))
        assert all(
            0 < existing.record.free_at - existing.now <= 0.05 for existing in claims if existing
        )


def test_one_of_many_processes_gets_the_key(postgres_dsn: str, table: str) -> None:
    """One of 50 claims from 3 processes, which also create the table, gets the key."""
    assert (3, 50) == (len(CLAIMS_PER_PROCESS), sum(CLAIMS_PER_PROCESS))

    assert [0, 0, 1] == sorted(count_winners("postgres", postgres_dsn, table))


async def test_store_reconnects_after_a_restart(restartable_server: Server, table: str) -> None:
    """A claim from before a restart can be finished after it, on a new connection."""
    async with open_store(restartable_server.address, table) as store:
        await store.claim("k", "print", "first", 60)
        # This blocks the event loop, so the pool does not notice the closed connection.
        restartable_server.restart()

        assert await store.finish("k", "print", "first", OK, 60)

        restartable_server.restart()
        existing = await store.claim("k", "print", "second", 60)
        assert existing is not None
        assert OK == existing.record.response


async def test_claim_fails_while_the_server_is_down(restartable_server: Server, table: str) -> None:
    """A claim raises OSError while the server is down, and succeeds after the start."""
    async with open_store(restartable_server.address, table) as store:
        restartable_server.stop()
        try:
            with pytest.raises(OSError, match=r"PGSQL|Connect|No such file"):
                await store.claim("k", "print", "first", 60)
        finally:
            restartable_server.start()

        assert await store.claim("k", "print", "first", 60) is None


async def test_terminated_connection_is_replaced(postgres_dsn: str, table: str) -> None:
    """A claim stays valid when the connection that made it is terminated."""
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1"

    async with open_store(f"{postgres_dsn}&application_name={table}", table) as store:
        await store.claim("k", "print", "first", 60)
        async with connected(postgres_dsn) as connection:
            assert 1 == len(await connection.fetch(kill, table))

        assert await store.extend("k", "print", "first", 60)
        assert await store.claim("k", "print", "second", 60) is not None


async def test_key_that_is_freed_during_a_claim_counts_as_taken(
    postgres_dsn: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is always taken at the insert and free at the read is reported as taken."""
    async with open_store(postgres_dsn, table) as store:
        await store.claim("k", "print", "first", 60)
        monkeypatch.setattr(
            "tarry.idempotency.postgres_store._READ", "SELECT 1 FROM {table} WHERE key < $1"
        )

        existing = await store.claim("k", "other", "second", 60)

        assert existing is not None
        assert ("other", None, existing.now) == (*existing.record[::2], existing.record.free_at)
