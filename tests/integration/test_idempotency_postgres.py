"""PostgresStore on a real server: the conformance suite and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tarry.idempotency.postgres_store import PostgresStore
from tarry.idempotency.store import ExistingRecord, StoredResponse
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name
from tests.integration.claimants import SHARES, count_winners
from tests.integration.postgres import connected, with_store
from tests.integration.servers import Server, postgres_server

OK = StoredResponse(200, ((b"content-type", b"text/plain"),), b"done")


@pytest.fixture(scope="module")
def stoppable() -> Iterator[Server]:
    """Run a server that a test may restart."""
    with postgres_server() as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, postgres_dsn: str, table: str) -> None:
    """PostgresStore passes the conformance suite."""

    async def main() -> None:
        async with connected(postgres_dsn) as connection:
            store, twin = (PostgresStore(postgres_dsn, table=table) for _ in range(2))

            async def advance(seconds: float) -> None:
                # The clock of a database cannot be set: the records move into the past instead.
                past = f"UPDATE {table} SET free_at = free_at - make_interval(secs => $1)"  # noqa: S608
                await connection.execute(past, seconds)

            try:
                await case(StoreHarness(store, twin, advance))
            finally:
                await store.close()
                await twin.close()

    asyncio.run(main())


def test_lease_expires_by_the_clock_of_the_server(postgres_dsn: str, table: str) -> None:
    """A lease expires by the clock of the server."""

    async def test(store: PostgresStore) -> None:
        assert await store.claim("k", "print", "first", 0.05) is None
        answers: list[ExistingRecord | None] = []
        while not answers or answers[-1] is not None:
            answers.append(await store.claim("k", "print", "second", 60))
        assert all(0 < found.record.free_at - found.now <= 0.05 for found in answers if found)

    with_store(postgres_dsn, table, test)


def test_one_of_many_processes_wins(postgres_dsn: str, table: str) -> None:
    """Of 50 claims of one key from 3 processes, which also create the table, one gets the key."""
    assert (3, 50) == (len(SHARES), sum(SHARES))

    assert [0, 0, 1] == sorted(count_winners("postgres", postgres_dsn, table))


def test_restart_between_calls(stoppable: Server, table: str) -> None:
    """A claim from before a restart is finished after it, on a new connection."""

    async def test(store: PostgresStore) -> None:
        await store.claim("k", "print", "first", 60)
        # The loop stands still meanwhile, so that the pool does not notice.
        stoppable.restart()

        assert await store.finish("k", "print", "first", OK, 60)

        stoppable.restart()
        found = await store.claim("k", "print", "second", 60)
        assert found is not None
        assert OK == found.record.response

    with_store(stoppable.address, table, test)


def test_server_that_is_down(stoppable: Server, table: str) -> None:
    """A claim fails while the server is down, and the same store works when it is back."""

    async def test(store: PostgresStore) -> None:
        stoppable.stop()
        try:
            with pytest.raises(OSError, match=r"PGSQL|Connect|No such file"):
                await store.claim("k", "print", "first", 60)
        finally:
            stoppable.start()

        assert await store.claim("k", "print", "first", 60) is None

    with_store(stoppable.address, table, test)


def test_killed_connection(postgres_dsn: str, table: str) -> None:
    """A terminated connection is replaced, and its claim holds."""
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1"

    async def test(store: PostgresStore) -> None:
        await store.claim("k", "print", "first", 60)
        async with connected(postgres_dsn) as connection:
            assert 1 == len(await connection.fetch(kill, table))

        assert await store.extend("k", "print", "first", 60)
        assert await store.claim("k", "print", "second", 60) is not None

    with_store(f"{postgres_dsn}&application_name={table}", table, test)


def test_key_that_changes_owners_quickly(
    postgres_dsn: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is taken at the claim and free at the read, repeatedly, counts as taken."""

    async def test(store: PostgresStore) -> None:
        await store.claim("k", "print", "first", 60)
        monkeypatch.setattr(
            "tarry.idempotency.postgres_store._READ", "SELECT 1 FROM {table} WHERE key < $1"
        )

        found = await store.claim("k", "other", "second", 60)

        assert found is not None
        assert ("other", None, found.now) == (*found.record[::2], found.record.free_at)

    with_store(postgres_dsn, table, test)
