"""Reports what happens to tasks and lanes.

The reporter updates metrics, publishes events and wakes callers that wait for a task. A result is
reported only after the store has written it, so that a crash cannot undo a reported success.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Literal

import msgspec

from tarry.service.model import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.breaker import BreakerState
    from tarry.service.delivery import DeliveryResult
    from tarry.service.engine.metrics import Metrics
    from tarry.service.model import AttemptRecord, Task
    from tarry.service.store import TaskResult
    from tarry.wire.tasks import EventKind

_logger = logging.getLogger("tarry.service")
_EVENT_KINDS: dict[Status, EventKind] = {
    Status.SUCCEEDED: "succeeded",
    Status.EXHAUSTED: "exhausted",
    Status.CANCELLED: "cancelled",
}


class EngineEvent(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a task or to a lane."""

    kind: EventKind | Literal["lost"]
    """`lost`: the workers of attempts of several tasks have disappeared. Such an event has an empty
    tenant and lane."""
    at: int  # epoch ms
    tenant: str
    lane: str
    task_id: str | None = None
    policy_id: str | None = None
    attempt: AttemptRecord | None = None
    reason: str | None = None
    next_attempt_at: int | None = None
    created_at: int | None = None
    attempts: int | None = None  # number of attempts of the task; for `lost`, of lost attempts


class EventPublisher:
    """Passes each event to all listeners; a listener that fails does not affect the others."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[EngineEvent], None]] = []
        """Other classes only test whether it is empty: then no `EngineEvent` has to be built."""

    def listen(self, listener: Callable[[EngineEvent], None]) -> Callable[[], None]:
        """Call `listener` with each event from now on; return a function that stops this."""
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def publish(self, event: EngineEvent) -> None:
        """Pass an event to all listeners."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                _logger.exception("event listener failed, event=%s", event.kind)


class FinishedTask(msgspec.Struct):
    """The final status of a task, and the result of its last delivery if this process made it."""

    status: Status
    reason: str | None
    delivery_result: DeliveryResult | None


class Reporter:
    """Updates the metrics, publishes events if there are listeners, and wakes waiting callers.

    `now` is the store's time in milliseconds. Methods without this parameter read the clock.
    """

    def __init__(self, metrics: Metrics, read_clock: Callable[[], int]) -> None:
        self.events: EventPublisher = EventPublisher()
        self.metrics: Metrics = metrics
        self._read_clock = read_clock
        self._waiters: dict[str, list[asyncio.Future[FinishedTask]]] = {}
        """Futures of callers, by the id of the task that they wait for. The callers also poll the
        store, because another process may finish the task."""

    def report_added(self, task: Task) -> None:
        """Report a new task to the listeners."""
        next_attempt_at = task.next_attempt_at
        self._publish("added", task, None, task.created_at, next_attempt_at=next_attempt_at)

    def report_attempt(self, result: TaskResult, startable_since: int, now: int) -> None:
        """Report the attempt of a result, if it has one; see `LocalLane.startable_since`."""
        task, attempt = result.task, result.attempt
        if attempt is None:
            return
        self.metrics.record_attempt(attempt, task.policy_id, task.lane, startable_since)
        if self.events.listeners:
            next_at, attempts = result.next_attempt_at or None, task.attempts + 1
            self._publish("attempt", task, attempts, now, attempt=attempt, next_attempt_at=next_at)

    def report_finished(
        self,
        status: Status,
        task: Task,
        attempts: int,
        reason: str | None,
        now: int,
        delivery_result: DeliveryResult | None = None,
    ) -> None:
        """Report that a task is finished after `attempts` attempts."""
        kind = _EVENT_KINDS[status]
        self.metrics.record_finished_task(kind, attempts, task.lane, now - task.created_at)
        if self.events.listeners:
            self._publish(kind, task, attempts, now, reason=reason)
        if task.id in self._waiters:
            self.notify_waiters(task.id, FinishedTask(status, reason, delivery_result))

    def has_waiters(self, task_id: str) -> bool:
        """Return whether an API caller waits for the result of a task."""
        return task_id in self._waiters

    def notify_waiters(self, task_id: str, finished_task: FinishedTask) -> None:
        """Wake all callers that wait for a task."""
        for future in self._waiters.pop(task_id, ()):
            if not future.done():
                future.set_result(finished_task)

    async def wait_until_finished(self, task_id: str, timeout_s: float) -> FinishedTask | None:
        """Wait until this process finishes a task; return None after `timeout_s`."""
        future: asyncio.Future[FinishedTask] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(task_id, []).append(future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            waiters = self._waiters.get(task_id, [])
            if future in waiters:
                waiters.remove(future)
            if not waiters:
                self._waiters.pop(task_id, None)

    def report_cancelled(self, task: Task) -> None:
        """Report that a task was cancelled while no attempt of it ran."""
        self.report_finished(Status.CANCELLED, task, task.attempts, None, self._read_clock())

    def report_superseded(self, task: Task, now: int) -> None:
        """Report that a result was discarded, because its worker had lost the lease."""
        self.metrics.superseded[()] += 1
        if self.events.listeners:
            self._publish("superseded", task, task.attempts, now)

    def report_deferred(self, task: Task, reason: str) -> None:
        """Report that the downstream rejected an attempt, and that the task was released."""
        self.metrics.count_deferral(reason, task.lane)
        if self.events.listeners:
            self._publish("deferred", task, task.attempts, self._read_clock(), reason=reason)

    def report_lost_attempts(self, count: int, now: int) -> None:
        """Report attempts whose workers have disappeared."""
        _logger.warning("attempts lost, their workers have disappeared, count=%d", count)
        self.metrics.attempts["lost", "", ""] += count
        self.events.publish(EngineEvent(kind="lost", at=now, tenant="", lane="", attempts=count))

    def report_transition(self, before: BreakerState, after: BreakerState) -> None:
        """Report the state of a breaker before and after an event that may have changed it."""
        self.metrics.count_transition(before, after)

    def report_lane_change(self, kind: EventKind, lane: str) -> None:
        """Report an event of a lane: `kind` is parked, probing, resumed or paused."""
        if self.events.listeners:
            tenant = lane.partition("/")[0]
            self.events.publish(
                EngineEvent(kind=kind, at=self._read_clock(), tenant=tenant, lane=lane)
            )

    def _publish(
        self,
        kind: EventKind,
        task: Task,
        attempts: int | None,
        now: int,
        *,
        reason: str | None = None,
        attempt: AttemptRecord | None = None,
        next_attempt_at: int | None = None,
    ) -> None:
        event = EngineEvent(
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
