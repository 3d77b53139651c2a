"""The activity of a lane: changes of its breaker, and a histogram of the durations of attempts."""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import ceil, exp2, log2
from typing import TYPE_CHECKING

from msgspec.structs import replace as copy_with

from tarry.service.model import LaneActivity, LatencyWindow
from tarry.service.records.collection import RecordCollection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tarry.service.model import BreakerChangeRecord
    from tarry.service.store import RecordStore

MAX_BREAKER_CHANGES = 20
"""How many changes of the breaker of a lane are kept."""
LATENCY_WINDOW_MS = 300_000
"""The length of a `LatencyWindow`."""
MAX_LATENCY_WINDOWS = 2
"""How many windows with attempts are kept for a lane."""

BUCKETS_PER_DOUBLING = 4
"""Each bucket ends 19 % higher than the previous one: by a factor of 2 ** (1 / 4)."""
MIN_DURATION_MS = 0.001


def latency_bucket(duration_ms: float) -> int:
    """Return the number of the bucket of a duration: bucket n ends at 2 ** (n / 4) ms."""
    return ceil(log2(max(duration_ms, MIN_DURATION_MS)) * BUCKETS_PER_DOUBLING)


def estimate_quantiles(counts: Mapping[str, int], quantiles: Sequence[float]) -> list[float]:
    """Return the durations in ms at ascending `quantiles`; an empty list if nothing was counted.

    `counts` has the number of attempts by bucket number. A duration is interpolated in its bucket.
    """
    total, lower_count = sum(counts.values()), 0
    estimates: list[float] = []
    # All quantiles in one pass: a page of downstreams has 50 histograms.
    for bucket, count in sorted((int(name), count) for name, count in counts.items()):
        while count and len(estimates) < len(quantiles):
            rank = quantiles[len(estimates)] * total - lower_count
            if rank > count:
                break
            estimates.append(exp2((bucket - 1 + rank / count) / BUCKETS_PER_DOUBLING))
        lower_count += count
    return estimates


def add_change(activity: LaneActivity, change: BreakerChangeRecord) -> LaneActivity:
    """Return the activity with a change of the breaker, see `record_breaker_change`."""
    before = activity.changes[-1].after if activity.changes else change.before
    if before == change.after:
        return activity
    changes = [*activity.changes, copy_with(change, before=before)]
    return copy_with(activity, changes=changes[-MAX_BREAKER_CHANGES:])


def add_latencies(activity: LaneActivity, counts: Mapping[str, int], now: int) -> LaneActivity:
    """Return the activity with `counts` added to the window of `now`.

    Empty `counts` remove all windows.
    """
    if not counts:
        return copy_with(activity, windows=[])
    at, windows, total = now - now % LATENCY_WINDOW_MS, list(activity.windows), Counter(counts)
    if windows and windows[-1].at >= at:  # greater if the clock was set back
        at = windows[-1].at
        total.update(windows.pop().counts)
    windows.append(LatencyWindow(at, dict(total)))
    return copy_with(activity, windows=windows[-MAX_LATENCY_WINDOWS:])


_ACTIVITIES = RecordCollection[LaneActivity]("lane activity", LaneActivity)
"""Each activity is owned by its lane, so it is removed with the lane."""


async def record_breaker_change(store: RecordStore, lane: str, change: BreakerChangeRecord) -> None:
    """Add a change of the breaker of a lane, and keep the last `MAX_BREAKER_CHANGES`.

    Several processes may report the same change. So the change is ignored if the last stored change
    has the same `after`; otherwise its `before` is the `after` of the last stored one. The first
    change of a lane is ignored if it changes nothing. Unknown lanes are ignored.
    """

    def change_activity(stored: LaneActivity | None, _now: int) -> LaneActivity | None:
        return _none_if_empty(add_change(stored or LaneActivity(), change))

    await _ACTIVITIES.update(store, change_activity, lane)


async def record_latencies(store: RecordStore, counts_by_lane: dict[str, dict[str, int]]) -> None:
    """Add to the current `LatencyWindow` of lanes, and keep the last `MAX_LATENCY_WINDOWS`.

    Empty counts of a lane remove its windows. Unknown lanes are ignored. A call that fails is not
    repeated, because its counts may have been added.
    """

    def change_activity(
        counts: dict[str, int], stored: LaneActivity | None, now: int
    ) -> LaneActivity | None:
        return _none_if_empty(add_latencies(stored or LaneActivity(), counts, now))

    changes = {
        (lane, ""): partial(change_activity, counts) for lane, counts in counts_by_lane.items()
    }
    await _ACTIVITIES.update_many(store, changes)


async def read_lane_activity(store: RecordStore, lanes: Sequence[str]) -> dict[str, LaneActivity]:
    """Return the activity of lanes by name, without lanes that have no activity."""
    found = await _ACTIVITIES.get_many(store, [(lane, "") for lane in lanes])
    return {lane: activity for (lane, _), activity in found.items()}


def _none_if_empty(activity: LaneActivity) -> LaneActivity | None:
    return activity if activity.changes or activity.windows else None
