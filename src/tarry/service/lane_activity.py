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

    from tarry.service.model import BreakerChange

BUCKETS_PER_DOUBLING = 4
"""The bounds of buckets grow by 19 %."""
MIN_DURATION_MS = 0.001


def latency_bucket(duration_ms: float) -> int:
    """Return the number of the bucket of a duration: bucket n ends at 2 ** (n / 4) ms."""
    return ceil(log2(max(duration_ms, MIN_DURATION_MS)) * BUCKETS_PER_DOUBLING)


def estimate_quantiles(counts: Mapping[str, int], quantiles: Sequence[float]) -> list[float]:
    """Return quantiles (ascending) of durations in ms; empty without durations.

    They are interpolated within their buckets.
    """
    total, below = sum(counts.values()), 0
    found: list[float] = []
    # All quantiles in one pass: a page of downstreams has 50 histograms.
    for bucket, count in sorted((int(name), count) for name, count in counts.items()):
        while count and len(found) < len(quantiles):
            rank = quantiles[len(found)] * total - below
            if rank > count:
                break
            found.append(exp2((bucket - 1 + rank / count) / BUCKETS_PER_DOUBLING))
        below += count
    return found


def add_change(activity: LaneActivity, change: BreakerChange) -> LaneActivity:
    """Return the activity with a change of the breaker, see `Store.record_breaker_change`."""
    before = activity.changes[-1].after if activity.changes else change.before
    if before == change.after:
        return activity
    changes = [*activity.changes, copy_with(change, before=before)]
    return copy_with(activity, changes=changes[-MAX_BREAKER_CHANGES:])


def add_latencies(activity: LaneActivity, counts: Mapping[str, int], now: int) -> LaneActivity:
    """Return the activity with more attempts in the window of now; `counts` is empty: with none."""
    if not counts:
        return copy_with(activity, windows=[])
    at, windows, total = now - now % LATENCY_WINDOW_MS, list(activity.windows), Counter(counts)
    if windows and windows[-1].at >= at:  # later if the clock was set back
        at = windows[-1].at
        total.update(windows.pop().counts)
    windows.append(LatencyWindow(at, dict(total)))
    return copy_with(activity, windows=windows[-MAX_LATENCY_WINDOWS:])
