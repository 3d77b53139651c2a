"""The queues of stores on servers: one for each operation in each partition."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.store import AddResult, AddStatus, FinishStatus, LeaseTerms, NewTask, Release
from tarry.service.stores.write_queues import WriteQueues
from tests.service.stores.harness import LEASE, task


class FakePartitions:
    """A store with two partitions; the tenant `victim` is in partition 1, which may hang."""

    def __init__(self) -> None:
        self.added: list[list[str]] = []
        self.options: set[tuple[LeaseTerms | None, int | None, int | None]] = set()
        self.may_continue = asyncio.Event()
        self.error: Exception | None = None
        self.queues = WriteQueues(
            self.partition_of, add=self._add, finish=self._finish, release=self._finish
        )

    def partition_of(self, tenant: str) -> int:
        """Return the partition of a tenant."""
        return int(tenant == "victim")

    async def _add(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None,
        quota: int | None,
        lane_quota: int | None,
    ) -> list[AddResult]:
        self.added.append([new.task.tenant for new in tasks])
        self.options.add((terms, quota, lane_quota))
        if tasks and tasks[0].task.tenant == "victim":
            await self.may_continue.wait()
            if self.error is not None:
                raise self.error
        return [AddResult(AddStatus.ADDED, new.task) for new in tasks]

    async def _finish(self, items: Sequence[object]) -> list[FinishStatus]:
        return [FinishStatus.APPLIED for _ in items]


async def test_calls_that_wait_share_a_call_of_their_partition() -> None:
    """A partition that hangs delays only its own calls."""
    partitions = FakePartitions()
    queues = partitions.queues
    tenants = ("acme", "victim", "other", "victim")
    writes = [
        asyncio.ensure_future(
            queues.add([NewTask(task(n, tenant=tenant))], LEASE, quota=5, lane_quota=6)
        )
        for n, tenant in enumerate(tenants)
    ]
    await asyncio.wait([writes[0], writes[2]])
    assert [True, False, True, False] == [write.done() for write in writes]
    assert [["acme", "other"], ["victim", "victim"]] == partitions.added
    assert {(LEASE, 5, 6)} == partitions.options
    partitions.may_continue.set()
    results = await asyncio.gather(*writes)
    assert list(tenants) == [added.task.tenant for [added] in results]


async def test_batch_of_several_partitions_keeps_its_order() -> None:
    """The results have the order of the batch; an error of one partition fails the batch."""
    partitions = FakePartitions()
    partitions.may_continue.set()
    tenants = ["acme", "victim", "other", "victim", "acme"]
    batch = [NewTask(task(n, tenant=tenant)) for n, tenant in enumerate(tenants)]
    results = await partitions.queues.add(batch)
    assert batch == [NewTask(result.task) for result in results]
    assert [["acme", "other", "acme"], ["victim", "victim"]] == partitions.added
    partitions.error = StoreUnavailable("no reply in time")
    with pytest.raises(StoreUnavailable):
        await partitions.queues.add(batch)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_errors_of_several_partitions_are_not_logged(is_cancelled: bool) -> None:
    """The caller gets one of them, or none if it was cancelled; asyncio reports no other one."""

    async def fail(*_arguments: object) -> list[Any]:
        raise StoreUnavailable("no reply in time")

    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    partition_of = FakePartitions().partition_of
    queues = WriteQueues(partition_of, add=fail, finish=fail, release=fail)
    batch = [NewTask(task(n, tenant=tenant)) for n, tenant in enumerate(("acme", "victim"))]
    write = asyncio.ensure_future(queues.add(batch))
    await asyncio.sleep(0)
    if is_cancelled:
        write.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else StoreUnavailable):
        await write
    await queues.close()
    del write, queues
    await asyncio.sleep(0.01)  # until no task refers to the errors
    gc.collect()
    assert [] == reports


async def test_empty_batches_have_no_results() -> None:
    """A batch without items needs no tenant."""
    queues = FakePartitions().queues
    assert [] == await queues.add([])
    assert [] == await queues.finish([])
    assert [] == await queues.release([])


async def test_close_waits_for_calls() -> None:
    """Calls of all partitions have their results, and the queues can be used again."""
    partitions = FakePartitions()
    queues = partitions.queues
    write = asyncio.ensure_future(queues.add([NewTask(task(1, tenant="victim"))]))
    closing = asyncio.ensure_future(queues.close())
    await asyncio.sleep(0.01)
    assert (False, False) == (closing.done(), write.done())
    partitions.may_continue.set()
    await closing
    assert write.done()
    assert [FinishStatus.APPLIED] == await queues.release([Release(task(1))])
