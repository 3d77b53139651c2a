"""The store in PostgreSQL: transactions of several processes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from tarry.service.model import PolicyVersion
from tarry.service.store import AddStatus, FinishStatus, LaneWriteStatus, NewTask, Retention
from tarry.service.stores.postgres import PostgresTaskStore, live_tasks
from tarry.service.stores.postgres.constants import QUOTA_LOCK
from tarry.service.stores.postgres.database import Transaction
from tests.integration.postgres_store import new_schema_url, open_store
from tests.service.stores.harness import (
    DAY_MS,
    LANE,
    LEASE,
    SECOND_MS,
    ManualClock,
    exhausted_result,
    success_result,
    task,
    task_numbers,
)

RETENTION = Retention(succeeded_ms=7 * DAY_MS, exhausted_ms=30 * DAY_MS)
LOCK_TIMEOUT = "SET LOCAL lock_timeout = '300ms'"


@asynccontextmanager
async def transaction(store: PostgresTaskStore) -> AsyncGenerator[Transaction]:
    """Open a transaction of another process; it is committed at the end."""
    connection = await import_module("asyncpg").connect(store.database.options.dsn)
    try:
        async with connection.transaction():
            yield Transaction(connection, store.database)
    finally:
        await connection.close()


async def add_in(tx: Transaction, *new_tasks: NewTask) -> None:
    """Add tasks in a transaction."""
    arguments = live_tasks._add_arguments(new_tasks, None, None, None, ManualClock().now)
    await live_tasks._call_add(tx.fetch, arguments)


async def start(tx: Transaction, call: Awaitable[Any]) -> asyncio.Future[Any]:
    """Start a call of the store, and return when it waits for the transaction, or has ended."""
    started = asyncio.ensure_future(call)
    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    while not started.done() and not await tx.fetch_value(blocked):
        await asyncio.wait([started], timeout=0.01)
    return started


def advance(store: PostgresTaskStore, ms: int) -> None:
    """Advance the clock of a store."""
    assert isinstance(store.database.clock, ManualClock)
    store.database.clock.advance(ms)


async def test_a_claim_does_not_hide_a_task_that_is_being_added(postgres_dsn: str) -> None:
    """A claim that finds nothing leaves the check time that a concurrent addition has set."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await store.add([NewTask(task(1), delay_ms=10 * SECOND_MS)])
        await store.cancel("acme", task(1).id)
        advance(store, 10 * SECOND_MS)
        async with transaction(store) as tx:
            await add_in(tx, NewTask(task(2)))
            claim = await start(tx, store.claim(LEASE, limit=10, per_lane=10))
        assert [] == (await claim).tasks

        claimed = await store.claim(LEASE, limit=10, per_lane=10)

        assert [2] == task_numbers(claimed.tasks)


