"""The queues of a store on a server, which commits the calls that wait together."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tarry.service.defaults import MAX_TRANSACTION_TASKS
from tarry.service.group_commit import URGENT, AsyncGroupCommit, priority_of_new_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.store import (
        AddResult,
        FinishStatus,
        LeaseTerms,
        NewTask,
        Release,
        TaskResult,
    )

T = TypeVar("T")
R = TypeVar("R")

_MAX_GROUP_RESULTS = 2 * MAX_TRANSACTION_TASKS
"""With `MAX_TRANSACTION_TASKS`, results wait behind new tasks while batches arrive: the p99 of the
delay of retries was 390 to 550 ms instead of 125 ms."""
_get_tenant = attrgetter("task.tenant")


class WriteQueues:
    """The queues of `add`, `finish` and `release`, in each partition.

    The functions are called with the items of a group, which are in one partition, and have the
    other arguments of the methods here.
    """

    def __init__(
        self,
        partition_of: Callable[[str], int],
        *,
        add: Callable[..., Awaitable[list[AddResult]]],
        finish: Callable[[Sequence[TaskResult]], Awaitable[list[FinishStatus]]],
        release: Callable[[Sequence[Release]], Awaitable[list[FinishStatus]]],
    ) -> None:
        self._adds: _PartitionQueues[NewTask, AddResult] = _PartitionQueues(
            partition_of, add, MAX_TRANSACTION_TASKS
        )
        self._results: _PartitionQueues[TaskResult, FinishStatus] = _PartitionQueues(
            partition_of, finish, _MAX_GROUP_RESULTS
        )
        self._releases: _PartitionQueues[Release, FinishStatus] = _PartitionQueues(
            partition_of, release, MAX_TRANSACTION_TASKS
        )

    def add(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> Awaitable[list[AddResult]]:
        """Add tasks with those of other callers; see `Store.add`."""
        priority = priority_of_new_tasks(len(tasks))
        return self._adds.submit(tasks, terms, quota, lane_quota, priority=priority)

    def finish(self, results: Sequence[TaskResult]) -> Awaitable[list[FinishStatus]]:
        """Write results with those of other callers; see `Store.finish`."""
        return self._results.submit(results)

    def release(self, releases: Sequence[Release]) -> Awaitable[list[FinishStatus]]:
        """Release leases with those of other callers; see `Store.release`."""
        return self._releases.submit(releases)

    async def close(self) -> None:
        """Finish the calls of all callers, see `AsyncGroupCommit.close`."""
        for queues in (self._adds, self._results, self._releases):
            await queues.close()


class _PartitionQueues(Generic[T, R]):
    """The queue of one operation in each partition: one that hangs delays only its own calls."""

    def __init__(
        self,
        partition_of: Callable[[str], int],
        commit: Callable[..., Awaitable[list[R]]],
        max_items: int,
    ) -> None:
        self._partition_of = partition_of
        self._commit = commit
        self._max_items = max_items
        self._queues: dict[int, AsyncGroupCommit[T, R]] = {}

    def submit(
        self, items: Sequence[T], *arguments: Any, priority: int = URGENT
    ) -> asyncio.Future[list[R]]:
        """Commit items with one of the next groups; the future gets their results in order."""
        tenants = set(map(_get_tenant, items))
        if len(tenants) <= 1:  # also without items: then any partition will do
            partition = self._partition_of(tenants.pop()) if tenants else 0
            return self._queue(partition).submit(items, *arguments, priority=priority)
        positions: dict[int, list[int]] = {}
        for position, item in enumerate(items):
            partition = self._partition_of(_get_tenant(item))
            positions.setdefault(partition, []).append(position)
        parts = [
            self._queue(partition).submit(
                [items[position] for position in in_partition], *arguments, priority=priority
            )
            for partition, in_partition in positions.items()
        ]
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            part.add_done_callback(_retrieve_error)
        return asyncio.ensure_future(_join(list(positions.values()), parts))

    def _queue(self, partition: int) -> AsyncGroupCommit[T, R]:
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = AsyncGroupCommit[T, R](
                self._commit, max_items=self._max_items
            )
        return queue

    async def close(self) -> None:
        """Finish the calls of all callers."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            await queue.close()


def _retrieve_error(part: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an error: the caller gets only one of them, if any."""
    if not part.cancelled():
        part.exception()


async def _join(
    positions: Sequence[Sequence[int]], parts: Sequence[asyncio.Future[list[R]]]
) -> list[R]:
    """Return the results of the parts at their positions; raise an error when all have ended."""
    await asyncio.wait(parts)
    results: dict[int, R] = {}
    for in_partition, part in zip(positions, parts, strict=True):
        results.update(zip(in_partition, part.result(), strict=True))
    return [results[position] for position in range(len(results))]
