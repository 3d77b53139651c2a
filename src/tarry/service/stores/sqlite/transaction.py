"""One transaction's view of lanes, tenants and counts: each is read once, and written once.

A thousand tasks of one lane change its counts a thousand times in memory, and once in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.model import Status
from tarry.service.stores.sqlite.multirow import NULL_NUMBER, NULLABLE_NUMBER, MultiRowStatement

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator

    from tarry.service.stores.sqlite.interning import InternedNames
    from tarry.service.stores.sqlite.multirow import Execute
    from tarry.service.stores.sqlite.worker_locks import WorkerLock

MINUTE_MS = 60_000
PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = (int(status) for status in Status)

_COUNT_TENANT = """
UPDATE tenant SET pending = pending + ?, in_flight = in_flight + ?, succeeded = succeeded + ?,
    exhausted = exhausted + ?, cancelled = cancelled + ?, superseded = superseded + ?
WHERE id = ?
"""
_AHEAD = """
UPDATE tenant SET ahead_at = ?1
WHERE id = ?2 AND ready = 0 AND (ahead_at IS NULL OR ahead_at > ?1)
"""
_LOOK = """
UPDATE tenant SET look_at = ?1
WHERE id = ?2 AND ready = 0 AND (look_at IS NULL OR look_at > ?1)
"""
_USE = "UPDATE used SET live = live + ? WHERE id = ?"
_SEEN = MultiRowStatement(
    """
INSERT INTO series (tenant, minute, outcome, count) VALUES {rows}
ON CONFLICT DO UPDATE SET count = count + excluded.count
""",
    "(?, ?, ?, ?)",
)
_READ_LANES = MultiRowStatement(
    """
WITH asked (id) AS (VALUES {rows})
SELECT json_group_array(json_array(l.id, l.tenant, l.name, l.parked_until, l.probes, l.opened,
    l.paused, l.pending, l.in_flight, l.dead, l.served_at, l.served, l.due_at, l.lapse_at,
    l.ahead_at, l.look_at, l.ready))
FROM asked CROSS JOIN lane AS l ON l.id = asked.id
""",
    "(?)",
)
_WRITE_LANE_COUNTS = MultiRowStatement(
    """
INSERT INTO lane (id, tenant, name, pending, in_flight, dead, due_at, lapse_at) VALUES {rows}
ON CONFLICT (id) DO UPDATE SET pending = excluded.pending, in_flight = excluded.in_flight,
    dead = excluded.dead, due_at = excluded.due_at, lapse_at = excluded.lapse_at
""",
    f"(?, 0, '', ?, ?, ?, {NULLABLE_NUMBER}, {NULLABLE_NUMBER})",
)
_WRITE_LANE_SCHEDULE = MultiRowStatement(
    """
INSERT INTO lane (id, tenant, name, parked_until, probes, opened, paused, served_at, served,
    ahead_at, look_at, ready) VALUES {rows}
ON CONFLICT (id) DO UPDATE SET parked_until = excluded.parked_until, probes = excluded.probes,
    opened = excluded.opened, paused = excluded.paused, served_at = excluded.served_at,
    served = excluded.served, ahead_at = excluded.ahead_at, look_at = excluded.look_at,
    ready = excluded.ready