async def test_a_task_is_stored_if_its_lane_is_removed_meanwhile(postgres_dsn: str) -> None:
    """A task whose unused lane is removed while the task is being added gets a new lane."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await store.pause(LANE)
        await store.resume(LANE)
        async with transaction(store) as tx:
            tenant = await tx.fetch_value("SELECT id FROM tarry.tenant WHERE name = 'acme'")
            await tx.fetch("SELECT pg_advisory_xact_lock($1, $2)", QUOTA_LOCK, tenant)
            addition = await start(tx, store.add([NewTask(task(1))], quota=1))
            await store.sweep(RETENTION, 100)
            assert await store.get_lane(LANE) is None
        [added] = await addition

        assert AddStatus.ADDED is added.status
        claimed = await store.claim(LEASE, limit=10, per_lane=10)
        assert [1] == task_numbers(claimed.tasks)


async def test_a_sweep_keeps_a_policy_of_a_task_that_is_being_added(postgres_dsn: str) -> None:
    """A sweep does not remove the record of a deleted policy, or a replaced version, in use."""

    async def sweep_during_addition(store: PostgresTaskStore, policy: str, new: NewTask) -> None:
        for document in (b"1", b"2"):
            version = PolicyVersion(tenant="acme", id=policy, version=0, document=document)
            await store.put_policy(version, replace=True)
        if policy == "deleted":
            await store.delete_policy("acme", policy)
        advance(store, 2 * DAY_MS)
        async with transaction(store) as tx:
            await add_in(tx, new)
            sweep = await start(tx, store.sweep(RETENTION, 100))
        await sweep

    async with open_store(new_schema_url(postgres_dsn)) as store:
        await sweep_during_addition(store, "deleted", NewTask(task(1, policy_id="deleted")))
        referring = NewTask(task(2, policy_id="replaced", policy_version=1))
        await sweep_during_addition(store, "replaced", referring)

        claimed = await store.claim(LEASE, limit=10, per_lane=10)

        assert [1, 2] == sorted(task_numbers(claimed.tasks))
        assert await store.get_policy("acme", "replaced", 1) is not None


async def test_a_sweep_keeps_a_lane_that_is_being_paused(postgres_dsn: str) -> None:
    """A sweep does not remove an unused lane between the two statements of a pause."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await store.pause(LANE)
        await store.resume(LANE)
        async with transaction(store) as tx:
            await tx.fetch("SELECT tarry.lane_1($1, NULL)", LANE)
            await store.sweep(RETENTION, 100)

        assert await store.get_lane(LANE) is not None


async def test_results_with_callbacks_lock_lanes_before_tenants(postgres_dsn: str) -> None:
    """A result with a callback task waits for the callback's lane without locking the tenant."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        callback = task(2, host="b")
        added = await store.add(
            [NewTask(task(1), lease_on_add=True), NewTask(task(3, host="b"))], LEASE
        )
        async with transaction(store) as tx:
            await tx.fetch("SELECT 1 FROM tarry.lane WHERE name = $1 FOR UPDATE", callback.lane)
            result = success_result(added[0].task, callback_task=callback)
            finish = await start(tx, store.finish([result]))
            await tx.fetch(LOCK_TIMEOUT)
            await tx.fetch("SELECT 1 FROM tarry.tenant FOR UPDATE")
        assert [FinishStatus.APPLIED] == await finish


async def test_results_with_callbacks_create_lanes_before_locks(postgres_dsn: str) -> None:
    """A result waits for another process that creates the callback's lane, and locks nothing."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        callback = task(2, host="b")
        [added] = await store.add([NewTask(task(1), lease_on_add=True)], LEASE)
        async with transaction(store) as tx:
            create = "INSERT INTO tarry.lane (tenant, name) SELECT id, $1 FROM tarry.tenant"
            await tx.fetch(create, callback.lane)
            result = success_result(added.task, callback_task=callback)
            finish = await start(tx, store.finish([result]))
            await tx.fetch(LOCK_TIMEOUT)
            await tx.fetch("SELECT 1 FROM tarry.lane FOR UPDATE")
            await tx.fetch("UPDATE tarry.tenant SET lanes = lanes + 1")
        assert [FinishStatus.APPLIED] == await finish

        await store.finish([success_result(added.task, callback_task=task(3, host="c"))])
        [leased] = (await store.claim(LEASE, limit=10, per_lane=10)).tasks
        await store.finish([success_result(leased, callback_task=task(3, host="c"))])
        assert 3 == len((await store.list_lanes("acme")).items)
        assert 3 == await store.database.fetch_value("SELECT lanes FROM tarry.tenant")


