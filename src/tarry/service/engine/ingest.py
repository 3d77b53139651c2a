"""Ingest: writes new tasks in groups, and passes them straight to the worker if it has capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tarry.errors import StoreUnavailable
from tarry.service.group_commit import AsyncGroupCommit
from tarry.service.store import AddResult, AddStatus

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.reporting import Reporter
    from tarry.service.engine.scheduler import Scheduler
    from tarry.service.engine.worker import Worker
    from tarry.service.model import Task, TaskContent
    from tarry.service.store import NewTask

_MAX_GROUP_ITEMS = 64
"""Small, because results are written between two groups: a large batch must not delay retries."""
_Item: TypeAlias = "tuple[NewTask, TaskContent | None]"


class Ingest:
    """Adds tasks to the store, and leases those that the worker can start at once."""

    def __init__(
        self, context: EngineContext, worker: Worker, scheduler: Scheduler, reporter: Reporter
    ) -> None:
        self._context = context
        self._worker = worker
        self._scheduler = scheduler
        self._reporter = reporter
        self._commits: AsyncGroupCommit[_Item, AddResult] = AsyncGroupCommit(
            self._add, max_items=_MAX_GROUP_ITEMS, max_pending=context.limits.ingest
        )
        self._is_stopping = False

    def submit(
        self, new_tasks: list[NewTask], contents: Sequence[TaskContent] | None = None
    ) -> asyncio.Future[Sequence[AddResult]]:
        """Add tasks; they are durable when the future is done.

        `contents` are the unpacked contents of the tasks. A caller that has them saves the worker
        the unpacking. The tasks are added even if the caller is cancelled. Raises
        `Overloaded` if too many tasks wait to be written.
        """
        # Tasks that wait to be written are subtracted, so that each slot is promised only once.
        free_slots = 0
        if not self._is_stopping:
            free_slots = self._worker.leased_tasks.free_slots - self._commits.pending
        can_lease: dict[str, bool] = {}
        for new in new_tasks:
            if free_slots <= 0:
                break
            lane = new.task.lane
            if lane not in can_lease:
                can_lease[lane] = self._can_lease(lane)
            if can_lease[lane]:
                new.lease_on_add = True
                free_slots -= 1
        contents_or_none: Sequence[TaskContent | None] = contents or [None] * len(new_tasks)
        return self._commits.submit(list(zip(new_tasks, contents_or_none, strict=True)))

    def _can_lease(self, lane_name: str) -> bool:
        lane = self._context.lanes.get(lane_name)
        max_leased = self._context.limits.lane_leased
        return lane is None or (lane.leased < max_leased and not lane.is_tripped)

    async def _add(self, items: Sequence[_Item]) -> Sequence[AddResult]:
        context, new_tasks = self._context, [new for new, _ in items]
        try:
            results = await context.store.add(
                new_tasks, context.lease, quota=context.limits.pending
            )
        except StoreUnavailable as error:
            context.health.failed("store", error)
            raise
        context.health.worked("store")
        self._process_added(items, results)
        return results

    def _process_added(self, items: Sequence[_Item], results: Sequence[AddResult]) -> None:
        """Pass leased tasks to the worker, and wake the scheduler for others that are due soon.

        This is done here and not by the caller of `submit`, which may have been cancelled
        meanwhile: a leased task would then be idle until its lease expires.
        """
        context = self._context
        horizon_end = context.clock.now() + context.lease.horizon_ms
        has_listeners = bool(context.events.listeners)
        tasks: list[Task] = []
        contents: list[TaskContent | None] = []
        for (_, content), result in zip(items, results, strict=True):
            if result.status is not AddStatus.ADDED:
                continue
            task = result.task
            if has_listeners:
                self._reporter.task_added(task)
            if result.leased:
                tasks.append(task)
                contents.append(content)
            elif task.next_attempt_at <= horizon_end:
                self._scheduler.wake()
        if tasks:
            self._worker.add(tasks, contents)

    async def stop(self) -> None:
        """Lease no more tasks to this process, and write the pending tasks."""
        self._is_stopping = True
        await self._commits.flush()
