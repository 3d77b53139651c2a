"""Sums per interval of time, see `Store.record_series`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tarry.service.store import SERIES_RETENTION_MS, SeriesPoint
from tarry.service.stores.records import decode_sums, encode
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.transaction import WriteTransaction

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction


@write_operation
def record_series(tx: WriteTransaction, points: Sequence[SeriesPoint]) -> None:
    """Add sums to the stored points."""
    for point in points:
        key = point.step_ms, point.at
        row = tx.execute("SELECT sums FROM series_point WHERE step = ? AND at = ?", key).fetchone()
        sums = Counter(point.sums)
        if row is not None:
            sums.update(decode_sums(row[0]))
        tx.execute(
            "INSERT OR REPLACE INTO series_point (step, at, sums) VALUES (?, ?, ?)",
            (*key, bytearray(encode(sums))),
        )


def list_series(tx: ReadTransaction, step_ms: int, since: int) -> list[SeriesPoint]:
    """Return the points of an interval length, sorted by time."""
    first = max(since - since % step_ms, tx.now - SERIES_RETENTION_MS[step_ms])
    rows = tx.execute(
        "SELECT at, sums FROM series_point WHERE step = ? AND at BETWEEN ? AND ? ORDER BY at",
        (step_ms, first, tx.now),
    ).fetchall()
    return [SeriesPoint(step_ms, at, decode_sums(sums)) for at, sums in rows]


def remove_old_points(tx: WriteTransaction) -> None:
    """Remove points after their retention time."""
    for step_ms, kept_ms in SERIES_RETENTION_MS.items():
        tx.execute(
            "DELETE FROM series_point WHERE step = ? AND at < ?", (step_ms, tx.now - kept_ms)
        )
