"""What a reader should know before believing the numbers of a log, or asking too much of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.explain import duration
from tarry.errors import ConfigurationError
from tarry.simulator.meter import quantile
from tarry.tuning.estimates import beyond, needed
from tarry.tuning.timeouts import SLOW
from tarry.tuning.words import counted, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.evidence import Evidence

_QUICK = 0.001
"""A dependency seldom answers sooner; durations in seconds, taken for milliseconds, do."""
_MOST = 0.9
"""Retries multiply the attempts of an outage: two thirds of a useful log may lie in some."""


def of_log(evidence: Evidence) -> Iterator[str]:
    """Say what is odd about a log."""
    middle = quantile(evidence.healthy, 0.5)
    if middle < _QUICK:
        yield f"durationMs has a median of {duration(middle)}: are these seconds?"
    if not evidence.calls:
        yield (
            f"none of the {counted(evidence.attempts, 'attempt')} is a first one (attemptNumber 1)"
            ": without the beginnings of calls, neither calls nor their retries can be counted"
        )
    within = sum(outage.behind - outage.first for outage in evidence.outages)
    if within > _MOST * evidence.attempts:
        many = len(evidence.outages)
        where = "one single outage" if many == 1 else f"{many:,} outages"
        yield (
            f"{percent(within / evidence.attempts)} of the attempts lie in {where}: "
            "the log says little about a healthy dependency; take one of a longer time"
        )


def of_latency_budget(evidence: Evidence, budget: float) -> Iterator[str]:
    """Say which attempts cannot end in time; refuse a budget that most of them break."""
    healthy = evidence.healthy
    if len(healthy) < needed(0.5):
        return
    middle = quantile(healthy, 0.5)
    if budget < middle:
        msg = (
            f"a latency budget of {duration(budget)} is shorter than half of the healthy attempts "
            f"(median {duration(middle)}): it cannot be met by retrying"
        )
        raise ConfigurationError(msg)
    late = beyond(healthy, budget)
    if late > 1 - SLOW:
        slow = (
            f", p99.5 {duration(quantile(healthy, SLOW))}" if len(healthy) >= needed(SLOW) else ""
        )
        yield (
            f"a latency budget of {duration(budget)} is shorter than {percent(late)} of the "
            f"healthy attempts (median {duration(middle)}{slow}): these cannot end in time"
        )
