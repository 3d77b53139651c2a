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


def park(tx: Transaction, lane: str, until: int, probes: int, opened: int) -> None:
    """Lease no task of a lane until this time, and afterwards `probes` tasks at a time."""
    row = tx.lane(tx.names.lane_id(lane))
    row.parked_until, row.probes, row.opened = until, probes, opened
    row.leave_rotation()


def pause(tx: Transaction, lane: str) -> None:
    """Lease no task of a lane until it is resumed."""
    row = tx.lane(tx.names.lane_id(lane))
    row.paused = 1
    row.leave_rotation()


def unpark(tx: Transaction, lane: str) -> None:
    """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
    for (lane_id,) in tx.execute("SELECT id FROM lane WHERE name = ?", (lane,)):
        row = tx.lane(lane_id)
        row.parked_until, row.probes, row.opened = None, 0, 0
        row.leave_rotation()


def resume(tx: Transaction, lane: str) -> None:
    """End the parking and the pause of a lane."""
    for (lane_id,) in tx.execute("SELECT id FROM lane WHERE name = ?", (lane,)):
        row = tx.lane(lane_id)
        row.parked_until, row.probes, row.opened, row.paused = None, 0, 0, 0
        row.leave_rotation()


def get_lane(tx: ReadTransaction, name: str) -> LaneRecord | None:
    """Return a lane, or None."""
    row = tx.execute(f"{_SELECT_LANE} WHERE l.name = ?", (name,)).fetchone()
    return None if row is None else decode_row(row, LaneRecord)


def list_lanes(
    tx: ReadTransaction, tenant: str | None, cursor: str | None = None, limit: int = 100
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
