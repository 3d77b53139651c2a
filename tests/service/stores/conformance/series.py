"""Conformance cases: sums per interval of time."""

from __future__ import annotations

import asyncio

from tarry.service.records.series import (
    SERIES_RETENTION_MS,
    SeriesPoint,
    list_series,
    record_series,
)
from tarry.service.store import Retention
from tests.service.stores.harness import DAY_MS, START_MS, StoreHarness, conformance_case

SHORT_MS, LONG_MS = sorted(SERIES_RETENTION_MS)


@conformance_case
async def sums_of_all_processes_are_added(harness: StoreHarness) -> None:
    """Sums for one interval are added by name, and are kept when the store is opened again."""
    later = START_MS + SHORT_MS
    harness.clock.now = later + 5
    await record_series(
        harness.store,
        [SeriesPoint(SHORT_MS, later, {"a": 7}), SeriesPoint(LONG_MS, START_MS, {"a": 1 << 40})],
    )
    other = await harness.reopen()
    await asyncio.gather(
        *(
            record_series(
                store,
                [
                    SeriesPoint(LONG_MS, START_MS, {"a": 1, "b": 2}),
                    SeriesPoint(SHORT_MS, START_MS, {"b": number}),
                ],
            )
            for number, store in ((3, harness.opened[0]), (4, other))
        )
    )
    first = SeriesPoint(SHORT_MS, START_MS, {"b": 7})
    for store in harness.opened:
        listed = await list_series(store, SHORT_MS, since=0)
        assert [first, SeriesPoint(SHORT_MS, later, {"a": 7})] == listed
        [total] = await list_series(store, LONG_MS, since=0)
        assert SeriesPoint(LONG_MS, START_MS, {"a": (1 << 40) + 2, "b": 4}) == total
    (await list_series(other, SHORT_MS, since=0))[0].sums["b"] = 99
    assert first == (await list_series(other, SHORT_MS, since=0))[0]


@conformance_case
async def series_start_with_the_interval_of_a_time(harness: StoreHarness) -> None:
    """The list starts with the interval that contains `since`; empty intervals are omitted."""
    times = [START_MS + number * SHORT_MS for number in (0, 1, 3)]
    harness.clock.now = times[-1]
    await record_series(harness.store, [SeriesPoint(SHORT_MS, at, {"a": 1}) for at in times])

    async def list_times(since: int) -> list[int]:
        return [point.at for point in await list_series(harness.store, SHORT_MS, since=since)]

    assert times == await list_times(times[0] + SHORT_MS - 1)
    assert times[1:] == await list_times(times[1])
    assert times[2:] == await list_times(times[1] + SHORT_MS)
    assert [] == await list_times(times[2] + SHORT_MS)
    assert [] == await list_series(harness.store, LONG_MS, since=0)
    await record_series(harness.store, [])


@conformance_case
async def old_points_are_not_listed(harness: StoreHarness) -> None:
    """A point is listed until its retention time has passed, with and without a sweep."""
    points = [SeriesPoint(step_ms, START_MS, {"a": 1}) for step_ms in (SHORT_MS, LONG_MS)]
    await record_series(harness.store, points)
    for point in points:
        harness.clock.now = START_MS + SERIES_RETENTION_MS[point.step_ms]
        await harness.store.sweep(Retention(DAY_MS, DAY_MS), 10)
        assert [point] == await list_series(harness.store, point.step_ms, since=0)
        harness.clock.advance(1)
        for _ in range(2):
            assert [] == await list_series(harness.store, point.step_ms, since=0)
            await harness.store.sweep(Retention(DAY_MS, DAY_MS), 10)
