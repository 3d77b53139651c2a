"""What the worker tells: events of tasks and lanes, made only where somebody listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.engine.events import Event

if TYPE_CHECKING:
    from tarry.service.engine.lanes import Lane
    from tarry.service.engine.parts import Parts
    from tarry.service.model import Task
    from tarry.service.store import Finish


class Teller:
    """Publishes events, at the store's time."""

    def __init__(self, parts: Parts) -> None:
        self._events = parts.events
        self._now = parts.clock.now

    def task(
        self,
        kind: str,
        task: Task,
        reason: str | None = None,
        attempted: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Tell what became of a task; `attempted`: by an attempt that it does not count yet."""
        if self._events:
            event = Event(
                kind=kind,
                at=self._now(),
                tenant=task.tenant,
                lane=task.lane,
                task_id=task.id,
                policy_id=task.policy_id,
                reason=reason,
                created_at=task.created_at,
                attempts=task.attempts + attempted,
            )
            self._events.publish(event)

    def attempt(self, finish: Finish) -> None:
        """Tell an attempt, if there was one."""
        task = finish.task
        if self._events and finish.attempt is not None:
            event = Event(
                kind="attempt",
                at=self._now(),
                tenant=task.tenant,
                lane=task.lane,
                task_id=task.id,
                policy_id=task.policy_id,
                attempt=finish.attempt,
                next_attempt_at=finish.next_attempt_at or None,
                created_at=task.created_at,
                attempts=task.attempts + 1,
            )
            self._events.publish(event)

    def lane(self, kind: str, lane: Lane) -> None:
        """Tell what became of a lane."""
        if self._events:
            self._events.publish(
                Event(kind=kind, at=self._now(), tenant=lane.tenant, lane=lane.name)
            )
