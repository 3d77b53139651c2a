"""All that the store in memory keeps, and the one way in which a task changes."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.model import LOST, ApiKey, AttemptRecord, LaneRecord, ReplayRecord, Status, Task
from tests.service.stores.model_store.alarms import Alarms
from tests.service.stores.model_store.rows import Note, Queue, Row, Tenant

if TYPE_CHECKING:
    from tarry.service.store import Lease

MINUTE = 60_000
DAY = 86_400_000


class Data:
    """The state of a `ModelStore`. Hand it to a new one to see what outlives a crash."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.ids: dict[str, int] = {}
        self.queues: dict[str, Queue] = {}
        self.tenants: dict[str, Tenant] = {}
        self.soon: Alarms = Alarms()
        """Lanes by the time of their earliest task that waits: claimed within the horizon."""
        self.late: Alarms = Alarms()
        """Lanes by the end of their earliest lease, or of their parking: nothing comes before."""
        self.turns: list[tuple[int, str]] = []
        """The tenants that have lanes in line, least recently served first."""
        self.ended: dict[bool, list[Note]] = {True: [], False: []}
        """When tasks ended; apart for those that are dead."""
        self.orphans: dict[str, None] = {}
        self.replays: dict[str, ReplayRecord] = {}
        self.keys: dict[str, ApiKey] = {}
        self.digests: dict[bytes, str] = {}
        self._last_number = 0
        self._last_turn = 0

    # --- look-ups ---------------------------------------------------------------------------------

    def tenant(self, name: str) -> Tenant:
        """Return a tenant, a new one if need be."""
        if name not in self.tenants:
            self.tenants[name] = Tenant(name)
        return self.tenants[name]

    def queue(self, lane: str) -> Queue:
        """Return a lane's queue, a new one if need be."""
        if lane not in self.queues:
            tenant = lane.partition("/")[0]
            self.queues[lane] = Queue(LaneRecord(name=lane, tenant=tenant), self.rows)
        return self.queues[lane]

    def row(self, task_id: str, tenant: str) -> Row | None:
        """Return a tenant's task."""
        number = self.ids.get(task_id)
        row = None if number is None else self.rows[number]
        return row if row is not None and row.task.tenant == tenant else None

    def held(self, task: Task) -> Row | None:
        """Return the row of a task that is still held under the lease it was given out with."""
        row = self.row(task.id, task.tenant)
        if row is None or row.task.status is not Status.IN_FLIGHT:
            return None
        return row if row.task.version == task.version else None

    # --- changes ----------------------------------------------------------------------------------

    def add(self, task: Task, now: int, lease: Lease | None) -> Row:
        """Keep a new task whose key is free, with what the caller set and nothing else."""
        self._last_number += 1
        tenant, queue = self.tenant(task.tenant), self.queue(task.lane)
        is_open = not queue.lane.paused and queue.lane.parked_until is None
        fresh = task.begun(now, task.next_attempt_at)
        if is_open and lease is not None and fresh.next_attempt_at <= now + lease.horizon:
            fresh = msgspec.structs.replace(fresh, **under(lease, fresh.next_attempt_at, now))
        row = Row(self._last_number, fresh)
        self.rows[row.number] = row
        self.ids[task.id] = tenant.keys[task.key] = row.number
        tenant.numbers.append(row.number)
        self._count(row, 1)
        self._place(row, now)
        return row

    def change(self, row: Row, now: int, **fields: Any) -> None:
        """Bring a task into its next state, with all that is counted and timed by it."""
        self._count(row, -1)
        self.queues[row.task.lane].lapsed.discard(row.number)
        version = row.task.version + 1
        row.task = msgspec.structs.replace(row.task, version=version, **fields)
        self._count(row, 1)
        self._place(row, now)

    def lease(self, row: Row, lease: Lease, next_attempt_at: int, now: int, **fields: Any) -> None:
        """Give a task to a worker."""
        self.change(row, now, **fields, **under(lease, next_attempt_at, now))

    def wait(self, row: Row, next_attempt_at: int, now: int, **fields: Any) -> None:
        """Let a task wait until a time; nobody holds it."""
        fields |= {"status": Status.PENDING, "worker": None}
        fields |= {"next_attempt_at": next_attempt_at, "wake_at": next_attempt_at}
        self.change(row, now, **fields)

    def end(self, row: Row, status: Status, now: int, **fields: Any) -> None:
        """Bring a task to a terminal state."""
        self.change(row, now, **fields, status=status, worker=None, wake_at=0, finished_at=now)

    def revive(self, row: Row, now: int) -> None:
        """Let a dead letter begin anew."""
        self.wait(
            row,
            now,
            now,
            started_at=now,
            reason=None,
            finished_at=None,
            forgiven=row.task.attempts,
            lost=0,
            previous_delay=None,
            restarted=0,
            last_kind=None,
            replays=row.task.replays + 1,
        )

    def remove(self, row: Row) -> None:
        """Forget a terminal task, but for its body."""
        task, tenant = row.task, self.tenants[row.task.tenant]
        self._count(row, -1)
        del self.rows[row.number], self.ids[task.id], tenant.keys[task.key]
        if task.body_ref is not None:
            self.orphans[task.body_ref] = None
        if len(tenant.numbers) > 2 * len(tenant.keys):
            tenant.numbers = [number for number in tenant.numbers if number in self.rows]

    def log(self, row: Row, attempt: AttemptRecord, now: int) -> None:
        """Write an attempt to the log and into the series."""
        row.log.append(msgspec.msgpack.encode(attempt))
        series = self.tenants[row.task.tenant].series
        series[now - now % MINUTE][attempt.outcome] += 1
        for minute in list(series):
            if minute >= now - DAY:
                break
            del series[minute]

    def lose(self, row: Row, now: int) -> None:
        """Write the attempt of an abandoned lease to the log."""
        task = row.task
        lost = AttemptRecord(
            number=task.attempts + 1,
            scheduled_at=task.next_attempt_at,
            started_at=task.next_attempt_at,
            outcome=LOST,
            worker=task.worker,
        )
        self.log(row, lost, now)

    # --- the line ---------------------------------------------------------------------------------

    def schedule(self, queue: Queue, now: int) -> None:
        """Set when a lane that is not in line may have something to give."""
        if queue.ready:
            return
        lane, soon, late = queue.lane, None, None
        if queue.is_shut(now):
            late = None if lane.paused or not lane.pending + lane.in_flight else lane.parked_until
        else:
            soon = queue.waiting.first() if queue.room(1) > 0 else None
            late = queue.leases.first()
        self.soon.set(lane.name, soon)
        self.late.set(lane.name, late)

    def put_in_line(self, queue: Queue) -> None:
        """Let a lane wait for its tenant's turn, and for its own."""
        tenant = self.tenant(queue.lane.tenant)
        queue.ready = True
        self.soon.set(queue.lane.name, None)
        self.late.set(queue.lane.name, None)
        if not tenant.ready:
            heappush(self.turns, (tenant.turn, tenant.name))
        heappush(tenant.ready, (queue.turn, queue.lane.name))

    def call(self) -> Queue | None:
        """Take the next lane out of the line; its tenant stands aside until `go_on`."""
        if not self.turns:
            return None
        tenant = self.tenants[heappop(self.turns)[1]]
        return self.queues[heappop(tenant.ready)[1]]

    def go_on(self, queue: Queue) -> None:
        """Put the tenant of a lane that was called back in line, if it has others."""
        tenant = self.tenants[queue.lane.tenant]
        if tenant.ready:
            heappush(self.turns, (tenant.turn, tenant.name))

    def served(self, queue: Queue, now: int) -> None:
        """Put lane and tenant behind all others."""
        self._last_turn += 1
        queue.turn = self.tenants[queue.lane.tenant].turn = self._last_turn
        queue.lane.served_at = now

    def _count(self, row: Row, by: int) -> None:
        task, tenant = row.task, self.tenants[row.task.tenant]
        lane = self.queues[task.lane].lane
        tenant.counts[task.status] += by
        if not task.status.is_terminal:
            tenant.policy_use[task.policy_id] += by
        if task.status is Status.PENDING:
            lane.pending += by
        elif task.status is Status.IN_FLIGHT:
            lane.in_flight += by
        elif task.status is Status.EXHAUSTED:
            lane.dead += by
            (tenant.dead.add if by > 0 else tenant.dead.discard)(row.number)

    def _place(self, row: Row, now: int) -> None:
        task, queue = row.task, self.queues[row.task.lane]
        if task.status is Status.PENDING:
            queue.waiting.add(row, queue.lane.pending + queue.lane.in_flight)
        elif task.status is Status.IN_FLIGHT:
            queue.leases.add(row, queue.lane.in_flight)
        else:
            note = (task.finished_at or now, row.number, task.version)
            heappush(self.ended[task.status is Status.EXHAUSTED], note)
        self.schedule(queue, now)


def under(lease: Lease, next_attempt_at: int, now: int) -> dict[str, Any]:
    """Return the fields of a task under a lease."""
    return {
        "status": Status.IN_FLIGHT,
        "worker": lease.worker,
        "next_attempt_at": next_attempt_at,
        "wake_at": max(now, next_attempt_at) + lease.length,
    }
