"""Lanes: parked, paused, opened and listed."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import LaneRecord
from tarry.service.store import Page

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import LaneRow, ReadTransaction, Transaction

_LANE = """
SELECT l.name, n.name, l.parked_until, l.probes, l.opened, l.paused, l.pending, l.in_flight, l.dead,
       l.served_at
FROM lane AS l CROSS JOIN tenant AS n ON n.id = l.tenant
"""
_BY_NAME = _LANE + "WHERE l.name = ?"
_ALL = _LANE + "WHERE l.name > ? ORDER BY l.name LIMIT ?"
_OF_TENANT = (
    f"{_LANE} WHERE l.tenant = (SELECT id FROM tenant WHERE name = ?) AND l.name > ?"
    " ORDER BY l.name LIMIT ?"
)


def park(tx: Transaction, name: str, until: int, probes: int, opened: int) -> None:
    """Give no task of the lane until then, and afterwards `probes` at a time."""
    get_lane = tx.lane(tx.names.lane_id(name))
    get_lane.parked_until, get_lane.probes, get_lane.opened = until, probes, opened
    get_lane.leave_rotation()


def pause(tx: Transaction, name: str) -> None:
    """Give no task of the lane until somebody resumes it."""
    get_lane = tx.lane(tx.names.lane_id(name))
    get_lane.paused = 1
    get_lane.leave_rotation()


def unpark(tx: Transaction, name: str) -> None:
    """Open a lane whose downstream has recovered; one that an operator paused stays paused."""
    found = _opened(tx, name)
    if found is not None:
        found.leave_rotation()


def resume(tx: Transaction, name: str) -> None:
    """Open a lane: forget that it was parked or paused."""
    found = _opened(tx, name)
    if found is not None:
        found.paused = 0
        found.leave_rotation()


def _opened(tx: Transaction, name: str) -> LaneRow | None:
    found = tx.execute("SELECT id FROM lane WHERE name = ?", (name,)).fetchone()
    if found is None:
        return None
    get_lane = tx.lane(found[0])
    get_lane.parked_until, get_lane.probes, get_lane.opened = None, 0, 0
    return get_lane


def get_lane(tx: ReadTransaction, name: str) -> LaneRecord | None:
    """Return one lane."""
    row = tx.execute(_BY_NAME, (name,)).fetchone()
    return None if row is None else _lane_of(row)


def list_lanes(
    tx: ReadTransaction, tenant: str | None, cursor: str | None, limit: int
) -> Page[LaneRecord]:
    """List lanes by name; the cursor is the last name."""
    after = cursor or ""
    if tenant is None:
        rows = tx.execute(_ALL, (after, limit + 1)).fetchall()
    else:
        rows = tx.execute(_OF_TENANT, (tenant, after, limit + 1)).fetchall()
    found = [_lane_of(row) for row in rows[:limit]]
    return Page(found, found[-1].name if len(rows) > limit and found else None)


def _lane_of(row: tuple[Any, ...]) -> LaneRecord:
    name, tenant, parked_until, probes, opened, paused, pending, in_flight, dead, served_at = row
    return LaneRecord(
        name=name,
        tenant=tenant,
        parked_until=parked_until,
        probes=probes,
        opened=opened,
        paused=bool(paused),
        pending=pending,
        in_flight=in_flight,
        dead=dead,
        served_at=served_at,
    )
