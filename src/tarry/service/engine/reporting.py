"""What the worker tells: it is counted, and made an event where somebody listens."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import Status

if TYPE_CHECKING:
    from tarry.service.delivery.messages import DeliveryResult
if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.model import AttemptRecord

if TYPE_CHECKING:
    from tarry.service.engine.clock import StoreClock
    from tarry.service.engine.lanes import LaneState
    from tarry.service.engine.metrics import Metrics
    from tarry.service.model import Task
    from tarry.service.store import TaskResult

_NAMES = {status: status.name.lower() for status in Status}


class Reporter:
    """Tells the metrics and the listeners, at the store's time: where it is known, as `now`."""

    def __init__(self, events: Events, metrics: Metrics, clock: StoreClock) -> None:
        self._events = events
        self._metrics = metrics
        self._clock = clock

    def attempt(self, finish: TaskResult, now: int) -> None:
        """Tell an attempt, if there was one."""
        task, attempt = finish.task, finish.attempt
        if attempt is None:
            return
        self._metrics.attempt(attempt, task.policy_id)
        if self._events.listeners:
            event = Event(
                kind="attempt",
                at=now,
                tenant=task.tenant,
                lane=task.lane,
                task_id=task.id,
                policy_id=task.policy_id,
                attempt=attempt,
                next_attempt_at=finish.next_attempt_at or None,
                created_at=task.created_at,
                attempts=task.attempts + 1,
            )
            self._events.publish(event)

    def ended(
        self, status: Status, task: Task, attempts: int, reason: str | None, now: int
    ) -> None:
        """Tell how a task ended, after so many attempts."""
        kind = _NAMES[status]
        self._metrics.ended(kind, attempts, now - task.created_at)
        if self._events.listeners:
            self._task(kind, task, attempts, reason, now)

    def superseded(self, task: Task, now: int) -> None:
        """Tell that a result of a task came too late."""
        self._metrics.superseded()
        if self._events.listeners:
            self._task("superseded", task, task.attempts, None, now)

    def deferred(self, task: Task, reason: str) -> None:
        """Tell that a task was put off."""
        if self._events.listeners:
            self._task("deferred", task, task.attempts, reason, self._clock.now())

    def lane(self, kind: str, lane: LaneState) -> None:
        """Tell what became of a lane."""
        self._metrics.moved(kind)
        if self._events.listeners:
            self._events.publish(
                Event(kind=kind, at=self._clock.now(), tenant=lane.tenant, lane=lane.name)
            )

    def _task(self, kind: str, task: Task, attempts: int, reason: str | None, now: int) -> None:
        event = Event(
            kind=kind,
            at=now,
            tenant=task.tenant,
            lane=task.lane,
            task_id=task.id,
            policy_id=task.policy_id,
            reason=reason,
            created_at=task.created_at,
            attempts=attempts,
        )
        self._events.publish(event)


_logger = logging.getLogger("tarry.service")
_MOST_WAITING = 1000


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a task or to a lane."""

    kind: str
    """added, attempt, succeeded, exhausted, cancelled, superseded, deferred, parked, probing,
    resumed, paused; lost is of several tasks, and of no tenant."""
    at: int
    tenant: str
    lane: str
    task_id: str | None = None
    policy_id: str | None = None
    attempt: AttemptRecord | None = None
    reason: str | None = None
    next_attempt_at: int | None = None
    created_at: int | None = None
    attempts: int | None = None


class Events:
    """Hands each event to the listeners, which are quick and do not fail each other."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        """Those who listen, to look at: an event that nobody wants is not made."""

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self.listeners)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call a function with each event from now on, until what this returns is called."""
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def publish(self, event: Event) -> None:
        """Tell everybody."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                _logger.exception("a listener failed on %s", event.kind)

    def subscribe(self, tenant: str) -> Subscription:
        """Queue a tenant's events for a slow reader."""
        return Subscription(self, tenant)


class Subscription:
    """A bounded queue of events: a reader that is too slow misses the oldest, and is told so."""

    def __init__(self, events: Events, tenant: str) -> None:
        self._tenant = tenant
        self._queue: asyncio.Queue[Event] = asyncio.Queue(_MOST_WAITING)
        self.missed: int = 0
        """Events that were dropped since this was last set to 0."""
        self._stop = events.listen(self._take)

    def _take(self, event: Event) -> None:
        if event.tenant != self._tenant:
            return
        if self._queue.full():
            self._queue.get_nowait()
            self.missed += 1
        self._queue.put_nowait(event)

    async def next(self) -> Event:
        """Wait for the next event."""
        return await self._queue.get()

    def close(self) -> None:
        """Stop listening."""
        self._stop()


class TaskCompletion(msgspec.Struct):
    """How a task ended, and the last answer of its target, where there was one."""

    status: Status
    reason: str | None
    delivered: DeliveryResult | None


class CompletionWaiters:
    """Futures by task. A task that ends elsewhere, or is never settled, leaves its waiter alone."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[asyncio.Future[TaskCompletion]]] = {}
        """Those who wait, by task; to look at."""

    async def wait(self, task_id: str, seconds: float) -> TaskCompletion | None:
        """Wait for the end of a task, for so long."""
        future: asyncio.Future[TaskCompletion] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(task_id, []).append(future)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            waiting = self.waiting.get(task_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self.waiting.pop(task_id, None)

    def tell(self, task_id: str, settled: TaskCompletion) -> None:
        """Wake everybody who waits for a task."""
        for future in self.waiting.pop(task_id, ()):
            if not future.done():
                future.set_result(settled)
