"""Lanes: park, pause, resume, list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.model import LaneRecord
from tarry.service.store import Page
from tarry.service.stores.sqlite.queries import decode_row

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

# Columns as the fields of `LaneRecord`.
_SELECT_LANE = """
SELECT l.name, n.name, l.parked_until, l.probes, l.opened, l.paused, l.pending, l.in_flight, l.dead,
       l.served_at
FROM lane AS l CROSS JOIN tenant AS n ON n.id = l.tenant
"""


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


def unpark(tx: Transaction, name: str, *, end_pause: bool = False) -> None:
    """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
    row = tx.execute("SELECT id FROM lane WHERE name = ?", (name,)).fetchone()
    if row is not None:
        lane = tx.lane(row[0])
        lane.parked_until, lane.probes, lane.opened = None, 0, 0
        lane.paused = 0 if end_pause else lane.paused
        lane.leave_rotation()


def resume(tx: Transaction, name: str) -> None:
    """End the parking and the pause of a lane."""
    unpark(tx, name, end_pause=True)


def get_lane(tx: ReadTransaction, name: str) -> LaneRecord | None:
    """Return a lane, or None."""
    row = tx.execute(f"{_SELECT_LANE} WHERE l.name = ?", (name,)).fetchone()
    return None if row is None else decode_row(row, LaneRecord)


def list_lanes(
    tx: ReadTransaction, tenant: str | None, cursor: str | None, limit: int
) -> Page[LaneRecord]:
    """List lanes by name; the cursor is the last name of the previous page."""
    where = "WHERE l.name > ?1"
    if tenant is not None:
        where += " AND l.tenant = (SELECT id FROM tenant WHERE name = ?3)"
    statement = f"{_SELECT_LANE} {where} ORDER BY l.name LIMIT ?2"
    names = () if tenant is None else (tenant,)
    rows = tx.execute(statement, (cursor or "", limit + 1, *names)).fetchall()
    lanes = [decode_row(row, LaneRecord) for row in rows[:limit]]
    return Page(lanes, lanes[-1].name if len(rows) > limit and lanes else None)
