"""Tests for the cost and benefit of hedging over many calls with a heavy tail."""

from __future__ import annotations

from random import Random

from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.verdict import Attempt


def simulate(
    hedging: Hedging, calls: int, *, slow_from: int | None = None
) -> tuple[int, float, float]:
    """Run calls with a heavy tail, one after another.

    Return the copies sent, the most copies per call at any time, and the p99 of the calls.
    """
    dice, downstream = Random(7), Downstream("d")
    now, copies, most, lengths = 0.0, 0, 0.0, []
    for n in range(1, calls + 1):
        factor = 10.0 if slow_from is not None and n >= slow_from else 1.0
        call = HedgedCall(hedging, downstream)
        call.start(now)
        length, winner = factor * 0.01 * dice.paretovariate(1.5), 1
        while call.next_hedge_at is not None and call.next_hedge_at < now + length:
            moment = call.next_hedge_at
            attempt = call.hedge(moment)
            if isinstance(attempt, Attempt):
                copies += 1
                other = moment - now + factor * 0.01 * dice.paretovariate(1.5)
                if other < length:
                    length, winner = other, attempt.number
        most = max(most, copies / n)
        now += length
        call.record_success(winner, now, 0.0)
        lengths.append(length)
    return copies, most, sorted(lengths)[int(0.99 * calls)]


def test_one_knob_caps_the_load() -> None:
    """Over 100,000 calls and at every point of them, copies are at most 5 % of the calls.

    That holds through a slowdown in which every call would deserve a copy, and the copies help.
    """
    copies, most, _ = simulate(Hedging(max_extra_load=0.05), 100_000, slow_from=50_000)
    assert most <= 0.05
    assert copies >= 0.04 * 100_000


def test_copies_cut_the_tail() -> None:
    """A copy at p95 costs about 5 % and cuts the p99 of a heavy tail to less than half."""
    copies, _, hedged = simulate(Hedging(after="p95"), 20_000)
    none, _, plain = simulate(Hedging(after=1e9), 20_000)
    assert 0 == none
    assert 0.04 <= copies / 20_000 <= 0.06
    assert hedged < 0.5 * plain
