"""The store in PostgreSQL: several processes, failures of the server, and unusual text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import PolicyVersion, Status
from tarry.service.store import (
    AddStatus,
    FinishStatus,
    LeaseTerms,
    NewTask,
    PolicyWriteStatus,
    StoredTaskFilter,
)
from tarry.service.stores.postgres import PostgresTaskStore, database
from tests.integration.postgres import connected
from tests.integration.postgres_store import new_schema_url, open_store
from tests.integration.servers import postgres_server
from tests.service.stores.harness import (
    LANE,
    LEASE,
    ManualClock,
    exhausted_result,
    retry_result,
    success_result,
    task,
)

WORKER_COUNT = 4


def run_on_stores(
    url: str, count: int, main: Callable[[list[PostgresTaskStore]], Awaitable[None]]
) -> None:
    """Run a coroutine function with several stores over the same data, opened at the same time."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            stores = [PostgresTaskStore(f"{url}&pool_size=4") for _ in range(count)]
            for store in stores:
                stack.push_async_callback(store.close)
            await asyncio.gather(*(store.open() for store in stores))
            await main(stores)

    asyncio.run(run())


def test_several_processes_create_the_tables_at_once(postgres_dsn: str) -> None:
    """Processes that start at the same time wait for each other."""

    async def main(stores: list[PostgresTaskStore]) -> None:
        assert 4 == len({store._leader_token for store in stores})
        leaders = [await store.try_lead() for store in stores]
        assert 1 == sum(leaders)

    run_on_stores(new_schema_url(postgres_dsn), 4, main)


def test_each_task_is_leased_once(postgres_dsn: str) -> None:
    """Workers that add, claim and finish at the same time share the tasks; the counters match."""

    async def main(stores: list[PostgresTaskStore]) -> None:
        leased_ids: list[str] = []

        async def add(index: int) -> None:
            for begin in range(0, 100, 10):
                numbers = range(1000 * index + begin, 1000 * index + begin + 10)
                await stores[index].add([NewTask(task(n, f"h{n % 3}"), 0) for n in numbers])

        async def work(index: int) -> None:
            store, terms = stores[index], LeaseTerms(f"worker {index}", 30_000, 1000)
            while len(leased_ids) < 100 * WORKER_COUNT:
                claimed = await store.claim(terms, limit=7, per_lane=5)
                leased_ids.extend(found.id for found in claimed.tasks)
                results = [
                    success_result(found) if number % 2 else exhausted_result(found)
                    for number, found in enumerate(claimed.tasks)
                ]
                assert {FinishStatus.APPLIED} >= set(await store.finish(results))

        indexes = range(WORKER_COUNT)
        await asyncio.gather(*map(add, indexes), *map(work, indexes))

        assert len(leased_ids) == len(set(leased_ids)) == 100 * WORKER_COUNT
        counters = await stores[0].counters()
        counts = counters.task_counts
        assert (0, 0) == (counts[Status.PENDING], counts[Status.IN_FLIGHT])
        assert 100 * WORKER_COUNT == counts[Status.SUCCEEDED] + counts[Status.EXHAUSTED]
        listed = await stores[0].count_tasks("acme", StoredTaskFilter(status=Status.EXHAUSTED))
        assert (
            counts[Status.EXHAUSTED]
            == listed
            == sum(lane.exhausted for lane in counters.busiest_lanes)
        )
        assert counters.superseded_count == 0

    run_on_stores(new_schema_url(postgres_dsn), WORKER_COUNT, main)


def test_quotas_hold_across_processes(postgres_dsn: str) -> None:
    """Processes that add at the same time do not exceed the quotas of tasks and lanes together."""

    async def main(stores: list[PostgresTaskStore]) -> None:
        async def add(index: int) -> list[AddStatus]:
            statuses: list[AddStatus] = []
            for begin in range(0, 40, 4):
                numbers = range(1000 * index + begin, 1000 * index + begin + 4)
                new = [NewTask(task(n, f"h{index}-{n % 5}"), 0) for n in numbers]
                results = await stores[index].add(new, quota=50, lane_quota=10)
                statuses += [result.status for result in results]
            return statuses

        batches = await asyncio.gather(*map(add, range(WORKER_COUNT)))
        statuses = [status for batch in batches for status in batch]

        assert 40 * WORKER_COUNT == len(statuses)
        counts = (await stores[0].counters()).task_counts
        assert 50 == statuses.count(AddStatus.ADDED) == counts[Status.PENDING]
        assert len((await stores[0].list_lanes("acme")).items) <= 10

    run_on_stores(new_schema_url(postgres_dsn), WORKER_COUNT, main)


def test_another_process_is_woken(postgres_dsn: str) -> None:
    """A process that listens is woken by a task that another process has added, not by its own."""

    async def main(stores: list[PostgresTaskStore]) -> None:
        woken = [asyncio.Event(), asyncio.Event()]
        for store, event in zip(stores, woken, strict=True):
            store.listen(event.set)
        for event in woken:
            await event.wait()  # when listening has begun
            event.clear()

        await stores[0].add([NewTask(task(1), 0)])

        await woken[1].wait()
        assert not woken[0].is_set()
        await stores[0].add([NewTask(task(2), 0, lease_on_add=True)], LEASE)
        assert stores[0]._notifications._is_due is False

    run_on_stores(new_schema_url(postgres_dsn), 2, main)


