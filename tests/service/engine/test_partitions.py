"""An engine over a store with two partitions, of which one hangs or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.model import Status
from tarry.service.store import (
    AddResult,
    ClaimResult,
    FinishStatus,
    LaneLimits,
    LeaseTerms,
    NewTask,
    RecordChange,
    Release,
    TaskResult,
)
from tarry.service.stores.write_queues import WriteQueues
from tests.service.engine.harness import EPOCH_S, OK, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceStore

REPLY_TIMEOUT_S = 3.5


class PartitionedStore(ReferenceStore):
    """A store in memory; the tenant `victim` is in partition 1, which may hang.

    Like the stores on servers, it has queues for each partition.
    """

    hangs = False

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._writes = WriteQueues(
            self.partition_of,
            add=self._add_group,
            finish=super().finish,
            release=super().release,
        )

    @property
    def partition_count(self) -> int:
        """There are two partitions."""
        return 2

    def partition_of(self, tenant: str) -> int:
        """Return the partition of a tenant."""
        return int(tenant == "victim")

    async def _reach(self, *partitions: int) -> None:
        if self.hangs and 1 in partitions:
            await asyncio.sleep(REPLY_TIMEOUT_S)
            error = StoreUnavailable("no reply in time")
            error.partition = 1
            raise error

    async def add(self, tasks: Sequence[NewTask], *args: Any, **options: Any) -> list[AddResult]:
        """Add tasks with those of other calls."""
        return await self._writes.add(tasks, *args, **options)

    async def _add_group(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None,
        quota: int | None,
        lane_quota: int | None,
    ) -> list[AddResult]:
        """Add tasks; those of a partition that hangs are not added."""
        await self._reach(*(self.partition_of(each.task.tenant) for each in tasks))
        return await super().add(tasks, terms, quota=quota, lane_quota=lane_quota)

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write results."""
        await self._reach(*(self.partition_of(each.task.tenant) for each in results))
        return await super().finish(results)

    async def list_lane_limits(self, limit: int, partition: int | None = None) -> list[LaneLimits]:
        """Return the limits of the lanes of a partition."""
        await self._reach(1 if partition is None else partition)
        limits = await super().list_lane_limits(limit)
        return [
            each
            for each in limits
            if partition in {None, self.partition_of(each.lane.partition("/")[0])}
        ]

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release leases."""
        await self._reach(*(self.partition_of(each.task.tenant) for each in releases))
        return await super().release(releases)

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Write records of lanes."""
        lanes = [change.owner for change in changes if "/" in change.owner]
        await self._reach(*(self.partition_of(lane.partition("/")[0]) for lane in lanes))
        return await super().write_records(changes)

    async def release_unknown_leases(
        self, terms: LeaseTerms, known_ids: Collection[str], partition: int | None = None
    ) -> int:
        """Release leases."""
        await self._reach(1 if partition is None else partition)
        return await super().release_unknown_leases(terms, known_ids)

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Lease tasks, except those of a partition that is skipped or hangs."""
        limits, error = dict(lane_limits), None
        if 1 in skip or self.hangs:
            limits["victim"] = 0
        if 1 not in skip and self.hangs:
            error = StoreUnavailable("no reply in time")
            error.partition = 1
        result = await super().claim(terms, limit=limit, per_lane=per_lane, lane_limits=limits)
        if error is not None:
            result.errors = {1: error}
        return result


def new_harness(target: FakeTarget) -> tuple[EngineHarness, PartitionedStore]:
    """Return an engine and its store."""
    loop = asyncio.get_running_loop()
    store = PartitionedStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    return EngineHarness(target, store=store), store


async def test_tasks_of_other_partitions_are_added_and_delivered() -> None:
    """They wait neither for the adds, nor for the results, nor for the leases of one that hangs."""
    harness, store = new_harness(FakeTarget())
    await harness.engine.start()
    await harness.add(harness.new_task(tenant="victim"))
    store.hangs = True
    loop = asyncio.get_running_loop()
    victim = asyncio.ensure_future(harness.engine.submit([harness.new_task(tenant="victim")]))
    for _ in range(20):
        started_at = loop.time()
        (task,) = await harness.add(harness.new_task())
        (later,) = await harness.add(harness.new_task(delay_ms=100))
        await asyncio.sleep(0.7)
        assert loop.time() - started_at < 1
        for each in (task, later):
            assert Status.SUCCEEDED is (await harness.get_task(each)).status
    with pytest.raises(StoreUnavailable):
        await victim
    failing = harness.context.health.failing.keys()
    assert {"store partition 1", "adding partition 1"} == failing

    store.hangs = False
    await asyncio.sleep(10)
    (task,) = await harness.add(harness.new_task(tenant="victim"))
    await asyncio.sleep(10)
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    assert "store partition 1" not in harness.context.health.failing
    await harness.engine.stop(1)


async def test_tasks_that_wait_for_a_partition_that_hangs_fail_with_the_first() -> None:
    """No POST waits for the timeout of a group before its own."""
    harness, store = new_harness(FakeTarget())
    await harness.engine.start()
    store.hangs = True
    loop = asyncio.get_running_loop()
    begin = loop.time()
    futures = []
    for _ in range(7):
        futures.append(harness.engine.submit([harness.new_task(tenant="victim")]))
        await asyncio.sleep(0.5)
    for future in futures:
        with pytest.raises(StoreUnavailable):
            await future
    assert loop.time() - begin < REPLY_TIMEOUT_S + 0.5
    store.hangs = False
    await harness.engine.stop(1)


async def test_a_partition_that_hangs_delays_one_claim() -> None:
    """Later claims do not wait for it, so that a backlog of the others is delivered as fast."""
    harness, store = new_harness(FakeTarget())
    store.hangs = True
    harness.engine.worker.leased_tasks.lost_replies[1] += 1
    await harness.engine.scheduler.run_once()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for _ in range(10):
        await harness.engine.scheduler.run_once()
    assert loop.time() - begin < 0.1
    store.hangs = False
    await asyncio.sleep(5)
    assert not harness.engine.worker.leased_tasks.lost_replies


async def test_partitions_that_hang_delay_maintenance_once() -> None:
    """The rates of lanes in several partitions are stored at the same time."""

    class ManyPartitions(ReferenceStore):
        """A store with eight partitions, of which all but the first hang."""

        partition_count = 8

        def partition_of(self, tenant: str) -> int:
            """Return the number in the name of a tenant."""
            return int(tenant.removeprefix("t"))

        async def record_lane_limits(self, limits: Sequence[LaneLimits]) -> None:
            """Store limits, which are of one partition."""
            [partition] = {self.partition_of(each.lane.partition("/")[0]) for each in limits}
            if partition:
                await asyncio.sleep(REPLY_TIMEOUT_S)
                error = StoreUnavailable("no reply in time")
                error.partition = partition
                raise error
            await super().record_lane_limits(limits)

    loop = asyncio.get_running_loop()
    store = ManyPartitions(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(FakeTarget(), store=store)
    harness.context.health.partition_count = 8
    for number in range(8):
        lane = harness.lanes[f"t{number}/http:a.example:80"]
        lane.downstream.limiter.restore(rate=50.0, limit=8)
    started_at = loop.time()
    await harness.engine.maintenance.store_limits()
    assert loop.time() - started_at == pytest.approx(REPLY_TIMEOUT_S)
    failing = {f"store partition {number}" for number in range(1, 8)}
    assert failing == harness.context.health.failing.keys()
    unstored = {each.lane.partition("/")[0] for each in harness.lanes.list_changed_limits()}
    assert {f"t{number}" for number in range(1, 8)} == unstored


async def test_a_partition_that_hangs_at_the_start_is_used_when_it_responds() -> None:
    """Its stored limits apply to its tasks, and its tasks are not leased before they are loaded."""
    target = FakeTarget()
    harness, store = new_harness(target)
    stored = harness.new_task(tenant="victim")
    await store.add([stored])
    await store.record_lane_limits([LaneLimits(stored.task.lane, 30.0, 4)])
    store.hangs = True
    await harness.engine.start()
    assert {"store partition 1"} <= harness.context.health.failing.keys()
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(1)
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    assert 1 == len(target.requests)

    store.hangs = False
    await asyncio.sleep(10)
    assert 2 == len(target.requests)
    assert 30.0 == harness.context.lanes[stored.task.lane].stored_rate
    assert not harness.context.health.failing
    await harness.engine.stop(1)


async def respond_slowly(request: DeliveryRequest) -> DeliveryResult:
    """Respond to requests for `/slow` after 20 s, and to others at once."""
    if request.url.endswith("/slow"):
        await asyncio.sleep(20)
    return OK


async def test_a_stop_does_not_wait_long_for_a_partition_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Attempts finish, and results of other partitions are stored; the leases of others expire."""
    harness, store = new_harness(FakeTarget(respond_slowly))
    await harness.engine.start()
    (slow,) = await harness.add(harness.new_task("http://a.example:80/slow"))
    (lost,) = await harness.add(harness.new_task(tenant="victim"))
    (waiting,) = await harness.add(harness.new_task(tenant="victim", delay_ms=900))
    store.hangs = True
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await harness.engine.stop(600)

    assert 20 < loop.time() - begin < 40
    assert Status.SUCCEEDED is (await harness.get_task(slow)).status
    for each in (lost, waiting):
        assert Status.IN_FLIGHT is (await harness.get_task(each)).status
    assert "results not stored at stop" in caplog.text
    assert "partition=1 count=1" in caplog.text


async def test_a_stop_waits_for_a_partition_that_responds_again() -> None:
    """A failover takes a few seconds; then the results are stored."""
    harness, store = new_harness(FakeTarget())
    await harness.engine.start()
    (finished,) = await harness.add(harness.new_task(tenant="victim"))
    store.hangs = True
    stopping = asyncio.ensure_future(harness.engine.stop(600))
    await asyncio.sleep(REPLY_TIMEOUT_S + 3)
    store.hangs = False
    await stopping
    assert Status.SUCCEEDED is (await harness.get_task(finished)).status
