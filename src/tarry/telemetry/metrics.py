"""Label values, buckets and gauges that the Prometheus and OpenTelemetry listeners share."""

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
"""The maximum number of distinct operations, and of downstreams, with their own time series."""

DELAY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600, 3600)
"""Upper bounds of the buckets for delays before retries. Servers may ask for long delays."""


class LabelLimit:
    """Limits the number of distinct values of a label; further values become `overflow_value`.

    Time series are never deleted. Without a limit, a name that contains an id would create a new
    time series for each call.
    """

    __slots__ = ("_max_values", "_overflow_value", "_seen")

    def __init__(self, max_values: int = MAX_LABEL_VALUES, overflow_value: str = "other") -> None:
        self._max_values = check_count("max_names", max_values)  # the listeners' name for it
        self._overflow_value = overflow_value
        self._seen: set[str] = set()

    def limit(self, value: str) -> str:
        """Return the value, or `overflow_value` for a new value when the limit is reached."""
        seen = self._seen
        if value not in seen:
            if len(seen) >= self._max_values:
                return self._overflow_value
            seen.add(value)  # no lock: concurrent threads may exceed the limit by a few values
        return value


def call_result(event: Succeeded | GaveUp) -> str:
    """Return the value of the label `result` for a call that ended; a hedge counts as a retry."""
    if not isinstance(event, Succeeded):
        return "failed"
    return "first-try" if event.attempts == 1 else "after-retries"


def count_breaker_states(name_limit: LabelLimit) -> dict[tuple[str, BreakerState], int]:
    """Return the number of breakers in each state for each downstream name.

    If only one downstream has a name, its current state has the count 1, and other states have 0.
    """
    counts: Counter[tuple[str, BreakerState]] = Counter()
    for downstream in live_downstreams():
        if downstream.state is not None:
            name = name_limit.limit(downstream.name)
            counts.update({(name, state): 0 for state in BreakerState})
            counts[name, downstream.state] += 1
    return dict(counts)


def sum_budget_balances(name_limit: LabelLimit) -> dict[str, float]:
    """Return the sum of the retry budgets' balances for each downstream name."""
    sums: dict[str, float] = {}
    for downstream in live_downstreams():
        with suppress(Exception):  # raised by a user's budget: still report the others
            balance = downstream.balance
            if balance is not None:
                name = name_limit.limit(downstream.name)
                sums[name] = sums.get(name, 0.0) + balance
    return sums
