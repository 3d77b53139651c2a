"""One transaction's view of lanes, tenants and counts: each is read once, and written once.

A thousand tasks of one lane change its counts a thousand times in memory, and once in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.model import Status

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from tarry.service.stores.sqlite.names import Names
    from tarry.service.stores.sqlite.presence import Presence

MINUTE = 60_000
PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = (int(status) for status in Status)

_LANE = """
SELECT id, tenant, name, parked_until, probes, opened, paused, pending, in_flight, dead, served_at,
       served, due_at, lapse_at, ahead_at, look_at, ready
FROM lane WHERE id = ?
"""
_COUNT_LANE = """
UPDATE lane SET pending = ?, in_flight = ?, dead = ?, due_at = ?, lapse_at = ? WHERE id = ?
"""
_MOVE_LANE = """
UPDATE lane SET pending = ?, in_flight = ?, dead = ?, due_at = ?, lapse_at = ?, parked_until = ?,
    probes = ?, opened = ?, paused = ?, served_at = ?, served = ?, ahead_at = ?, look_at = ?,
    ready = ?
WHERE id = ?
"""
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
_SEEN = """
INSERT INTO series (tenant, minute, outcome, count) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET count = count + excluded.count
"""


class LaneRow(msgspec.Struct, gc=False):
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
    moved: bool = False

    def due(self, at: int) -> None:
        """A task waits for this time."""
        if self.due_at is None or at < self.due_at:
            self.due_at = at
            self.settle()

    def leased(self, until: int) -> None:
        """A task is leased until then."""
        if self.lapse_at is None or until < self.lapse_at:
            self.lapse_at = until
            self.settle()

    def settle(self) -> None:
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

    def rest(self) -> None:
        """Take the lane out of the ring, until its time comes again."""
        self.ready, self.moved = 0, True
        self.settle()

    def place(self, ahead: int | None, look: int | None) -> None:
        """Take the lane out of the ring, to be looked at then."""
        if self.ready or ahead != self.ahead_at or look != self.look_at:
            self.ready, self.ahead_at, self.look_at, self.moved = 0, ahead, look, True


class View:
    """What those who read share: the file as it stands, and the time."""

    def __init__(self, connection: sqlite3.Connection, now: int) -> None:
        self.execute: Callable[..., sqlite3.Cursor] = connection.execute
        self.now = now


class Ledger(View):
    """What the operations of one transaction share. `flush` writes what they changed."""

    def __init__(
        self, connection: sqlite3.Connection, names: Names, now: int, presence: Presence | None
    ) -> None:
        super().__init__(connection, now)
        self.presence = presence
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
            lane = LaneRow(*self.execute(_LANE, (lane_id,)).fetchone())
            self._lanes[lane_id] = lane
        return lane

    def move(
        self, tenant: int, lane: LaneRow, policy: int, old: int | None, new: int | None
    ) -> None:
        """Count a task that goes from one status to another; None: it comes, or goes away."""
        counts = self._tenants.get(tenant)
        if counts is None:
            counts = self._tenants[tenant] = [0] * 6
        live = 0
        if old is not None:
            counts[old] -= 1
            if old == PENDING:
                lane.pending -= 1
                live -= 1
                if not lane.pending:
                    lane.due_at = None
                    lane.settle()
            elif old == IN_FLIGHT:
                lane.in_flight -= 1
                live -= 1
                if not lane.in_flight:
                    lane.lapse_at = None
                if not lane.in_flight or lane.parked_until is not None:
                    lane.settle()  # a probe that ended makes room for another
            elif old == EXHAUSTED:
                lane.dead -= 1
        if new is not None:
            counts[new] += 1
            if new == PENDING:
                lane.pending += 1
                live += 1
            elif new == IN_FLIGHT:
                lane.in_flight += 1
                live += 1
            elif new == EXHAUSTED:
                lane.dead += 1
        if live:
            self._uses[policy] = self._uses.get(policy, 0) + live

    def superseded(self, tenant: int) -> None:
        """Count a finish that came too late."""
        self._tenants.setdefault(tenant, [0] * 6)[5] += 1

    def seen(self, tenant: int, outcome: str) -> None:
        """Count an attempt in the series, its tenant's and everybody's."""
        for whose in (tenant, 0):
            self._seen[whose, outcome] = self._seen.get((whose, outcome), 0) + 1

    def live(self, tenant: int) -> int:
        """Return how many live tasks a tenant has, those of this transaction included."""
        if tenant not in self._live:
            row = self.execute("SELECT pending + in_flight FROM tenant WHERE id = ?", (tenant,))
            self._live[tenant] = row.fetchone()[0]
        counts = self._tenants.get(tenant, (0, 0))
        return self._live[tenant] + counts[0] + counts[1]

    def flush(self) -> None:
        """Write what has changed, and forget what was read."""
        counted: list[tuple[Any, ...]] = []
        moved: list[tuple[Any, ...]] = []
        ahead: dict[int, int] = {}
        look: dict[int, int] = {}
        for lane in self._lanes.values():
            counts = (lane.pending, lane.in_flight, lane.dead, lane.due_at, lane.lapse_at)
            if not lane.moved:
                counted.append((*counts, lane.id))
                continue
            state = (lane.parked_until, lane.probes, lane.opened, lane.paused)
            place = (lane.served_at, lane.served, lane.ahead_at, lane.look_at, lane.ready)
            moved.append((*counts, *state, *place, lane.id))
            if lane.ahead_at is not None:
                ahead[lane.tenant] = min(ahead.get(lane.tenant, lane.ahead_at), lane.ahead_at)
            if lane.look_at is not None:
                look[lane.tenant] = min(look.get(lane.tenant, lane.look_at), lane.look_at)
        self._write(_COUNT_LANE, counted)
        self._write(_MOVE_LANE, moved)
        self._write(_AHEAD, [(at, tenant) for tenant, at in ahead.items()])
        self._write(_LOOK, [(at, tenant) for tenant, at in look.items()])
        self._write(_COUNT_TENANT, [(*counts, who) for who, counts in self._tenants.items()])
        self._write(_USE, [(uses, policy) for policy, uses in self._uses.items() if uses])
        minute = self.now - self.now % MINUTE
        self._write(_SEEN, [(who, minute, what, n) for (who, what), n in self._seen.items()])
        for changes in (self._lanes, self._tenants, self._live, self._uses, self._seen):
            changes.clear()

    def _write(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self.executemany(statement, rows)