async def test_a_pause_and_a_change_of_limits_lock_in_the_same_order(postgres_dsn: str) -> None:
    """A pause that waits for a change of limits has not locked the lane."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await store.add([NewTask(task(1))])
        for change in (store.pause, store.resume):
            async with transaction(store) as tx:
                await tx.fetch("SELECT 1 FROM tarry.meta WHERE name = 'limits_version' FOR UPDATE")
                changed = await start(tx, change(LANE))
                await tx.fetch(LOCK_TIMEOUT)
                await tx.fetch("SELECT 1 FROM tarry.lane WHERE name = $1 FOR UPDATE", LANE)
            assert await changed in {LaneWriteStatus.CHANGED, None}


async def test_batches_insert_keys_in_the_same_order(postgres_dsn: str) -> None:
    """A batch that waits for the key of one tenant has not inserted keys of later tenants."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await store.add([NewTask(task(1))])
        await store.add([NewTask(task(2, tenant="beta"))])
        batch = [NewTask(task(3, tenant="beta")), NewTask(task(4))]
        async with transaction(store) as tx:
            await add_in(tx, batch[1])
            addition = await start(tx, store.add(batch))
            await tx.fetch(LOCK_TIMEOUT)
            await add_in(tx, batch[0])
        assert [AddStatus.EXISTING] * 2 == [result.status for result in await addition]


async def test_versions_of_policies_are_locked_after_lanes(postgres_dsn: str) -> None:
    """An addition or deletion that waits for a lane has not locked the version of the policy."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        version = PolicyVersion(tenant="acme", id="webhook", version=0, document=b"1")
        await store.put_policy(version, replace=True)
        first, second = (task(n, policy_id="webhook", policy_version=1) for n in (1, 2))
        [added] = await store.add([NewTask(first, lease_on_add=True)], LEASE)
        await store.finish([exhausted_result(added.task)])
        for change in (store.add([NewTask(second)]), store.delete_dead_letters("acme", [first.id])):
            async with transaction(store) as tx:
                await tx.fetch("SELECT 1 FROM tarry.lane WHERE name = $1 FOR UPDATE", LANE)
                changed = await start(tx, change)
                await tx.fetch(LOCK_TIMEOUT)
                await tx.fetch("SELECT 1 FROM tarry.policy FOR UPDATE")
            await changed

        tasks_by_version = "SELECT tasks FROM tarry.policy"
        assert 1 == await store.database.fetch_value(tasks_by_version)


async def test_a_task_that_replaces_a_cancelled_one_locks_lanes_before_tenants(
    postgres_dsn: str,
) -> None:
    """A batch that waits for a lane has not locked the tenant for the task that it replaces."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        await store.add([NewTask(task(1, key="k")), NewTask(task(2, host="b"))])
        await store.cancel("acme", task(1).id)
        batch = [NewTask(task(3, key="k")), NewTask(task(4, host="b"))]
        async with transaction(store) as tx:
            await tx.fetch("SELECT 1 FROM tarry.lane WHERE name = $1 FOR UPDATE", task(2, "b").lane)
            addition = await start(tx, store.add(batch))
            await tx.fetch(LOCK_TIMEOUT)
            await tx.fetch("SELECT 1 FROM tarry.tenant FOR UPDATE")
        assert [AddStatus.ADDED] * 2 == [result.status for result in await addition]


async def test_a_resumed_lane_is_found_if_its_tenant_falls_asleep_meanwhile(
    postgres_dsn: str,
) -> None:
    """Tasks of a lane that is resumed are claimed, although a claim puts the tenant to sleep."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        resumed = task(3, host="b")
        await store.pause(resumed.lane)
        await store.add([NewTask(task(1)), NewTask(task(2)), NewTask(resumed)])
        await store.claim(LEASE, limit=1, per_lane=1)  # the tenant stays ready
        async with transaction(store) as tx:
            await tx.fetch("SELECT 1 FROM tarry.lane WHERE name = $1 FOR UPDATE", resumed.lane)
            resumption = await start(tx, store.resume(resumed.lane))
            claimed = await store.claim(LEASE, limit=10, per_lane=10)
            assert [2] == task_numbers(claimed.tasks)
        await resumption

        claimed = await store.claim(LEASE, limit=10, per_lane=10)

        assert [3] == task_numbers(claimed.tasks)
