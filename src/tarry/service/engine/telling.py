"""What the worker tells: it is counted, and made an event where somebody listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.engine.events import Event
from tarry.service.model import Status

if TYPE_CHECKING:
    from tarry.service.engine.lanes import LaneState
    from tarry.service.engine.parts import Parts
    from tarry.service.model import Task
    from tarry.service.store import TaskResult

_NAMES = {status: status.name.lower() for status in Status}


class Teller:
    """Tells the metrics and the listeners, at the store's time: where it is known, as `now`."""

    def __init__(self, parts: Parts) -> None:
        self._events = parts.events
        self._metrics = parts.metrics
        self._clock = parts.clock

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
