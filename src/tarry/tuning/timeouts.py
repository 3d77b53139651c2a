"""The rule for the timeout of an attempt.

An attempt that a timeout has cut off would have taken longer; how much longer, nobody knows. Left
out of the sample, the next timeout would be shorter, and cut off more, and so on round by round.
So these stand behind all others, as if they had taken for ever: a quantile that falls among them
is beyond the timeout, and that is all that can be said.

A timeout is the one in the policy, or one that shows in the log: failures after nearly the same
time, beyond which hardly anything succeeds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import repeat
from math import inf
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.explain import format_duration
from tarry.simulator.metrics import quantile
from tarry.tuning.estimates import beyond, needed, quantile_interval, rounded
from tarry.tuning.formatting import INTERVAL, counted, percent
from tarry.tuning.rules import Line, kept, too_little

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.core.policy import Policy
    from tarry.tuning.evidence import Evidence

SLOW = 0.995
_FIELD = "attempt_timeout"
_SHORTEST = 0.001
_NEAR = 1.02
"""Durations within 2 % are nearly the same; timers are not exact."""
_TICK = 0.001
"""So much the durations of a log of whole milliseconds may be short of the timeout."""
_FEWEST = 3
"""Failures after nearly the same time that are more than chance."""
_TAIL = 0.99
"""Failures that took less than this quantile of the successes are answers, and pile up too."""


class Cut(NamedTuple):
    """What a timeout has done to the healthy attempts of a log."""

    limit: float
    attempts: int
    seen: bool
    """True: the timeout is not known, it shows in the log."""


def timeout(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line:
    """One healthy attempt in 200 is cut off, to be tried again."""
    line = _by_latency(evidence, policy.attempt_timeout)
    if latency_budget is None or line.proposed is None or line.proposed <= latency_budget:
        return line
    why = "the latency budget: no attempt can take longer"
    late = beyond(evidence.healthy, latency_budget) if evidence.healthy else 0.0
    if late:
        why += f", and {percent(late)} of healthy ones are cut off"
    return Line(_FIELD, line.current, latency_budget, why, line.evidence)


def cut_off(healthy: Sequence[float], faults: Sequence[float], limit: float | None) -> Cut | None:
    """Count the failures that are a timeout's, by the one in force or by one that shows."""
    edges = [] if limit is None else [(limit - _TICK, limit, False)]
    pile = _pile(healthy, faults)
    if pile:
        edges.append((pile[0], median(pile), True))
    for edge, at, seen in edges:
        late = len(faults) - bisect_left(faults, edge)
        if late > len(healthy) - bisect_left(healthy, edge):  # else few had this timeout, if any
            return Cut(at, late, seen)
    return None


def _by_latency(evidence: Evidence, now: float | None) -> Line:
    healthy = evidence.healthy
    if len(healthy) < needed(SLOW):
        there = counted(len(healthy), "healthy attempt")
        return too_little(_FIELD, now, there, f"{needed(SLOW):,} needed for p99.5")
    cut = cut_off(healthy, evidence.faults, now)
    sample = list(healthy)
    in_force = now
    if cut is not None:
        sample.extend(repeat(inf, cut.attempts))
        in_force = max(now or 0.0, rounded(cut.limit) if cut.seen else cut.limit)
    slow, (low, high) = quantile(sample, SLOW), quantile_interval(sample, SLOW)
    found = _found(cut, len(sample), slow, low, high)
    if cut is not None and low == inf:
        why = (
            f"{percent(cut.attempts / len(sample))} of healthy attempts ran into the timeout, "
            "so p99.5 lies beyond it: raise it and measure again"
        )
        return kept(_FIELD, in_force, why, found, enough=False)._replace(current=now)
    if in_force is not None and (slow == inf or _tidy(low) <= in_force <= _tidy(high)):
        # A change for less would follow chance, and only ever down: what is longer is cut off.
        why = "p99.5 of healthy attempts, as closely as the log can tell"
        return kept(_FIELD, in_force, why, found)._replace(current=now)
    return Line(_FIELD, now, _tidy(slow), "p99.5 of healthy attempts", found)


def _pile(healthy: Sequence[float], faults: Sequence[float]) -> Sequence[float]:
    """Return the most of the slow failures that came after nearly the same time."""
    slow = faults[bisect_left(faults, quantile(healthy, _TAIL)) :]
    sizes = [bisect_right(slow, one * _NEAR) - at for at, one in enumerate(slow)]
    size = max(sizes, default=0)
    first = sizes.index(size) if size >= _FEWEST else len(slow)
    return slow[first : first + size]


def _tidy(value: float) -> float:
    return value if value == inf else max(rounded(value, up=True), _SHORTEST)


def _found(cut: Cut | None, size: int, *times: float) -> str:
    if cut is None:
        return _between(size, *map(format_duration, times))
    at = format_duration(cut.limit)
    slow, low, high = (f"over {at}" if time == inf else format_duration(time) for time in times)
    seen = ": they failed after nearly the same time" if cut.seen else ""
    return f"{_between(size, slow, low, high)}, {cut.attempts:,} cut off at {at}{seen}"


def _between(size: int, slow: str, low: str, high: str) -> str:
    spread = "" if low == high else f" ({INTERVAL} {low} to {high})"
    return f"{slow}{spread} of {size:,}"
