"""The engine of one process: ingest, scheduler, worker, maintenance, and the operator's actions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tarry.service.engine.ingest import Ingest
from tarry.service.engine.maintenance import Maintenance
from tarry.service.engine.reporting import Reporter, TaskCompletion
from tarry.service.engine.scheduler import Scheduler
from tarry.service.engine.worker import Worker
from tarry.service.model import Status
from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus, TaskResult
from tarry.wire.tasks import LocalStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.engine.clock import StoreClock
    from tarry.service.engine.context import EngineContext, Health
    from tarry.service.engine.policies import PolicyCache
    from tarry.service.engine.reporting import Events
    from tarry.service.model import TaskContent
    from tarry.service.store import AddResult, NewTask


class Engine:
    """Accepts tasks and runs their attempts, from `start` to `stop`."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._reporter = Reporter(context.events, context.metrics, context.clock)
        self.worker: Worker = Worker(context, self._reporter, self._on_capacity)
        self.scheduler: Scheduler = Scheduler(context, self.worker, self._reporter)
        self.maintenance: Maintenance = Maintenance(context, self.scheduler)
        self.ingest: Ingest = Ingest(context, self.worker, self.scheduler, self._reporter)
        self._scheduler_loop: asyncio.Task[None] | None = None
        self._maintenance_loop: asyncio.Task[None] | None = None

    @property
    def events(self) -> Events:
        """The events of this process."""
        return self._context.events

    @property
    def policies(self) -> PolicyCache:
        """The cache of policies."""
        return self._context.policies

    @property
    def health(self) -> Health:
        """The failing components of this process."""
        return self._context.health

    @property
    def clock(self) -> StoreClock:
        """The store's time."""
        return self._context.clock

    def _on_capacity(self) -> None:
        # The worker is created before the scheduler, so it cannot have the bound method itself.
        self.scheduler.on_capacity()

    # --- start and stop ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the store's time, then start the scheduler and the maintenance."""
        sent_at = self.clock.local_ms()
        self.clock.synchronize(sent_at, await self._context.store.ping())
        loop = asyncio.get_running_loop()
        self._scheduler_loop = loop.create_task(self.scheduler.run())
        self._maintenance_loop = loop.create_task(self.maintenance.run())

    def stop_starting(self) -> None:
        """Claim and start no more tasks; tasks that are added from now on are only stored."""
        self.worker.stop_starting()
        self.scheduler.stop()

    async def stop(self, timeout_s: float) -> None:
        """Claim no more tasks, release waiting tasks, and wait for attempts in flight."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        self.stop_starting()
        if self._scheduler_loop is not None:
            # A cancelled claim would leave leases that no worker knows of.
            await asyncio.wait([self._scheduler_loop], timeout=timeout_s / 2)
        loops = [
            loop for loop in (self._scheduler_loop, self._maintenance_loop) if loop is not None
        ]
        for loop in loops:
            loop.cancel()
        if loops:
            await asyncio.wait(loops)
        await self.ingest.stop()
        await self.worker.stop(max(0.0, deadline - asyncio.get_running_loop().time()))

    # --- tasks ------------------------------------------------------------------------------------

    def submit(
        self, new_tasks: list[NewTask], contents: Sequence[TaskContent] | None = None
    ) -> asyncio.Future[Sequence[AddResult]]:
        """Add tasks; they are durable when the future is done. See `Ingest.submit`."""
        return self.ingest.submit(new_tasks, contents)

    async def wait_for_completion(self, task_id: str, seconds: float) -> TaskCompletion | None:
        """Wait for the completion of a task in this process; return None after `seconds`."""
        return await self._context.waiters.wait(task_id, seconds)

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task; return None if there is no such task.

        A task that is leased to this process but not running is dropped.
        """
        leased = self.worker.leased_tasks.find(task_id)
        if leased is None or leased.task.tenant != tenant or leased.is_busy:
            status = await self._context.store.cancel(tenant, task_id)
        else:
            leased.is_busy = True  # the worker must not start it while the store is written
            try:
                status = await self._context.store.cancel(tenant, task_id)
                if status is CancelStatus.REQUESTED:
                    # For the store, every leased task is running. Here no attempt runs, so the task
                    # can be ended at once.
                    result = TaskResult(task=leased.task, attempt=None, status=Status.CANCELLED)
                    if await self.worker.results.submit(result) is not FinishStatus.SUPERSEDED:
                        status = CancelStatus.CANCELLED
            except BaseException:
                self.worker.results.requeue(leased)
                raise
            self.worker.leased_tasks.drop(leased)
        if status is CancelStatus.CANCELLED:
            self._context.waiters.notify(task_id, TaskCompletion(Status.CANCELLED, None, None))
            task = await self._context.store.get_task(tenant, task_id)
            if task is not None:
                self._reporter.task_cancelled(task)
        return status

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due now; return None if there is no such task.

        A task that is leased to this process and waits is started.
        """
        leased = self.worker.leased_tasks.find(task_id)
        if leased is not None and leased.task.tenant == tenant and not leased.is_busy:
            leased.task.next_attempt_at = self._context.clock.now()
            self.worker.leased_tasks.add([leased.task], [leased.content])
            return RetryNowStatus.DUE
        status = await self._context.store.retry_now(tenant, task_id)
        if status is RetryNowStatus.DUE:
            self.scheduler.wake()
        return status

    # --- lanes ------------------------------------------------------------------------------------

    async def pause(self, lane: str) -> None:
        """Stop a lane until an operator resumes it; attempts in flight continue."""
        self._context.lanes[lane].is_paused = True
        await self._context.store.pause(lane)
        # Set again: a claim that ran meanwhile may have returned a task of the lane, and have
        # marked the lane as not paused.
        self._context.lanes[lane].is_paused = True
        self.worker.release_lane(lane)
        self._reporter.lane_changed("paused", lane)

    async def resume(self, lane: str) -> None:
        """Resume a lane that was paused or parked; its in-flight limit grows step by step."""
        await self._context.store.resume(lane)
        known = self._context.lanes.get(lane)
        if known is not None:
            known.is_paused = False
            self._context.lanes.parked.discard(lane)
            known.downstream.on_recovery(self._context.clock.seconds())
            known.downstream.transitions.clear()
        self.scheduler.wake()
        self._reporter.lane_changed("resumed", lane)

    async def reset(self, lane: str) -> None:
        """Forget the breaker, budget and latencies of a lane, and resume it."""
        known = self._context.lanes.get(lane)
        if known is not None:
            self._context.lanes.reset_downstream(known)
        await self.resume(lane)

    def local_stats(self, lane: str) -> LocalStats | None:
        """Return the state of a lane in this process; None if this process has no such lane."""
        known = self._context.lanes.get(lane)
        if known is None:
            return None
        downstream = known.downstream
        breaker, balance = downstream.status(self._context.clock.seconds())
        p50, p95 = downstream.latency.quantile(0.5), downstream.latency.quantile(0.95)
        return LocalStats(
            breaker=breaker,
            budget=balance,
            running=known.running,
            leased=known.leased,
            p50_ms=None if p50 is None else round(p50 * 1000, 3),
            p95_ms=None if p95 is None else round(p95 * 1000, 3),
        )