""",
    f"(?, 0, '', {NULLABLE_NUMBER}, ?, ?, ?, {NULLABLE_NUMBER}, ?, {NULLABLE_NUMBER}, "
    f"{NULLABLE_NUMBER}, ?)",
)


class LaneRow(msgspec.Struct, gc=False, array_like=True):
    """A lane as its row has it, and whether its place among the lanes has changed."""

    id: int
    tenant: int
    name: str
    parked_until: int | None
    probes: int
    opened: int
    paused: int
    pending: int
    in_flight: int
    dead: int
    served_at: int | None
    served: int
    due_at: int | None
    lapse_at: int | None
    ahead_at: int | None
    look_at: int | None
    ready: int
    schedule_changed: bool = False

    def due(self, at: int) -> None:
        """A task waits for this time."""
        if self.due_at is None or at < self.due_at:
            self.due_at = at
            self.reschedule()

    def leased(self, until: int) -> None:
        """A task is leased until then."""
        if self.lapse_at is None or until < self.lapse_at:
            self.lapse_at = until
            self.reschedule()

    def reschedule(self) -> None:
        """Set when to look at the lane again; one that is ready keeps its place."""
        if self.ready:
            return
        ahead, look = self.due_at, self.lapse_at
        if self.paused:
            ahead = look = None
        elif self.parked_until is not None:
            # Nothing is taken ahead while it is parked, so what is due then counts from its end.
            if ahead is not None and ahead <= self.parked_until:
                ahead, look = None, self.parked_until
            elif look is not None:
                look = max(look, self.parked_until)
        self.place(ahead, look)

    def leave_rotation(self) -> None:
        """Take the lane out of the ring, until its time comes again."""
        self.ready, self.schedule_changed = 0, True
        self.reschedule()

    def place(self, ahead: int | None, look: int | None) -> None:
        """Take the lane out of the ring, to be looked at then."""
        if self.ready or ahead != self.ahead_at or look != self.look_at:
            self.ready, self.ahead_at, self.look_at, self.schedule_changed = 0, ahead, look, True


_decode = msgspec.json.Decoder(list[LaneRow]).decode


def read_lanes(execute: Execute, lane_ids: list[int]) -> Iterator[LaneRow]:
    """Read lanes, in any order."""
    for _, cursor in _READ_LANES.parts(execute, lane_ids):
        yield from _decode(cursor.fetchone()[0])


def write_lanes(execute: Execute, lanes: Iterable[LaneRow]) -> None:
    """Write what is counted of lanes, and the rest of those that have moved."""
    counts: list[Any] = []
    moves: list[Any] = []
    for lane in lanes:
        counts += (lane.id, lane.pending, lane.in_flight, lane.dead)
        counts += (_number(lane.due_at), _number(lane.lapse_at))
        if lane.schedule_changed:
            moves += (lane.id, _number(lane.parked_until), lane.probes, lane.opened, lane.paused)
            moves += (_number(lane.served_at), lane.served)
            moves += (_number(lane.ahead_at), _number(lane.look_at), lane.ready)
    _WRITE_LANE_COUNTS.run(execute, counts)
    _WRITE_LANE_SCHEDULE.run(execute, moves)


def _number(value: int | None) -> int | str:
    return NULL_NUMBER if value is None else value


class ReadTransaction:
    """What those who read share: the file as it stands, and the time."""

    def __init__(self, connection: sqlite3.Connection, now: int) -> None:
        self.execute: Callable[..., sqlite3.Cursor] = connection.execute
        self.now = now


class Transaction(ReadTransaction):
    """What the operations of one transaction share. `flush` writes what they changed."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        names: InternedNames,
        now: int,
        worker_lock: WorkerLock | None,
    ) -> None:
        super().__init__(connection, now)
        self.worker_lock = worker_lock
        self.executemany: Callable[..., sqlite3.Cursor] = connection.executemany
        self.names = names
        self.lost: int = 0
        """Attempts that this transaction has found abandoned."""
        self._lanes: dict[int, LaneRow] = {}
        self._tenants: dict[int, list[int]] = {}
        self._live: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._seen: dict[tuple[int, str], int] = {}

    def lane(self, lane_id: int) -> LaneRow:
        """Return a lane; what is changed in it is written by `flush`."""
        lane = self._lanes.get(lane_id)
        if lane is None:
            self.load_lanes([lane_id])
            lane = self._lanes[lane_id]
        return lane

    def load_lanes(self, lane_ids: Iterable[int]) -> None:
        """Read lanes that will be asked for, with one statement instead of one for each."""
        missing = [lane_id for lane_id in lane_ids if lane_id not in self._lanes]
        for lane in read_lanes(self.execute, missing):
            self._lanes[lane.id] = lane

    def count_transition(
        self,
        tenant: int,
        lane: LaneRow,
        policy: int,
        old: int | None,
        new: int | None,
        tasks: int = 1,
    ) -> None:
        """Count tasks that go from one status to another; None: they come, or go away."""
        counts = self._tenants.get(tenant)
        if counts is None:
            counts = self._tenants[tenant] = [0] * 6
        live_tasks = 0
        if old is not None:
            counts[old] -= tasks
            if old == PENDING:
                lane.pending -= tasks
                live_tasks -= tasks
                if not lane.pending:
                    lane.due_at = None
                    lane.reschedule()
            elif old == IN_FLIGHT:
                lane.in_flight -= tasks
                live_tasks -= tasks
                if not lane.in_flight:
                    lane.lapse_at = None
                if not lane.in_flight or lane.parked_until is not None:
                    lane.reschedule()  # a probe that ended makes room for another
            elif old == EXHAUSTED:
                lane.dead -= tasks
        if new is not None:
            counts[new] += tasks
            if new == PENDING:
                lane.pending += tasks
                live_tasks += tasks
            elif new == IN_FLIGHT:
                lane.in_flight += tasks
                live_tasks += tasks
            elif new == EXHAUSTED:
                lane.dead += tasks
        if live_tasks:
            self._uses[policy] = self._uses.get(policy, 0) + live_tasks

    def count_superseded(self, tenant: int) -> None:
        """Count a finish that came too late."""
        self._tenants.setdefault(tenant, [0] * 6)[5] += 1

    def count_attempt(self, tenant: int, outcome: str) -> None:
        """Count an attempt in the series."""
        self._seen[tenant, outcome] = self._seen.get((tenant, outcome), 0) + 1

    def live_tasks(self, tenant: int) -> int:
        """Return how many live tasks a tenant has, those of this transaction included."""
        if tenant not in self._live:
            row = self.execute("SELECT pending + in_flight FROM tenant WHERE id = ?", (tenant,))
            self._live[tenant] = row.fetchone()[0]
        counts = self._tenants.get(tenant, (0, 0))
        return self._live[tenant] + counts[0] + counts[1]

    def flush(self) -> None:
        """Write what has changed, and forget what was read."""
        write_lanes(self.execute, self._lanes.values())
        ahead: dict[int, int] = {}
        look: dict[int, int] = {}
        for lane in self._lanes.values():
            if lane.schedule_changed and lane.ahead_at is not None:
                ahead[lane.tenant] = min(ahead.get(lane.tenant, lane.ahead_at), lane.ahead_at)
            if lane.schedule_changed and lane.look_at is not None:
                look[lane.tenant] = min(look.get(lane.tenant, lane.look_at), lane.look_at)
        self._write(_AHEAD, [(at, tenant) for tenant, at in ahead.items()])
        self._write(_LOOK, [(at, tenant) for tenant, at in look.items()])
        self._write(_COUNT_TENANT, [(*counts, who) for who, counts in self._tenants.items()])
        self._write(_USE, [(uses, policy) for policy, uses in self._uses.items() if uses])
        self._write_series()
        for changes in (self._lanes, self._tenants, self._live, self._uses, self._seen):
            changes.clear()

    def _write_series(self) -> None:
        """Write what was seen of each tenant, and of all."""
        minute = self.now - self.now % MINUTE_MS
        total: dict[str, int] = {}
        points: list[Any] = []
        for (tenant, outcome), count in self._seen.items():
            points += (tenant, minute, outcome, count)
            total[outcome] = total.get(outcome, 0) + count
        for outcome, count in total.items():
            points += (0, minute, outcome, count)
        _SEEN.run(self.execute, points)

    def _write(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self.executemany(statement, rows)
