"""Lanes: park, pause, resume, list."""

# ruff: noqa: S608 - statements are built from constants

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.model import LaneRecord
from tarry.service.store import Page
from tarry.service.stores.sqlite.queries import decode_row

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import LaneRow, ReadTransaction, Transaction

# Columns as the fields of `LaneRecord`.
_SELECT_LANE = """
SELECT l.name, n.name, l.parked_until, l.probes, l.opened, l.paused, l.pending, l.in_flight, l.dead,
       l.served_at
FROM lane AS l CROSS JOIN tenant AS n ON n.id = l.tenant
"""
_BY_NAME = _SELECT_LANE + "WHERE l.name = ?"
_PAGE_OF_ALL = _SELECT_LANE + "WHERE l.name > ? ORDER BY l.name LIMIT ?"
_PAGE_OF_TENANT = (
    f"{_SELECT_LANE} WHERE l.tenant = (SELECT id FROM tenant WHERE name = ?) AND l.name > ?"
    " ORDER BY l.name LIMIT ?"
)


def park(tx: Transaction, name: str, until: int, probes: int, opened: int) -> None:
    """Lease no task of a lane until this time, and afterwards `probes` tasks at a time."""
    lane = tx.lane(tx.names.lane_id(name))
    lane.parked_until, lane.probes, lane.opened = until, probes, opened
    lane.leave_rotation()


def pause(tx: Transaction, name: str) -> None:
    """Lease no task of a lane until it is resumed."""
    lane = tx.lane(tx.names.lane_id(name))
    lane.paused = 1
    lane.leave_rotation()


def unpark(tx: Transaction, name: str) -> None:
    """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
    lane = _clear_parking(tx, name)
    if lane is not None:
        lane.leave_rotation()


def resume(tx: Transaction, name: str) -> None:
    """End the parking and the pause of a lane."""
    lane = _clear_parking(tx, name)
    if lane is not None:
        lane.paused = 0
        lane.leave_rotation()


def _clear_parking(tx: Transaction, name: str) -> LaneRow | None:
    row = tx.execute("SELECT id FROM lane WHERE name = ?", (name,)).fetchone()
    if row is None:
        return None
    lane = tx.lane(row[0])
    lane.parked_until, lane.probes, lane.opened = None, 0, 0
    return lane


def get_lane(tx: ReadTransaction, name: str) -> LaneRecord | None:
    """Return a lane, or None."""
    row = tx.execute(_BY_NAME, (name,)).fetchone()
    return None if row is None else decode_row(row, LaneRecord)


def list_lanes(
    tx: ReadTransaction, tenant: str | None, cursor: str | None, limit: int
) -> Page[LaneRecord]:
    """List lanes by name; the cursor is the last name of the previous page."""
    after = cursor or ""
    if tenant is None:
        rows = tx.execute(_PAGE_OF_ALL, (after, limit + 1)).fetchall()
    else:
        rows = tx.execute(_PAGE_OF_TENANT, (tenant, after, limit + 1)).fetchall()
    lanes = [decode_row(row, LaneRecord) for row in rows[:limit]]
    return Page(lanes, lanes[-1].name if len(rows) > limit and lanes else None)
