"""The activity of lanes, see `Store.read_lane_activity`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tarry.service.lane_activity import add_change, add_latencies
from tarry.service.model import BreakerChangeRecord, LaneActivity
from tarry.service.stores.records import decode_activity, encode
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.transaction import WriteTransaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.stores.sqlite.transaction import ReadTransaction


@write_operation
def record_breaker_change(tx: WriteTransaction, lane: str, change: BreakerChangeRecord) -> None:
    """Add a change of the breaker of a lane."""
    _update(tx, lane, lambda activity: add_change(activity, change))


@write_operation
def record_latencies(tx: WriteTransaction, counts_by_lane: dict[str, dict[str, int]]) -> None:
    """Add to the current latency windows of lanes."""
    for lane, counts in counts_by_lane.items():
        _update(tx, lane, partial(add_latencies, counts=counts, now=tx.now))


def read_lane_activity(tx: ReadTransaction, lanes: Sequence[str]) -> dict[str, LaneActivity]:
    """Return the activity of lanes, by name."""
    found = ((lane, _read(tx, lane)) for lane in lanes)
    return {lane: activity for lane, activity in found if activity is not None}


def _read(tx: ReadTransaction, lane: str) -> LaneActivity | None:
    row = tx.execute("SELECT activity FROM lane_activity WHERE lane = ?", (lane,)).fetchone()
    return None if row is None else decode_activity(row[0])


def _update(
    tx: WriteTransaction, lane: str, change: Callable[[LaneActivity], LaneActivity]
) -> None:
    if tx.execute("SELECT 1 FROM lane WHERE name = ?", (lane,)).fetchone() is None:
        return
    activity = change(_read(tx, lane) or LaneActivity())
    if activity == LaneActivity():
        tx.execute("DELETE FROM lane_activity WHERE lane = ?", (lane,))
    else:
        tx.execute(
            "INSERT OR REPLACE INTO lane_activity (lane, activity) VALUES (?, ?)",
            (lane, bytearray(encode(activity))),
        )
