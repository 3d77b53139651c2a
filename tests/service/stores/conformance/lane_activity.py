"""Conformance cases: changes of breakers, and latencies of lanes."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from tarry.service.model import BreakerChangeRecord, LaneActivity, LatencyWindow
from tarry.service.records.lane_activity import (
    LATENCY_WINDOW_MS,
    MAX_BREAKER_CHANGES,
    MAX_LATENCY_WINDOWS,
    read_lane_activity,
    record_breaker_change,
    record_latencies,
)
from tarry.service.store import Retention, Store
from tests.service.stores.harness import (
    DAY_MS,
    LANE,
    START_MS,
    StoreHarness,
    conformance_case,
    task,
)

OTHER_LANE = "beta/https:a.example:443"
FIRST_WINDOW_AT = START_MS - START_MS % LATENCY_WINDOW_MS


async def read(store: Store, lane: str = LANE) -> LaneActivity | None:
    """Return the activity of one lane."""
    found = await read_lane_activity(store, [lane])
    assert set(found) <= {lane}
    return found.get(lane)


def change(at: int, before: str, after: str, reason: str | None = None) -> BreakerChangeRecord:
    """Return a change of a breaker."""
    return BreakerChangeRecord(at=at, before=before, after=after, reason=reason)


@conformance_case
async def changes_of_a_breaker_are_a_chain(harness: StoreHarness) -> None:
    """`before` of a change is `after` of the previous one; a repeated change is ignored."""
    await harness.add(task(0))
    other = await harness.reopen()
    closed = change(1, "closed", "closed", "resumed")
    await record_breaker_change(other, LANE, closed)
    assert await read(other) is None
    opened = change(2, "closed", "open", "\0 <b>503</b> \u2028")
    await asyncio.gather(*(record_breaker_change(store, LANE, opened) for store in harness.opened))
    await record_breaker_change(other, LANE, change(3, "closed", "open", "again"))
    await record_breaker_change(other, LANE, change(4, "closed", "half-open"))
    await record_breaker_change(harness.store, LANE, closed)

    for store in harness.opened:
        assert LaneActivity(
            [opened, change(4, "open", "half-open"), change(1, "half-open", "closed", "resumed")]
        ) == await read(store)


@conformance_case
async def the_last_changes_are_kept(harness: StoreHarness) -> None:
    """Only the last changes of each lane are kept."""
    await harness.add(task(0), task(1, tenant="beta"))
    await record_breaker_change(harness.store, OTHER_LANE, change(7, "closed", "open"))
    states = ["closed", "open"] * MAX_BREAKER_CHANGES
    changes = [change(at, before, after) for at, (before, after) in enumerate(pairwise(states))]
    for each in changes:
        await record_breaker_change(harness.store, LANE, each)

    found = await read_lane_activity(harness.store, [LANE, "acme/none", OTHER_LANE])

    assert {
        LANE: LaneActivity(changes[-MAX_BREAKER_CHANGES:]),
        OTHER_LANE: LaneActivity([change(7, "closed", "open")]),
    } == found
    assert {} == await read_lane_activity(harness.store, [])


@conformance_case
async def latencies_of_all_processes_are_added(harness: StoreHarness) -> None:
    """Counts of one window are added by bucket; the last windows with attempts are kept."""
    await harness.add(task(0), task(1, tenant="beta"))
    other = await harness.reopen()
    opened = change(2, "closed", "open")
    await record_breaker_change(other, LANE, opened)
    await asyncio.gather(
        record_latencies(harness.opened[0], {LANE: {"-3": 1, "40": 5}, OTHER_LANE: {"0": 1}}),
        record_latencies(other, {LANE: {"40": 2, "41": 1}, OTHER_LANE: {"0": 1}}),
    )
    first = LatencyWindow(FIRST_WINDOW_AT, {"-3": 1, "40": 7, "41": 1})
    assert LaneActivity([opened], [first]) == await read(harness.opened[0])

    windows = [first]
    for _ in range(MAX_LATENCY_WINDOWS):
        harness.clock.advance(7 * LATENCY_WINDOW_MS)
        await record_latencies(other, {LANE: {"9": 4}})
        windows.append(LatencyWindow(windows[-1].at + 7 * LATENCY_WINDOW_MS, {"9": 4}))
    harness.clock.now = START_MS  # the clock was set back
    await record_latencies(other, {LANE: {"9": 1}})
    windows[-1] = LatencyWindow(windows[-1].at, {"9": 5})

    assert LaneActivity([opened], windows[-MAX_LATENCY_WINDOWS:]) == await read(other)
    assert LaneActivity([], [LatencyWindow(FIRST_WINDOW_AT, {"0": 2})]) == await read(
        other, OTHER_LANE
    )


@conformance_case
async def latencies_can_be_removed(harness: StoreHarness) -> None:
    """Without counts, the latencies of a lane are removed; changes of its breaker stay."""
    await harness.add(task(0), task(1, tenant="beta"))
    opened = change(2, "closed", "open")
    await record_breaker_change(harness.store, LANE, opened)
    await record_latencies(harness.store, {LANE: {"1": 1}, OTHER_LANE: {"1": 1}})

    await record_latencies(harness.store, {LANE: {}, OTHER_LANE: {}})

    assert LaneActivity([opened]) == await read(harness.store)
    assert await read(harness.store, OTHER_LANE) is None


@conformance_case
async def activity_is_removed_with_its_lane(harness: StoreHarness) -> None:
    """Unknown lanes have no activity, and a lane that is created again starts without activity."""

    async def record() -> None:
        await record_breaker_change(harness.store, LANE, change(2, "closed", "open"))
        await record_latencies(harness.store, {LANE: {"1": 1}})

    await record()
    assert await read(harness.store) is None
    await harness.store.pause(LANE)
    await record()
    assert await read(harness.store) is not None
    await harness.store.resume(LANE)
    await harness.store.sweep(Retention(DAY_MS, DAY_MS), 10)
    assert await harness.store.get_lane(LANE) is None
    await harness.add(task(0))
    assert await read(harness.store) is None
