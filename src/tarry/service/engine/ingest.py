"""Ingest: new tasks are written in groups, and go straight to the worker where it has room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable
from tarry.service.engine.batches import Batches
from tarry.service.engine.events import Event
from tarry.service.store import Added, Addition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.engine.parts import Parts
    from tarry.service.engine.scheduler import Scheduler
    from tarry.service.engine.worker import Worker
    from tarry.service.model import Content
    from tarry.service.store import New

_GROUP = 1_000


class Ingest:
    """Adds tasks; what it has returned is durable."""

    def __init__(self, parts: Parts, worker: Worker, scheduler: Scheduler) -> None:
        self._parts = parts
        self._worker = worker
        self._scheduler = scheduler
        self._adds: Batches[New, Added] = Batches(
            self._add, most=_GROUP, waiting=parts.limits.ingest
        )
        self._stopping = False

    async def submit(
        self, news: list[New], contents: Sequence[Content] | None = None
    ) -> Sequence[Added]:
        """Add tasks. `contents` are theirs, where the caller has them at hand."""
        lanes, hold, limits = self._parts.lanes, self._worker.hold, self._parts.limits
        # Those on their way into the hold count: it must not be promised twice.
        room = hold.room - self._adds.waiting if not self._stopping else 0
        for new in news:
            lane = lanes.get(new.task.lane)
            if room > 0 and (lane is None or (lane.held < limits.lane_held and not lane.is_shut)):
                new.direct = True
                room -= 1
        answers = await self._adds.put(news)
        for i, answer in enumerate(answers):
            if answer.addition is Addition.ADDED:
                self._added(answer, None if contents is None else contents[i])
        return answers

    def _added(self, answer: Added, content: Content | None) -> None:
        task, parts = answer.task, self._parts
        if answer.leased:
            self._worker.take(task, content)
        elif task.next_attempt_at <= parts.clock.now() + parts.lease.horizon:
            self._scheduler.wake()
        if parts.events:
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
            parts.events.publish(event)

    async def _add(self, news: Sequence[New]) -> Sequence[Added]:
        parts = self._parts
        try:
            answers = await parts.store.add(news, parts.lease, quota=parts.limits.pending)
        except StoreUnavailable as error:
            parts.health.failed("store", error)
            raise
        parts.health.worked("store")
        return answers

    async def stop(self) -> None:
        """Lease nothing more to this process, and write what waits."""
        self._stopping = True
        await self._adds.flushed()
