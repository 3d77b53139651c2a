"""Reports what happens to tasks and lanes.

The reporter updates metrics, publishes events and wakes callers that wait for a task. A result is
reported only after the store has written it, so that a crash cannot undo a reported success.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery import DeliveryResult
    from tarry.service.engine.metrics import Metrics
    from tarry.service.model import AttemptRecord, Task
    from tarry.service.store import TaskResult

_logger = logging.getLogger("tarry.service")
_EVENT_KINDS = {status: status.name.lower() for status in Status}
_MAX_QUEUED_EVENTS = 1000


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a task or to a lane."""

    kind: str
    """For a task: added, attempt, succeeded, exhausted, cancelled, superseded, deferred.
    For a lane: parked (its breaker opened), probing (half-open), resumed, paused (by an
    operator). An event `lost` reports attempts of several tasks, and has no tenant."""
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


class EventPublisher:
    """Passes each event to all listeners; a listener that fails does not affect the others."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        """Other code only tests whether it is empty, to build no `Event` without a listener."""

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with each event from now on; return a function that removes it."""
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def publish(self, event: Event) -> None:
        """Pass an event to all listeners."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                _logger.exception("event listener failed, event=%s", event.kind)


class Subscription:
    """A bounded queue of one tenant's events; a slow reader misses the oldest events."""

    def __init__(self, publisher: EventPublisher, tenant: str) -> None:
        self._tenant = tenant
        self._queue: asyncio.Queue[Event] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self.missed: int = 0  # events dropped since the reader last reset this to 0
        self.close: Callable[[], None] = publisher.listen(self._enqueue)  # stops queueing events

    def _enqueue(self, event: Event) -> None:
        if event.tenant != self._tenant:
            return
        if self._queue.full():
            self._queue.get_nowait()
            self.missed += 1
        self._queue.put_nowait(event)

    async def next(self) -> Event:
        """Wait for the next event."""
        return await self._queue.get()


class FinishedTask(msgspec.Struct):
    """The terminal status of a task, and its last delivery, if this process made one."""

    status: Status
    reason: str | None
    delivery_result: DeliveryResult | None


class Reporter:
    """Updates the metrics, publishes events if there are listeners, and wakes waiting callers.

    `now` is the store's time in milliseconds. Methods without this parameter read the clock.
    """

    def __init__(self, metrics: Metrics, read_clock: Callable[[], int]) -> None:
        self.events: EventPublisher = EventPublisher()
        self._metrics = metrics
        self._read_clock = read_clock
        self._waiting: dict[str, list[asyncio.Future[FinishedTask]]] = {}
        """Futures of callers, by the id of the task that they wait for. The callers also poll the
        store, because a task may complete in another process."""

    def task_added(self, task: Task) -> None:
        """Report a new task to the listeners."""
        next_attempt_at = task.next_attempt_at
        self._publish("added", task, None, task.created_at, next_attempt_at=next_attempt_at)

    def attempt_made(self, result: TaskResult, now: int) -> None:
        """Report `result.attempt`; do nothing if no attempt was made."""
        task, attempt = result.task, result.attempt
        if attempt is None:
            return
        self._metrics.record_attempt(attempt, task.policy_id)
        if self.events.listeners:
            next_at, attempts = result.next_attempt_at or None, task.attempts + 1
            self._publish("attempt", task, attempts, now, attempt=attempt, next_attempt_at=next_at)

    def task_finished(
        self,
        status: Status,
        task: Task,
        attempts: int,
        reason: str | None,
        now: int,
        delivery_result: DeliveryResult | None = None,
    ) -> None:
        """Report that a task reached a terminal status after `attempts` attempts."""
        kind = _EVENT_KINDS[status]
        self._metrics.record_finished_task(kind, attempts, now - task.created_at)
        if self.events.listeners:
            self._publish(kind, task, attempts, now, reason=reason)
        if task.id in self._waiting:
            self.notify(task.id, FinishedTask(status, reason, delivery_result))

    def notify(self, task_id: str, finished_task: FinishedTask) -> None:
        """Wake all callers that wait for a task."""
        for future in self._waiting.pop(task_id, ()):
            if not future.done():
                future.set_result(finished_task)

    async def wait_until_finished(self, task_id: str, seconds: float) -> FinishedTask | None:
        """Wait until this process finishes a task; return None after `seconds`."""
        future: asyncio.Future[FinishedTask] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task_id, []).append(future)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            waiting = self._waiting.get(task_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(task_id, None)

    def task_cancelled(self, task: Task) -> None:
        """Report that a task was cancelled while no attempt of it ran."""
        self.task_finished(Status.CANCELLED, task, task.attempts, None, self._read_clock())

    def result_superseded(self, task: Task, now: int) -> None:
        """Report that a result was discarded, because the worker had lost the lease by then."""
        self._metrics.superseded[()] += 1
        if self.events.listeners:
            self._publish("superseded", task, task.attempts, now)

    def task_deferred(self, task: Task, reason: str) -> None:
        """Report that the downstream did not admit an attempt, so that the task was released."""
        if self.events.listeners:
            self._publish("deferred", task, task.attempts, self._read_clock(), reason=reason)

    def attempts_lost(self, count: int, now: int) -> None:
        """Report attempts whose workers have disappeared."""
        _logger.warning("attempts lost, their workers have disappeared, count=%d", count)
        self._metrics.attempts["lost", ""] += count
        self.events.publish(Event(kind="lost", at=now, tenant="", lane="", attempts=count))

    def lane_changed(self, kind: str, lane: str) -> None:
        """Report that a lane was parked, probed, resumed or paused."""
        self._metrics.count_transition(kind)
        if self.events.listeners:
            tenant = lane.partition("/")[0]
            self.events.publish(Event(kind=kind, at=self._read_clock(), tenant=tenant, lane=lane))

    def _publish(
        self,
        kind: str,
        task: Task,
        attempts: int | None,
        now: int,
        *,
        reason: str | None = None,
        attempt: AttemptRecord | None = None,
        next_attempt_at: int | None = None,
    ) -> None:
        event = Event(
            kind=kind,
            at=now,
            tenant=task.tenant,
            lane=task.lane,
            task_id=task.id,
            policy_id=task.policy_id,
            attempt=attempt,
            reason=reason,
            next_attempt_at=next_attempt_at,
            created_at=task.created_at,
            attempts=attempts,
        )
        self.events.publish(event)
