"""One transaction's view of lanes, tenants and counts: each is read once, and written once.

A thousand tasks of one lane change its counts a thousand times in memory, and once in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import Status
from tarry.service.stores.sqlite import lanerows
from tarry.service.stores.sqlite.bulk import Bulk

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable

    from tarry.service.stores.sqlite.lanerows import LaneRow
    from tarry.service.stores.sqlite.names import Names
    from tarry.service.stores.sqlite.presence import Presence

MINUTE = 60_000
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
_SEEN = Bulk(
    """
INSERT INTO series (tenant, minute, outcome, count) VALUES {rows}
ON CONFLICT DO UPDATE SET count = count + excluded.count
""",
    "(?, ?, ?, ?)",
)


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
            self.load([lane_id])
            lane = self._lanes[lane_id]
        return lane

    def load(self, lane_ids: Iterable[int]) -> None:
        """Read lanes that will be asked for, with one statement instead of one for each."""
        missing = [lane_id for lane_id in lane_ids if lane_id not in self._lanes]
        for lane in lanerows.read(self.execute, missing):
            self._lanes[lane.id] = lane

    def move(
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
        live = 0
        if old is not None:
            counts[old] -= tasks
            if old == PENDING:
                lane.pending -= tasks
                live -= tasks
                if not lane.pending:
                    lane.due_at = None
                    lane.settle()
            elif old == IN_FLIGHT:
                lane.in_flight -= tasks
                live -= tasks
                if not lane.in_flight:
                    lane.lapse_at = None
                if not lane.in_flight or lane.parked_until is not None:
                    lane.settle()  # a probe that ended makes room for another
            elif old == EXHAUSTED:
                lane.dead -= tasks
        if new is not None:
            counts[new] += tasks
            if new == PENDING:
                lane.pending += tasks
                live += tasks
            elif new == IN_FLIGHT:
                lane.in_flight += tasks
                live += tasks
            elif new == EXHAUSTED:
                lane.dead += tasks
        if live:
            self._uses[policy] = self._uses.get(policy, 0) + live

    def superseded(self, tenant: int) -> None:
        """Count a finish that came too late."""
        self._tenants.setdefault(tenant, [0] * 6)[5] += 1

    def seen(self, tenant: int, outcome: str) -> None:
        """Count an attempt in the series."""
        self._seen[tenant, outcome] = self._seen.get((tenant, outcome), 0) + 1

    def live(self, tenant: int) -> int:
        """Return how many live tasks a tenant has, those of this transaction included."""
        if tenant not in self._live:
            row = self.execute("SELECT pending + in_flight FROM tenant WHERE id = ?", (tenant,))
            self._live[tenant] = row.fetchone()[0]
        counts = self._tenants.get(tenant, (0, 0))
        return self._live[tenant] + counts[0] + counts[1]

    def flush(self) -> None:
        """Write what has changed, and forget what was read."""
        lanerows.write(self.execute, self._lanes.values())
        ahead: dict[int, int] = {}
        look: dict[int, int] = {}
        for lane in self._lanes.values():
            if lane.moved and lane.ahead_at is not None:
                ahead[lane.tenant] = min(ahead.get(lane.tenant, lane.ahead_at), lane.ahead_at)
            if lane.moved and lane.look_at is not None:
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
        minute = self.now - self.now % MINUTE
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
