"""The engine: ingest, scheduler, worker and maintenance of one process, and an operator's hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tarry.service.engine.ingest import Ingest
from tarry.service.engine.maintenance import Maintenance
from tarry.service.engine.reporting import Event, TaskCompletion
from tarry.service.engine.scheduler import Scheduler
from tarry.service.engine.worker import Worker
from tarry.service.model import Status
from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus, TaskResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.engine.clock import StoreClock
    from tarry.service.engine.context import EngineContext, Health
    from tarry.service.engine.policies import Policies
    from tarry.service.engine.reporting import Events
    from tarry.service.model import TaskContent
    from tarry.service.store import AddResult, NewTask


class Engine:
    """Takes tasks in and makes them happen, from `start` to `stop`."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self.worker: Worker = Worker(context, self._has_room)
        self.scheduler: Scheduler = Scheduler(context, self.worker)
        self.maintenance: Maintenance = Maintenance(context, self.scheduler)
        self.ingest: Ingest = Ingest(context, self.worker, self.scheduler)
        self._claiming: asyncio.Task[None] | None = None
        self._keeping_house: asyncio.Task[None] | None = None

    @property
    def events(self) -> Events:
        """What happens in this process."""
        return self._context.events

    @property
    def policies(self) -> Policies:
        """The policies in force."""
        return self._context.policies

    @property
    def health(self) -> Health:
        """What is out of order."""
        return self._context.health

    @property
    def clock(self) -> StoreClock:
        """The store's time."""
        return self._context.clock

    async def start(self) -> None:
        """Learn the store's time, then begin to claim and to keep house."""
        asked = self.clock.asks()
        self.clock.learn(asked, await self._context.store.ping())
        loop = asyncio.get_running_loop()
        self._claiming = loop.create_task(self.scheduler.run())
        self._keeping_house = loop.create_task(self.maintenance.run())

    def halt(self) -> None:
        """Claim and start nothing more; what is added meanwhile is written down."""
        self.worker.halt()
        self.scheduler.stop()

    async def stop(self, patience: float) -> None:
        """Claim nothing more, hand back what has not begun, wait for what runs."""
        end = asyncio.get_running_loop().time() + patience
        self.halt()
        if self._claiming is not None:  # the leases of a claim on its way would have no holder
            await asyncio.wait([self._claiming], timeout=patience / 2)
        loops = [loop for loop in (self._claiming, self._keeping_house) if loop is not None]
        for loop in loops:
            loop.cancel()
        if loops:
            await asyncio.wait(loops)
        await self.ingest.stop()
        await self.worker.stop(max(0.0, end - asyncio.get_running_loop().time()))

    def submit(
        self, news: list[NewTask], contents: Sequence[TaskContent] | None = None
    ) -> asyncio.Future[Sequence[AddResult]]:
        """Add tasks; they are durable when the future is done."""
        return self.ingest.submit(news, contents)

    async def settled(self, task_id: str, seconds: float) -> TaskCompletion | None:
        """Wait for the end of a task that this process works on."""
        return await self._context.waiters.wait(task_id, seconds)

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task; one that waits here, leased, is let go first."""
        held = self.worker.hold.find(task_id)
        if held is None or held.task.tenant != tenant or held.started:
            answer = await self._context.store.cancel(tenant, task_id)
        else:
            held.started = True  # nobody starts it while the store is asked
            try:
                answer = await self._context.store.cancel(tenant, task_id)
                if answer is CancelStatus.REQUESTED:
                    end = TaskResult(task=held.task, attempt=None, status=Status.CANCELLED)
                    if await self.worker.ends.put(end) is not FinishStatus.SUPERSEDED:
                        answer = CancelStatus.CANCELLED
            except BaseException:
                self.worker.wait(held)
                raise
            self.worker.hold.drop(held)
        if answer is CancelStatus.CANCELLED:
            self._context.waiters.tell(task_id, TaskCompletion(Status.CANCELLED, None, None))
            task = await self._context.store.get_task(tenant, task_id)
            if task is not None:
                self.worker.ends.tell(task)
        return answer

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due; one that waits here for its time is started."""
        held = self.worker.hold.find(task_id)
        if held is not None and held.task.tenant == tenant and not held.started:
            held.task.next_attempt_at = self._context.clock.now()
            self.worker.hold.take([held.task], [held.content])
            return RetryNowStatus.DUE
        answer = await self._context.store.retry_now(tenant, task_id)
        if answer is RetryNowStatus.DUE:
            self.scheduler.wake()
        return answer

    async def pause(self, lane: str) -> None:
        """Stop a lane until somebody resumes it; what runs may finish."""
        self._context.lanes[lane].paused = True
        await self._context.store.pause(lane)
        self._context.lanes[lane].paused = True  # a claim of before may have taken it for resumed
        self.worker.empty(lane)
        self._tell("paused", lane)

    async def resume(self, lane: str) -> None:
        """Open a lane that was paused or parked, slowly."""
        await self._context.store.resume(lane)
        known = self._context.lanes.get(lane)
        if known is not None:
            known.paused = False
            self._context.lanes.parked.discard(lane)
            known.downstream.on_recovery(self._context.clock.seconds())
            known.downstream.transitions.clear()
        self.scheduler.wake()
        self._tell("resumed", lane)

    async def reset(self, lane: str) -> None:
        """Forget everything that was learnt of a downstream, and open its lane."""
        known = self._context.lanes.get(lane)
        if known is not None:
            self._context.lanes.renew(known)
        await self.resume(lane)

    def standing(self, lane: str) -> dict[str, Any] | None:
        """Say what this process knows of a lane."""
        known = self._context.lanes.get(lane)
        if known is None:
            return None
        downstream = known.downstream
        breaker, balance = downstream.status(self._context.clock.seconds())
        p50, p95 = downstream.latency.quantile(0.5), downstream.latency.quantile(0.95)
        return {
            "breaker": breaker,
            "budget": balance,
            "running": known.running,
            "held": known.held,
            "p50Ms": None if p50 is None else round(p50 * 1000, 3),
            "p95Ms": None if p95 is None else round(p95 * 1000, 3),
        }

    def _has_room(self) -> None:
        self.scheduler.room()

    def _tell(self, kind: str, lane: str) -> None:
        self._context.metrics.moved(kind)
        if self.events.listeners:
            tenant = lane.partition("/")[0]
            now = self._context.clock.now()
            self.events.publish(Event(kind=kind, at=now, tenant=tenant, lane=lane))