async def test_text_from_outside_is_stored_unchanged(postgres_dsn: str) -> None:
    """NUL and other control characters, quotes and any Unicode text are returned as given."""
    text = "a\0b\x1a'\"\\%_$1 ü\U0001f600\x1a0"

    async with open_store(new_schema_url(postgres_dsn)) as store:
        new = task(1, key=text, policy_id=text, owned_body_ref=text, lane=f"acme/{text}")
        [added] = await store.add([NewTask(new, lease_on_add=True)], LeaseTerms(text, 1000, 1000))
        assert added.leased
        [existing] = await store.add([NewTask(new)])
        assert (AddStatus.EXISTING, text) == (existing.status, existing.task.worker)
        [status] = await store.finish([exhausted_result(added.task, text)])
        assert FinishStatus.APPLIED is status
        query = StoredTaskFilter(key=text, reason=text, lane=new.lane, policy_id=text)
        [found] = (await store.list_tasks("acme", query)).items
        assert (text, text, text, new.lane) == (
            found.key,
            found.reason,
            found.owned_body_ref,
            found.lane,
        )
        policy = PolicyVersion(tenant=text, id=text, version=0, document=b"\0")
        written, _ = await store.put_policy(policy, replace=False)
        assert PolicyWriteStatus.CREATED is written
        [listed] = (await store.list_policies(text)).items
        assert (text, text) == (listed.tenant, listed.id)
        assert new.lane in {lane.name for lane in (await store.list_lanes("acme")).items}


async def test_the_store_works_without_prepared_statements(postgres_dsn: str) -> None:
    """With `statement_cache=off`, no statement and no lock is left in the connection."""
    async with open_store(
        f"{new_schema_url(postgres_dsn)}&statement_cache=off&pool_size=1"
    ) as store:
        [added] = await store.add([NewTask(task(1), lease_on_add=True)], LEASE)
        await store.finish([retry_result(added.task, 0)])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        await store.park(LANE, leased.wake_at, probes=1, consecutive_opens=1)
        async with connected(postgres_dsn) as connection:
            prepared = "SELECT count(*) FROM pg_prepared_statements"
            assert 0 == await store.database.fetch_value(prepared)
            assert 0 == await connection.fetchval(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
            )


async def test_a_long_transaction_of_another_client_does_not_stop_the_store(
    postgres_dsn: str,
) -> None:
    """Calls continue while another client has an open transaction that has read the tables."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        clock = store.database.clock
        assert isinstance(clock, ManualClock)
        async with connected(postgres_dsn) as other:
            transaction = other.transaction(isolation="repeatable_read")
            await transaction.start()
            for table in ("live", "lane", "tenant", "content"):
                await other.fetch(store.database.sql("TABLE tarry." + table))
            for number in range(20):
                await store.add([NewTask(task(number))])
                [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
                await store.finish([success_result(leased)])
            assert 20 == (await store.counters()).task_counts[Status.SUCCEEDED]
            await transaction.rollback()


async def test_a_database_that_does_not_exist_is_a_configuration_error(postgres_dsn: str) -> None:
    """The error names the server, and not the password."""
    url = postgres_dsn.replace("postgres@/postgres", "postgres:s3cret@/missing")

    store = PostgresTaskStore(url)
    with pytest.raises(ConfigurationError, match='database "missing" does not exist') as caught:
        await store.open()
    assert "s3cret" not in str(caught.value)
    await store.close()


async def test_the_store_reconnects_after_a_restart_of_the_server() -> None:
    """While the server is down, every call raises StoreUnavailable; afterwards calls succeed."""
    with postgres_server() as server:
        store = PostgresTaskStore(server.address)
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.ping()
        await store.open()
        woken = asyncio.Event()
        store.listen(woken.set)
        await woken.wait()
        woken.clear()
        [added] = await store.add([NewTask(task(1), 0, lease_on_add=True)], LEASE)
        server.stop()
        for call in (store.ping, lambda: store.claim(LEASE, limit=1, per_lane=1)):
            with pytest.raises(StoreUnavailable):
                await call()
        server.start()

        [status] = await store.finish([success_result(added.task)])
        assert FinishStatus.APPLIED is status
        await woken.wait()  # listens again
        await store.close()


@pytest.mark.parametrize("iteration", range(1, 4))
async def test_a_store_closes_while_its_listener_loses_its_connection(
    postgres_dsn: str, iteration: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener ends although its connection is closed when it is cancelled."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        connections: list[Any] = []
        connect, woken = store.database.connect, asyncio.Event()

        async def connect_listener() -> Any:
            connections.append(await connect())
            return connections[-1]

        monkeypatch.setattr(store.database, "connect", connect_listener)
        store.listen(woken.set)
        await woken.wait()
        connections[0].terminate()
        for _ in range(iteration):
            await asyncio.sleep(0)
        await store.close()


async def test_a_server_that_is_away_at_the_start_is_unavailable(postgres_dsn: str) -> None:
    """Opening a store fails with StoreUnavailable if there is no server."""
    store = PostgresTaskStore(postgres_dsn.partition("?")[0] + "?host=/nowhere")
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()


async def test_a_server_that_does_not_respond_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call ends after its timeout, and calls succeed again when the server responds."""
    monkeypatch.setattr(database, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", 0.3)

    with postgres_server() as server:
        store = PostgresTaskStore(server.address)
        await store.open()
        with server.suspended():
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await store.ping()
        for _ in range(20):
            try:
                await store.ping()
            except StoreUnavailable:  # a machine under load
                continue
            break
        assert await store.ping() > 0
        await store.close()
