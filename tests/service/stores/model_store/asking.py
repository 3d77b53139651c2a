"""What people ask of tasks and lanes in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import ConfigurationError
from tarry.service.model import AttemptRecord, LaneRecord, Status, Task
from tarry.service.store import CancelStatus, Page, RetryNowStatus, TaskFilter
from tests.service.stores.model_store.base import Part, copy

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST_CURSOR = 20


class Asking(Part):
    """Lanes and tasks, looked at and changed by hand."""

    # --- lanes ------------------------------------------------------------------------------------

    async def park(self, lane: str, until: int, *, probes: int, opened: int) -> None:
        """Give no task of the lane until then, and afterwards `probes` at a time."""
        found = self.data.queue(lane).lane
        found.parked_until, found.probes, found.opened = until, probes, opened
        self._reschedule(lane)

    async def unpark(self, lane: str) -> None:
        """Open a lane whose downstream has recovered."""
        self._open(lane, paused=False)

    async def resume(self, lane: str) -> None:
        """Open a lane: forget that it was parked or paused."""
        self._open(lane, paused=True)

    def _open(self, lane: str, *, paused: bool) -> None:
        if lane in self.data.queues:
            found = self.data.queues[lane].lane
            found.parked_until, found.probes, found.opened = None, 0, 0
            if paused:
                found.paused = False
            self._reschedule(lane)

    async def pause(self, lane: str) -> None:
        """Give no task of the lane until somebody resumes it."""
        self.data.queue(lane).lane.paused = True
        self._reschedule(lane)

    def _reschedule(self, lane: str) -> None:
        self.data.schedule(self.data.queues[lane], self._clock())

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[LaneRecord]:
        """List lanes by name."""
        names = sorted(
            name
            for name, queue in self.data.queues.items()
            if tenant in {None, queue.lane.tenant} and (cursor is None or name > cursor)
        )
        items = [copy(self.data.queues[name].lane) for name in names[:limit]]
        return Page(items, names[limit - 1] if len(names) > limit else None)

    async def get_lane(self, name: str) -> LaneRecord | None:
        """Return one lane."""
        queue = self.data.queues.get(name)
        return None if queue is None else copy(queue.lane)

    # --- tasks ------------------------------------------------------------------------------------

    async def get_task(self, tenant: str, task_id: str) -> Task | None:
        """Return a task."""
        row = self.data.row(task_id, tenant)
        return None if row is None else copy(row.task)

    async def list_tasks(
        self, tenant: str, query: TaskFilter, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Task]:
        """List tasks, newest first."""
        numbers = self.data.tenant(tenant).numbers
        end = len(numbers) if cursor is None else bisect_left(numbers, number_of(cursor))
        items: list[Task] = []
        for number in reversed(numbers[:end]):
            row = self.data.rows.get(number)
            if row is None or not matches(row.task, query):
                continue
            if len(items) == limit:
                return Page(items, str(self.data.ids[items[-1].id]))
            items.append(copy(row.task))
        return Page(items, None)

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        """Return a task's attempt log, from the attempt that follows number `after`."""
        row = self.data.row(task_id, tenant)
        rows = (
            []
            if row is None
            else [msgspec.msgpack.decode(one, type=AttemptRecord) for one in row.log]
        )
        return rows[bisect_right(rows, after, key=lambda attempt: attempt.number) :][:limit]

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task."""
        row = self.data.row(task_id, tenant)
        if row is None:
            return None
        if row.task.status.is_terminal:
            return CancelStatus.TERMINAL
        if row.task.status is Status.PENDING:
            self.data.end(row, Status.CANCELLED, self._clock())
            return CancelStatus.CANCELLED
        row.task.cancelling = True
        return CancelStatus.REQUESTED

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due that waits or is dead."""
        row, now = self.data.row(task_id, tenant), self._clock()
        if row is None:
            return None
        match row.task.status:
            case Status.PENDING:
                self.data.wait(row, min(row.task.next_attempt_at, now), now)
            case Status.EXHAUSTED:
                self.data.revive(row, now)
            case Status.IN_FLIGHT:
                return RetryNowStatus.RUNNING
            case Status.SUCCEEDED | Status.CANCELLED:
                return RetryNowStatus.FINISHED
        return RetryNowStatus.DUE


def number_of(cursor: str) -> int:
    """Return the number of the task that a cursor goes on from."""
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= LONGEST_CURSOR):
        raise ConfigurationError("cursor", "must be one that a page of this list gave", cursor[:50])
    return int(cursor)


def matches(task: Task, query: TaskFilter) -> bool:
    """Whether a query asks for a task."""
    pairs: Iterable[tuple[object, object]] = (
        (query.status, task.status),
        (query.policy_id, task.policy_id),
        (query.lane, task.lane),
        (query.reason, task.reason),
    )
    return all(wanted is None or wanted == found for wanted, found in pairs)
