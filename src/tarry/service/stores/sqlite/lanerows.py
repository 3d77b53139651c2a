"""Lanes as their rows have them: when to look at each again, and how many are read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.stores.sqlite.bulk import NO_NUMBER, NUMBER, Bulk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tarry.service.stores.sqlite.bulk import Execute

_READ = Bulk(
    """
WITH asked (id) AS (VALUES {rows})
SELECT json_group_array(json_array(l.id, l.tenant, l.name, l.parked_until, l.probes, l.opened,
    l.paused, l.pending, l.in_flight, l.dead, l.served_at, l.served, l.due_at, l.lapse_at,
    l.ahead_at, l.look_at, l.ready))
FROM asked CROSS JOIN lane AS l ON l.id = asked.id
""",
    "(?)",
)
_COUNT = Bulk(
    """
INSERT INTO lane (id, tenant, name, pending, in_flight, dead, due_at, lapse_at) VALUES {rows}
ON CONFLICT (id) DO UPDATE SET pending = excluded.pending, in_flight = excluded.in_flight,
    dead = excluded.dead, due_at = excluded.due_at, lapse_at = excluded.lapse_at
""",
    f"(?, 0, '', ?, ?, ?, {NUMBER}, {NUMBER})",
)
_MOVE = Bulk(
    """
INSERT INTO lane (id, tenant, name, parked_until, probes, opened, paused, served_at, served,
    ahead_at, look_at, ready) VALUES {rows}
ON CONFLICT (id) DO UPDATE SET parked_until = excluded.parked_until, probes = excluded.probes,
    opened = excluded.opened, paused = excluded.paused, served_at = excluded.served_at,
    served = excluded.served, ahead_at = excluded.ahead_at, look_at = excluded.look_at,
    ready = excluded.ready
""",
    f"(?, 0, '', {NUMBER}, ?, ?, ?, {NUMBER}, ?, {NUMBER}, {NUMBER}, ?)",
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


_decode = msgspec.json.Decoder(list[LaneRow]).decode


def read(execute: Execute, lane_ids: list[int]) -> Iterator[LaneRow]:
    """Read lanes, in any order."""
    for _, cursor in _READ.parts(execute, lane_ids):
        yield from _decode(cursor.fetchone()[0])


def write(execute: Execute, lanes: Iterable[LaneRow]) -> None:
    """Write what is counted of lanes, and the rest of those that have moved."""
    counts: list[Any] = []
    moves: list[Any] = []
    for lane in lanes:
        counts += (lane.id, lane.pending, lane.in_flight, lane.dead)
        counts += (_number(lane.due_at), _number(lane.lapse_at))
        if lane.moved:
            moves += (lane.id, _number(lane.parked_until), lane.probes, lane.opened, lane.paused)
            moves += (_number(lane.served_at), lane.served)
            moves += (_number(lane.ahead_at), _number(lane.look_at), lane.ready)
    _COUNT.run(execute, counts)
    _MOVE.run(execute, moves)


def _number(value: int | None) -> int | str:
    return NO_NUMBER if value is None else value
