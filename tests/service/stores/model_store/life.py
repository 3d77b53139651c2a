"""The life of a task in memory: added, claimed, finished, released."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import Status
from tarry.service.store import (
    AddResult,
    AddStatus,
    ClaimResult,
    FinishStatus,
    Lease,
    NewTask,
    Release,
    TaskResult,
)
from tests.service.stores.model_store.base import Part, copy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tests.service.stores.model_store.rows import Queue, Row


class Life(Part):
    """What workers and the API do with tasks."""

    async def add(
        self, tasks: Sequence[NewTask], lease: Lease | None = None, *, quota: int | None = None
    ) -> list[AddResult]:
        """Add tasks, each in its own right."""
        now = self._clock()
        return [self._add(new, lease, quota, now) for new in tasks]

    def _add(self, new: NewTask, lease: Lease | None, quota: int | None, now: int) -> AddResult:
        task, tenant = new.task, self.data.tenant(new.task.tenant)
        if task.key in tenant.keys:
            found = self.data.rows[tenant.keys[task.key]].task
            same = found.fingerprint == task.fingerprint
            return AddResult(AddStatus.EXISTING if same else AddStatus.CONFLICT, copy(found))
        live = tenant.counts[Status.PENDING] + tenant.counts[Status.IN_FLIGHT]
        if quota is not None and live >= quota:
            return AddResult(AddStatus.FULL, copy(task))
        due = task.next_attempt_at if new.delay is None else now + new.delay
        timed = msgspec.structs.replace(task, next_attempt_at=max(now, due))
        row = self.data.add(timed, now, lease if new.direct else None)
        leased = row.task.status is Status.IN_FLIGHT
        return AddResult(AddStatus.ADDED, copy(row.task), leased)

    # --- claim ------------------------------------------------------------------------------------

    async def claim(
        self, lease: Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Lease tasks that are due within the horizon, or abandoned, lanes and tenants in turn."""
        data, now = self.data, self._clock()
        for alarms, until in ((data.soon, now + lease.horizon), (data.late, now)):
            for name in alarms.due(until):
                data.put_in_line(data.queues[name])
        claimed = ClaimResult(now, [], {}, None)
        called: list[Queue] = []
        while limit > 0 and (queue := data.call()):
            called.append(queue)
            if queue.lane.name not in skip:
                limit -= self._serve(queue, lease, min(limit, per_lane), claimed)
            data.go_on(queue)
        for queue in called:
            self._line_up(queue, lease, now)
        claimed.tasks.sort(key=lambda task: (task.next_attempt_at, data.ids[task.id]))
        claimed.next_at = self._next_at(lease, now, skip)
        return claimed

    def _serve(self, queue: Queue, lease: Lease, limit: int, claimed: ClaimResult) -> int:
        """Give out tasks of one lane; return how many places they took."""
        data, now = self.data, claimed.now
        queue.lapse(now)
        room = 0 if queue.is_shut(now) else queue.room(limit)
        places, given = 0, len(claimed.tasks)
        while places < room and (row := queue.waiting.pop(now + lease.horizon)):
            places += 1
            claimed.lost += row.task.status is Status.IN_FLIGHT
            if self._lease(row, lease, now):
                claimed.tasks.append(copy(row.task))
        if places:
            data.served(queue, now)
        if len(claimed.tasks) > given and queue.lane.parked_until is not None:
            claimed.probing[queue.lane.name] = queue.lane.opened
        return places

    def _lease(self, row: Row, lease: Lease, now: int) -> bool:
        """Lease a task that waits or is abandoned, unless it was cancelled meanwhile."""
        data, task = self.data, row.task
        if task.status is Status.PENDING:
            data.lease(row, lease, task.next_attempt_at, now)
            return True
        data.lose(row, now)
        if task.cancelling:
            data.end(row, Status.CANCELLED, now, attempts=task.attempts + 1)
            return False
        lost = {"attempts": task.attempts + 1, "lost": task.lost + 1}
        data.lease(row, lease, task.wake_at, now, **lost)
        return True

    def _line_up(self, queue: Queue, lease: Lease, now: int) -> None:
        """Put a lane that was called back in line if it has more to give, or set its alarm."""
        first = queue.waiting.first()
        more = first is not None and first <= now + lease.horizon
        queue.ready = False
        if more and not queue.is_shut(now) and queue.room(1) > 0:
            self.data.put_in_line(queue)
        else:
            self.data.schedule(queue, now)

    def _next_at(self, lease: Lease, now: int, skip: Collection[str]) -> int | None:
        lines = (self.data.tenants[tenant].ready for _, tenant in self.data.turns)
        if any(name not in skip for line in lines for _, name in line):
            return now
        soon, late = self.data.soon.first(skip), self.data.late.first(skip)
        times = (None if soon is None else soon - lease.horizon, late)
        return min((at for at in times if at is not None), default=None)

    # --- finish and release -----------------------------------------------------------------------

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write attempt and next state in one step each, if the version still matches."""
        now = self._clock()
        return [self._finish(result, now) for result in results]

    def _finish(self, result: TaskResult, now: int) -> FinishStatus:
        data, row = self.data, self.data.held(result.task)
        if row is None:
            data.tenant(result.task.tenant).superseded += 1
            return FinishStatus.SUPERSEDED
        attempts = row.task.attempts
        if result.attempt is not None:
            data.log(row, result.attempt, now)
            attempts += 1
        fields = {
            "attempts": attempts,
            "previous_delay": result.previous_delay,
            "restarted": result.restarted,
            "last_kind": result.last_kind,
        }
        if row.task.cancelling and result.status is not Status.SUCCEEDED:
            data.end(row, Status.CANCELLED, now, **fields)
            return FinishStatus.CANCELLED
        if result.status is not Status.PENDING:
            data.end(row, result.status, now, **fields, reason=result.reason)
        elif result.keep is not None:
            data.lease(row, result.keep, result.next_attempt_at, now, **fields)
        else:
            data.wait(row, result.next_attempt_at, now, **fields)
        if result.callback is not None:
            self._add(NewTask(result.callback), None, None, now)
        return FinishStatus.DONE

    async def release(self, leases: Sequence[Release]) -> list[FinishStatus]:
        """Hand unstarted leases back, where they are still held."""
        now = self._clock()
        return [self._release(one, now) for one in leases]

    def _release(self, one: Release, now: int) -> FinishStatus:
        row = self.data.held(one.task)
        if row is None:
            return FinishStatus.SUPERSEDED
        if row.task.cancelling:
            self.data.end(row, Status.CANCELLED, now)
            return FinishStatus.CANCELLED
        self.data.wait(row, max(row.task.next_attempt_at, one.next_attempt_at or 0), now)
        return FinishStatus.DONE
