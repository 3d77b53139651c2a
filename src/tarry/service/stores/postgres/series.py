"""Sums per interval of time, see `Store.record_series`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.store import SERIES_RETENTION_MS, SeriesPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.stores.postgres.database import Database

# Rows are locked in the order of the key, so that processes cannot deadlock.
_RECORD_SERIES = """
INSERT INTO tarry.series_point AS p (step, at, sums)
SELECT step, at, sums::jsonb
FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS i (step, at, sums) ORDER BY step, at
ON CONFLICT (step, at) DO UPDATE SET sums = (
    SELECT jsonb_object_agg(name, total) FROM (
        SELECT name, sum(value::bigint) AS total FROM (
            SELECT * FROM jsonb_each_text(p.sums)
            UNION ALL SELECT * FROM jsonb_each_text(excluded.sums)) AS entry (name, value)
        GROUP BY name) AS added)
"""
_LIST_SERIES = """
SELECT at, sums::text FROM tarry.series_point
WHERE step = $1 AND at BETWEEN greatest($2, tarry.now_1($3) - $4) AND tarry.now_1($3) ORDER BY at
"""
_REMOVE_OLD_POINTS = """
DELETE FROM tarry.series_point AS p
USING unnest($1::bigint[], $2::bigint[]) AS i (step, first) WHERE p.step = i.step AND p.at < i.first
"""
_decode_sums = msgspec.json.Decoder(dict[str, int]).decode


async def record_series(database: Database, points: Sequence[SeriesPoint]) -> None:
    """Add sums to the stored points."""
    steps = [point.step_ms for point in points]
    times = [point.at for point in points]
    sums = [msgspec.json.encode(point.sums).decode() for point in points]
    await database.fetch(_RECORD_SERIES, steps, times, sums)


async def list_series(
    database: Database, step_ms: int, since: int, now: int | None
) -> list[SeriesPoint]:
    """Return the points of an interval length, sorted by time."""
    first, kept_ms = since - since % step_ms, SERIES_RETENTION_MS[step_ms]
    rows = await database.fetch(_LIST_SERIES, step_ms, first, now, kept_ms)
    return [SeriesPoint(step_ms, at, _decode_sums(sums)) for at, sums in rows]


async def remove_old_points(database: Database, now: int) -> None:
    """Remove points after their retention time."""
    first_times = [now - kept_ms for kept_ms in SERIES_RETENTION_MS.values()]
    await database.fetch(_REMOVE_OLD_POINTS, list(SERIES_RETENTION_MS), first_times)
