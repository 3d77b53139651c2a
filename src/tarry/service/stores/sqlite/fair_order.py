"""Whose turn it is: tenants in turn, and of each its least recently served lane.

Tenants and lanes rest until a time that is known to be early enough, and are then made *ready*: a
claim looks at those only. One that was served goes to the back; one with nothing left to give
rests again. So the cost of a claim grows with what it gives, not with what waits, rests or is
parked.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tarry.service.stores.sqlite.transaction import LaneRow, Transaction

_TENANTS_AT_ONCE = 1000
_PAGE = 16

_WAKE_TENANTS = (
    """
    UPDATE tenant SET ready = 1 WHERE id IN (
        SELECT id FROM tenant WHERE ready = 0 AND ahead_at <= ? ORDER BY ahead_at LIMIT ?)
    """,
    """
    UPDATE tenant SET ready = 1 WHERE id IN (
        SELECT id FROM tenant WHERE ready = 0 AND look_at <= ? ORDER BY look_at LIMIT ?)
    """,
)
_WAKE_LANES = (
    """
    UPDATE lane SET ready = 1 WHERE id IN (
        SELECT id FROM lane WHERE tenant = ? AND ready = 0 AND ahead_at <= ?
        ORDER BY ahead_at LIMIT ?)
    """,
    """
    UPDATE lane SET ready = 1 WHERE id IN (
        SELECT id FROM lane WHERE tenant = ? AND ready = 0 AND look_at <= ?
        ORDER BY look_at LIMIT ?)
    """,
)
_TENANTS = """
SELECT served, id FROM tenant WHERE ready = 1 AND (served, id) > (?, ?) ORDER BY served, id LIMIT ?
"""
_LANES = """
SELECT served, id, name FROM lane WHERE tenant = ? AND ready = 1 AND (served, id) > (?, ?)
ORDER BY served, id LIMIT ?
"""
_BOUNDS = """
SELECT (SELECT min(wake_at) FROM state WHERE lane = ?1 AND status = 0),
       (SELECT min(wake_at) FROM state WHERE lane = ?1 AND status = 1)
"""
_HELD = """
SELECT count(*), min(wake_at) FROM (
    SELECT wake_at FROM state WHERE lane = ? AND status = 1 AND wake_at > ?
    ORDER BY wake_at LIMIT ?)
"""
_READY = "SELECT 1 FROM lane WHERE tenant = ? AND ready = 1 LIMIT 1"
_REST = """
SELECT (SELECT min(ahead_at) FROM lane WHERE tenant = ?1 AND ready = 0 AND ahead_at IS NOT NULL),
       (SELECT min(look_at) FROM lane WHERE tenant = ?1 AND ready = 0 AND look_at IS NOT NULL)
