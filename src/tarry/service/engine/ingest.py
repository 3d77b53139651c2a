"""Ingest: new tasks are written in groups, and go straight to the worker where it has room."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tarry.errors import StoreUnavailable
from tarry.service.engine.reporting import Event
from tarry.service.group_commit import AsyncGroupCommit
from tarry.service.store import AddResult, AddStatus

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.scheduler import Scheduler
    from tarry.service.engine.worker import Worker
    from tarry.service.model import Task, TaskContent
    from tarry.service.store import NewTask

_GROUP = 64
"""Tasks that are written together: what came of others is written between two groups, and a retry
is not put off by a large batch."""
_Item: TypeAlias = "tuple[NewTask, TaskContent | None]"


class Ingest:
    """Adds tasks; what it has returned is durable."""

    def __init__(self, context: EngineContext, worker: Worker, scheduler: Scheduler) -> None:
        self._context = context
        self._worker = worker
        self._scheduler = scheduler
        self._adds: AsyncGroupCommit[_Item, AddResult] = AsyncGroupCommit(
            self._add, max_items=_GROUP, max_pending=context.limits.ingest
        )
        self._stopping = False

    def submit(
        self, news: list[NewTask], contents: Sequence[TaskContent] | None = None
    ) -> asyncio.Future[Sequence[AddResult]]:
        """Add tasks: they are durable when the future is done.

        `contents` are theirs, where the caller has them at hand. Whoever leaves leaves them here.
        """
        # Those on their way into the hold count: it must not be promised twice.
        room = self._worker.hold.room - self._adds.pending if not self._stopping else 0
        open_lanes: dict[str, bool] = {}
        for new in news:
            if room <= 0:
                break
            name = new.task.lane
            if name not in open_lanes:
                open_lanes[name] = self._is_open(name)
            if open_lanes[name]:
                new.direct = True
                room -= 1
        theirs: Sequence[TaskContent | None] = contents or [None] * len(news)
        return self._adds.submit(list(zip(news, theirs, strict=True)))

    def _is_open(self, name: str) -> bool:
        lane = self._context.lanes.get(name)
        return lane is None or (lane.held < self._context.limits.lane_held and not lane.is_shut)

    async def _add(self, items: Sequence[_Item]) -> Sequence[AddResult]:
        context, news = self._context, [new for new, _ in items]
        try:
            answers = await context.store.add(news, context.lease, quota=context.limits.pending)
        except StoreUnavailable as error:
            context.health.failed("store", error)
            raise
        context.health.worked("store")
        self._added(items, answers)
        return answers

    def _added(self, items: Sequence[_Item], answers: Sequence[AddResult]) -> None:
        """Have the worker take what is leased to it, and the scheduler claim what is near.

        Whoever submitted a task may have left meanwhile, and it is made all the same.
        """
        context = self._context
        near = context.clock.now() + context.lease.horizon
        tasks: list[Task] = []
        contents: list[TaskContent | None] = []
        for (_, content), answer in zip(items, answers, strict=True):
            if answer.status is not AddStatus.ADDED:
                continue
            task = answer.task
            if context.events.listeners:
                self._tell(task)
            if answer.leased:
                tasks.append(task)
                contents.append(content)
            elif task.next_attempt_at <= near:
                self._scheduler.wake()
        if tasks:
            self._worker.take(tasks, contents)

    def _tell(self, task: Task) -> None:
        event = Event(
            kind="added",
            at=task.created_at,
            tenant=task.tenant,
            lane=task.lane,
            task_id=task.id,
            policy_id=task.policy_id,
            next_attempt_at=task.next_attempt_at,
            created_at=task.created_at,
        )
        self._context.events.publish(event)

    async def stop(self) -> None:
        """Lease nothing more to this process, and write what waits."""
        self._stopping = True
        await self._adds.flush()
