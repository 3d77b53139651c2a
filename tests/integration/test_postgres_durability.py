"""The store in PostgreSQL: what a call returns is on the disk, although its commit did not wait."""

from __future__ import annotations

from collections.abc import Awaitable

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.store import AddStatus, NewTask, Release
from tarry.service.stores.postgres.group_flush import FLUSH
from tests.integration.postgres import connected
from tests.integration.postgres_store import new_schema_url, open_store
from tests.service.stores.harness import LEASE, retry_result, success_result, task

_WRITTEN = "SELECT pg_current_wal_insert_lsn()::text"
_IS_FLUSHED = "SELECT pg_current_wal_flush_lsn() >= $1::text::pg_lsn"


async def test_results_are_durable_when_a_call_returns(postgres_dsn: str) -> None:
    """The log is flushed up to the transactions of additions, claims, results and releases."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        database, flush = store.database, store.database.flush
        written: list[str] = []

        async def record_and_flush(connection_number: int) -> None:
            written.append(await database.fetch_value(_WRITTEN))
            await flush(connection_number)

        database.flush = record_and_flush  # type: ignore[method-assign]

        async def is_durable(call: Awaitable[object]) -> bool:
            written.clear()
            await call
            return bool(await database.fetch_value(_IS_FLUSHED, *written))

        assert await is_durable(store.add([NewTask(task(n)) for n in range(3)]))
        leased = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        assert await is_durable(store.claim(LEASE, limit=2, per_lane=2))
        assert await is_durable(store.release([Release(leased[0])]))
        [again] = (await store.claim(LEASE, limit=3, per_lane=3)).tasks
        callback = task(9)
        assert await is_durable(store.finish([success_result(again, callback_task=callback)]))
        [leased_callback] = (await store.claim(LEASE, limit=3, per_lane=3)).tasks
        assert await is_durable(store.finish([retry_result(leased_callback, 0)]))


async def test_a_call_fails_if_the_server_ends_connections_before_the_flush(
    postgres_dsn: str,
) -> None:
    """After a crash or failover, the commit of a call may be lost: the call has to be repeated."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        database, flush = store.database, store.database.flush
        await store.add([NewTask(task(1))])

        async def lose_connections_and_flush(connection_number: int) -> None:
            async with connected(postgres_dsn) as connection:
                await connection.fetch(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
            await flush(connection_number)

        database.flush = lose_connections_and_flush  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await store.add([NewTask(task(2))])
        database.flush = flush  # type: ignore[method-assign]
        [result] = await store.add([NewTask(task(2))])
        assert AddStatus.EXISTING is result.status


async def test_a_flush_needs_no_privileges(postgres_dsn: str) -> None:
    """A role that owns nothing can flush."""
    async with connected(postgres_dsn) as connection, connection.transaction():
        await connection.execute("CREATE ROLE flusher")
        await connection.execute("SET LOCAL ROLE flusher")
        await connection.fetch(FLUSH)
        await connection.execute("RESET ROLE")
        await connection.execute("DROP ROLE flusher")


async def test_the_setting_of_the_connection_stays_on(postgres_dsn: str) -> None:
    """Commits are deferred for the four hot calls only; others of the connection wait for disk."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&pool_size=1") as store:
        await store.add([NewTask(task(1))])

        assert "on" == await store.database.fetch_value("SHOW synchronous_commit")