"""
_SOONEST = (
    """
    SELECT ahead_at, id FROM tenant WHERE ready = 0 AND ahead_at IS NOT NULL
    ORDER BY ahead_at LIMIT 1
    """,
    """
    SELECT look_at, id FROM tenant WHERE ready = 0 AND look_at IS NOT NULL
    ORDER BY look_at LIMIT 1
    """,
)
_BOUND = "UPDATE tenant SET ahead_at = ?, look_at = ?, ready = 0 WHERE id = ?"


class FairOrder:
    """One walk around the ring. Seats are changed after it, by `seat`, not during it."""

    def __init__(self, tx: Transaction, horizon: int, limit: int, skip: Collection[str]) -> None:
        self._tx = tx
        self._horizon = horizon
        self._times = (tx.now + horizon, tx.now)
        self._wakes = 2 * limit + 64  # lanes of a tenant that become ready in one claim
        self._skip = frozenset(skip)
        self._tenants: list[int] = []
        self._ended: set[int] = set()
        self._lanes: list[LaneRow] = []

    def turns(self) -> Iterator[LaneRow]:
        """One lane of each tenant, then another of each that has more, and so on."""
        for statement, until in zip(_WAKE_TENANTS, self._times, strict=True):
            self._tx.execute(statement, (until, _TENANTS_AT_ONCE))
        walks: deque[tuple[int, Iterator[LaneRow]]] = deque()
        for tenant in self._ready_tenants():
            self._tenants.append(tenant)
            walk = self._ready_lanes(tenant)
            if lane := self._next(tenant, walk):
                yield lane
                walks.append((tenant, walk))
        while walks:
            tenant, walk = walks.popleft()
            if lane := self._next(tenant, walk):
                yield lane
                walks.append((tenant, walk))

    def _next(self, tenant: int, walk: Iterator[LaneRow]) -> LaneRow | None:
        lane = next(walk, None)
        if lane is None:
            self._ended.add(tenant)
        else:
            self._lanes.append(lane)
        return lane

    def _ready_tenants(self) -> Iterator[int]:
        served, tenant = -1, -1
        while page := self._tx.execute(_TENANTS, (served, tenant, _PAGE)).fetchall():
            yield from (tenant for _, tenant in page)
            served, tenant = page[-1]

    def _ready_lanes(self, tenant: int) -> Iterator[LaneRow]:
        execute = self._tx.execute
        for statement, until in zip(_WAKE_LANES, self._times, strict=True):
            execute(statement, (tenant, until, self._wakes))
        served, lane = -1, -1
        while page := execute(_LANES, (tenant, served, lane, _PAGE)).fetchall():
            for _, lane, name in page:
                if name not in self._skip:
                    yield self._tx.lane(lane)
            served, lane, _ = page[-1]

    def held(self, lane: LaneRow) -> tuple[int, int | None]:
        """How many leases of a half-open lane run, up to its probes, and when the first ends."""
        count, until = self._tx.execute(_HELD, (lane.id, self._tx.now, lane.probes)).fetchone()
        return count, until

    def seat(self, gave: Collection[int]) -> None:
        """Put lanes that gave something at the back, and let rest those that have no more."""
        tx = self._tx
        turn = first = tx.execute("SELECT value FROM meta WHERE name = 'turn'").fetchone()[0]
        served: dict[int, int] = {}
        for lane in self._lanes:
            lane.schedule_changed = True
            if lane.id in gave:
                turn += 1
                lane.served_at, lane.served = tx.now, turn
                served[lane.tenant] = turn
            self._settle(lane)
        tx.flush()
        if turn != first:
            tx.execute("UPDATE meta SET value = ? WHERE name = 'turn'", (turn,))
            rows = [(turn, tenant) for tenant, turn in served.items()]
            tx.executemany("UPDATE tenant SET served = ? WHERE id = ?", rows)

    def _settle(self, lane: LaneRow) -> None:
        ahead, now = self._times
        lane.due_at, lane.lapse_at = self._tx.execute(_BOUNDS, (lane.id,)).fetchone()
        if lane.parked_until is not None:
            if lane.parked_until > now:
                lane.place(None, lane.parked_until)
                return
            held, until = self.held(lane)
            if held >= lane.probes:
                lane.place(None, until)
                return
        is_due = lane.due_at is not None and lane.due_at <= ahead
        is_abandoned = lane.lapse_at is not None and lane.lapse_at <= now
        if not (is_due or is_abandoned):
            lane.leave_rotation()

    def next_at(self, *, full: bool) -> int | None:
        """A lower bound for the next claim, after `seat`; tenants without a ready lane rest now.

        `full`: the claim ended by its limit, so who was not asked may have something.
        """
        tx, now = self._tx, self._tx.now
        times: list[int] = []
        for tenant in self._tenants:
            ahead, look = tx.execute(_REST, (tenant,)).fetchone()
            if not tx.execute(_READY, (tenant,)).fetchall():
                tx.execute(_BOUND, (ahead, look, tenant))
            elif tenant in self._ended:  # its ready lanes were skipped
                times += self._soonest(ahead, look)
        if any(lane.ready for lane in self._lanes):
            return now
        if full and tx.execute(_TENANTS, (-1, -1, 1)).fetchall():
            return now
        times += self._soonest(self._bound(0), self._bound(1))
        return max(now, min(times)) if times else None

    def _bound(self, which: int) -> int | None:
        """The earliest `ahead_at` or `look_at` of tenants at rest; what is too early is mended."""
        execute = self._tx.execute
        bound: int | None = None
        for _ in range(_PAGE):
            row = execute(_SOONEST[which]).fetchone()
            if row is None:
                return None
            bound, tenant = row
            exact = execute(_REST, (tenant,)).fetchone()
            if exact[which] == bound:
                break
            execute(_BOUND, (*exact, tenant))
        return bound

    def _soonest(self, ahead: int | None, look: int | None) -> list[int]:
        times = (None if ahead is None else ahead - self._horizon, look)
        return [at for at in times if at is not None]
