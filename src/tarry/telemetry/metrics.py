"""What the metrics count, whatever keeps them: one reading of the events, so that all agree."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from tarry.core.breaker import BreakerState
from tarry.core.checks import check_count
from tarry.core.events import Succeeded
from tarry.runtime.downstream import live_downstreams

if TYPE_CHECKING:
    from tarry.core.events import GaveUp

MAX_LABEL_VALUES = 100
"""Different operations, and different downstreams, that have time series of their own."""

DELAY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600, 3600)
"""Bounds of the histogram of delays, in seconds: from a quick retry to the longest hint."""


class LabelLimit:
    """Lets so many different names through; each further one is called by one name for all.

    Time series are for ever: a name with an id in it would make one for each call.
    """

    __slots__ = ("_most", "_rest", "_seen")

    def __init__(self, most: int = MAX_LABEL_VALUES, rest: str = "other") -> None:
        self._most = check_count("max_names", most)
        self._rest = rest
        self._seen: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name, or the one for all the rest."""
        seen = self._seen
        if name not in seen:
            if len(seen) >= self._most:
                return self._rest
            seen.add(name)  # without a lock: one more for each thread at this very line is no harm
        return name


def call_result(event: Succeeded | GaveUp) -> str:
    """Say how a call ended; hedges are attempts beyond the first too."""
    if not isinstance(event, Succeeded):
        return "failed"
    return "first-try" if event.attempts == 1 else "after-retries"


def count_breaker_states(names: LabelLimit) -> dict[tuple[str, BreakerState], int]:
    """Count the breakers of each downstream in each state: 1 for where it stands, 0 elsewhere."""
    counts: Counter[tuple[str, BreakerState]] = Counter()
    for downstream in live_downstreams():
        if downstream.state is not None:
            name = names(downstream.name)
            counts.update({(name, state): 0 for state in BreakerState})
            counts[name, downstream.state] += 1
    return dict(counts)


def sum_budget_balances(names: LabelLimit) -> dict[str, float]:
    """Return what the retry budgets hold, summed up where several share a name."""
    sums: dict[str, float] = {}
    for downstream in live_downstreams():
        with suppress(Exception):  # of a user's budget: the other metrics are read all the same
            balance = downstream.balance
            if balance is not None:
                name = names(downstream.name)
                sums[name] = sums.get(name, 0.0) + balance
    return sums
