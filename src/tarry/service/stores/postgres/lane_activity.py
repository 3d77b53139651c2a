"""The activity of lanes, see `Store.read_lane_activity`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.lane_activity import add_change, add_latencies
from tarry.service.model import LaneActivity
from tarry.service.stores.postgres.rows import decode_text, encode_texts
from tarry.service.stores.records import decode_activity, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tarry.service.model import BreakerChangeRecord
    from tarry.service.stores.postgres.database import Database, Transaction

# Without the lock, `sweep` could remove a lane meanwhile, which would violate the foreign key.
_CREATE = """
INSERT INTO tarry.lane_activity (lane, activity)
SELECT id, $2 FROM (SELECT id FROM tarry.lane_name
    WHERE name = ANY($1::text[]) ORDER BY id FOR KEY SHARE) AS n
ON CONFLICT DO NOTHING
"""
# Rows are locked in the order of the key, so that processes cannot deadlock.
_LOCK = """
SELECT a.lane, n.name, a.activity
FROM tarry.lane_activity AS a JOIN tarry.lane_name AS n ON n.id = a.lane
WHERE n.name = ANY($1::text[]) ORDER BY a.lane FOR UPDATE OF a
"""
_UPDATE = """
UPDATE tarry.lane_activity AS a SET activity = i.activity
FROM unnest($1::integer[], $2::bytea[]) AS i (lane, activity) WHERE a.lane = i.lane
"""
_READ = """
SELECT n.name, a.activity
FROM tarry.lane_name AS n JOIN tarry.lane_activity AS a ON a.lane = n.id
WHERE n.name = ANY($1::text[])
"""
_NO_ACTIVITY = LaneActivity()


async def record_breaker_change(database: Database, lane: str, change: BreakerChangeRecord) -> None:
    """Add a change of the breaker of a lane."""
    await _update(database, [lane], lambda _, activity, __: add_change(activity, change))


async def record_latencies(
    database: Database, counts_by_lane: dict[str, dict[str, int]], now: int | None
) -> None:
    """Add to the current latency windows of lanes."""

    def add(lane: str, activity: LaneActivity, now: int) -> LaneActivity:
        return add_latencies(activity, counts_by_lane[lane], now)

    await _update(database, counts_by_lane, add, now)


async def read_lane_activity(database: Database, lanes: Sequence[str]) -> dict[str, LaneActivity]:
    """Return the activity of lanes, by name."""
    rows = await database.fetch(_READ, encode_texts(lanes))
    found = ((decode_text(name), decode_activity(packed)) for name, packed in rows)
    return {lane: activity for lane, activity in found if activity != _NO_ACTIVITY}


async def _update(
    database: Database,
    lanes: Iterable[str],
    change: Callable[[str, LaneActivity, int], LaneActivity],
    now: int | None = None,
) -> None:
    names = encode_texts(lanes)

    async def update(tx: Transaction) -> None:
        await tx.fetch(_CREATE, names, encode(_NO_ACTIVITY))
        time = await tx.fetch_value("SELECT tarry.now_1($1)", now)
        rows = await tx.fetch(_LOCK, names)
        changed = [
            encode(change(decode_text(name), decode_activity(packed), time))
            for _, name, packed in rows
        ]
        await tx.fetch(_UPDATE, [lane for lane, *_ in rows], changed)

    await database.transact(update)
