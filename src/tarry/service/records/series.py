"""Sums over intervals of time, which expire."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from tarry.service.records.collection import RecordCollection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import RecordStore

SERIES_RETENTION_MS: Final[dict[int, int]] = {10_000: 3 * 3_600_000, 300_000: 8 * 86_400_000}
"""The intervals of `SeriesPoint` in ms, and how long the points of each interval are kept."""
_SUMS = {
    step_ms: RecordCollection[dict[str, int]](
        f"series {step_ms}", dict[str, int], lifetime_ms=retention_ms + step_ms
    )
    for step_ms, retention_ms in SERIES_RETENTION_MS.items()
}
"""By interval. The key is the start of the interval, with a fixed number of digits."""
_KEY_DIGITS = 16


class SeriesPoint(msgspec.Struct, frozen=True, gc=False):
    """Sums over one interval, for all tenants and processes."""

    step_ms: int
    """The length of the interval, a key of `SERIES_RETENTION_MS`."""
    at: int
    """The start of the interval in epoch ms, a multiple of `step_ms`."""
    sums: dict[str, int]
    """By name, see `tarry.service.engine.series`. They are only added here."""


async def record_series(store: RecordStore, points: Sequence[SeriesPoint]) -> None:
    """Add sums to the stored points with the same interval and time.

    A call that fails is not repeated, because it may have been applied.
    """
    for point in points:
        await _SUMS[point.step_ms].update(store, partial(_add, point.sums), key=_key(point.at))


async def list_series(store: RecordStore, step_ms: int, *, since: int) -> list[SeriesPoint]:
    """Return the points of an interval length, sorted by time.

    The list starts with the interval of `since`, or with the retention time (`SERIES_RETENTION_MS`)
    if that is later. Intervals for which nothing was recorded are omitted.
    """
    first = since - since % step_ms
    now, entries = await _SUMS[step_ms].list_with_time(store, after=_key(first - 1))
    oldest = now - SERIES_RETENTION_MS[step_ms]
    return [
        SeriesPoint(step_ms, int(entry.key), entry.value)
        for entry in entries
        if oldest <= int(entry.key) <= now
    ]


def _add(sums: dict[str, int], stored: dict[str, int] | None, _now: int) -> dict[str, int]:
    total: Counter[str] = Counter(stored)
    total.update(sums)
    return dict(total)


def _key(at: int) -> str:
    return f"{max(0, at):0{_KEY_DIGITS}}"
