"""Tests for the cost and benefit of hedging over many calls with heavy-tailed latency."""

from __future__ import annotations

from random import Random

import pytest

from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.verdict import Attempt


def simulate(
    hedging: Hedging, calls: int, *, slow_from: int | None = None
) -> tuple[int, float, float]:
    """Run calls with heavy-tailed latency, one after another; from `slow_from` on 10 times slower.

    Return the number of hedges, the largest ratio of hedges to calls at any time, and the p99.
    """
    random, downstream = Random(7), Downstream("d")
    now, hedges, max_ratio, durations = 0.0, 0, 0.0, []
    for n in range(1, calls + 1):
        factor = 10.0 if slow_from is not None and n >= slow_from else 1.0
        call = HedgedCall(hedging, downstream)
        call.start(now)
        duration, winner = factor * 0.01 * random.paretovariate(1.5), 1
        while call.next_hedge_at is not None and call.next_hedge_at < now + duration:
            hedge_at = call.next_hedge_at
            attempt = call.hedge(hedge_at)
            if isinstance(attempt, Attempt):
                hedges += 1
                hedged_duration = hedge_at - now + factor * 0.01 * random.paretovariate(1.5)
                if hedged_duration < duration:
                    duration, winner = hedged_duration, attempt.number
        max_ratio = max(max_ratio, hedges / n)
        now += duration
        call.record_success(winner, now, 0.0)
        durations.append(duration)
    return hedges, max_ratio, sorted(durations)[int(0.99 * calls)]


@pytest.mark.long_run
def test_max_extra_load_limits_the_hedges() -> None:
    """At any time in 100,000 calls hedges are at most 5 % of the calls, even during a slowdown."""
    hedges, max_ratio, _ = simulate(Hedging(max_extra_load=0.05), 100_000, slow_from=50_000)
    assert max_ratio <= 0.05
    assert hedges >= 0.04 * 100_000


@pytest.mark.long_run
def test_hedges_reduce_tail_latency() -> None:
    """Hedges at p95 add about 5 % load and more than halve the p99 of a heavy tail."""
    hedges, _, hedged_p99 = simulate(Hedging(after="p95"), 20_000)
    no_hedges, _, p99 = simulate(Hedging(after=1e9), 20_000)
    assert 0 == no_hedges
    assert 0.04 <= hedges / 20_000 <= 0.06
    assert hedged_p99 < 0.5 * p99
