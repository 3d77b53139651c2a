"""The activity of a lane: changes of its breaker, and a histogram of the durations of attempts.

All functions are pure. The stores apply `add_change` and `add_latencies` to the stored activity;
the Redis store has the same rules in `lane_activity.lua`.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, exp2, log2
from typing import TYPE_CHECKING

from msgspec.structs import replace as copy_with

from tarry.service.model import LaneActivity, LatencyWindow
from tarry.service.store import LATENCY_WINDOW_MS, MAX_BREAKER_CHANGES, MAX_LATENCY_WINDOWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tarry.service.model import BreakerChangeRecord

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
    """Return the activity with a change of the breaker, see `Store.record_breaker_change`."""
    before = activity.changes[-1].after if activity.changes else change.before
    if before == change.after:
        return activity
    changes = [*activity.changes, copy_with(change, before=before)]
    return copy_with(activity, changes=changes[-MAX_BREAKER_CHANGES:])


def add_latencies(activity: LaneActivity, counts: Mapping[str, int], now: int) -> LaneActivity:
    """Return the activity with `counts` added to the window of `now`; if empty, with no windows."""
    if not counts:
        return copy_with(activity, windows=[])
    at, windows, total = now - now % LATENCY_WINDOW_MS, list(activity.windows), Counter(counts)
    if windows and windows[-1].at >= at:  # greater if the clock was set back
        at = windows[-1].at
        total.update(windows.pop().counts)
    windows.append(LatencyWindow(at, dict(total)))
    return copy_with(activity, windows=windows[-MAX_LATENCY_WINDOWS:])
