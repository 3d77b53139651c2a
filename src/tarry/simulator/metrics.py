"""Counts what happens in a run, by bucket of time and in all."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf, isnan, nan, prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.core.verdict import Reason
    from tarry.simulator.scenario import Scenario

_TOLERATED = 0.05
"""The share of failures, above the scenario's own, with which a bucket still counts as well."""
_CHANCE = 4.0
"""So many standard deviations above that may be chance: a bucket can be small."""
_FEW = 10
"""So many calls may wait, besides twice those that did before the trouble."""
_TAIL = 0.9
"""Trouble after this part of the run counts as never over."""


class Meter:
    """The counters of one run."""

    __slots__ = (
        "_bucket",
        "_calls",
        "_failed",
        "_failures",
        "_in_progress",
        "_rate",
        "_reasons",
        "_refused",
        "_requests",
        "_succeeded",
        "_took",
        "attempts",
        "buckets",
    )

    def __init__(self, duration: float, bucket: float) -> None:
        self.buckets: int = max(1, ceil(duration / bucket - 1e-9))
        size = self.buckets + 1  # a sum of floats may fall on the end itself
        self._bucket = bucket
        self._rate = 1 / bucket
        self._calls = [0] * size
        self._requests = [0] * size
        self._succeeded = [0] * size
        self._failed = [0] * size
        self._failures = [0] * size
        self._refused = [0] * size
        self._in_progress = [0] * size
        self._took = array("d")
        self._reasons: dict[str, int] = {}
        self.attempts: int = 0

    def began(self, now: float) -> None:
        """Count a call that begins."""
        self._calls[int(now * self._rate)] += 1

    def request(self, now: float) -> None:
        """Count a request that reached the last server."""
        self._requests[int(now * self._rate)] += 1

    def failure(self, now: float) -> None:
        """Count an attempt of a client that failed."""
        self._failures[int(now * self._rate)] += 1

    def succeeded(self, now: float, took: float) -> None:
        """Count a call that ended well."""
        self._succeeded[int(now * self._rate)] += 1
        self._took.append(took)

    def failed(self, now: float, reason: Reason, attempts: int) -> None:
        """Count a call that failed after so many attempts."""
        index = int(now * self._rate)
        self._failed[index] += 1
        self._refused[index] += not attempts
        self._reasons[reason.value] = self._reasons.get(reason.value, 0) + 1

    def in_progress(self, index: int, load: int) -> None:
        """Note the load at the beginning of a bucket."""
        self._in_progress[index] = load

    def summary(self, scenario: Scenario, crashes: int) -> Summary:
        """Return what it all came to."""
        calls, requests = sum(self._calls), sum(self._requests)
        succeeded, failed = sum(self._succeeded), sum(self._failed)
        capacity = scenario.servers[scenario.path()[-1]].capacity
        took = sorted(self._took)
        recovered_after = self._recovered_after(scenario)
        return Summary(
            calls=calls,
            succeeded=succeeded,
            failed=failed,
            unfinished=calls - succeeded - failed,
            attempts=self.attempts,
            requests=requests,
            failures=sum(self._failures),
            crashes=crashes,
            success_rate=succeeded / calls if calls else nan,
            attempts_per_call=self.attempts / calls if calls else nan,
            amplification=requests / calls if calls else nan,
            peak_load=self._peak(scenario) / capacity if capacity else nan,
            recovered=nan if isnan(recovered_after) else float(recovered_after < inf),
            recovered_after=recovered_after,
            p50=quantile(took, 0.5),
            p99=quantile(took, 0.99),
            p999=quantile(took, 0.999),
            reasons=dict(sorted(self._reasons.items())),
            bucket=self._bucket,
            series={
                "calls": self._series(self._calls),
                "requests": self._series(self._requests),
                "succeeded": self._series(self._succeeded),
                "failed": self._series(self._failed),
                "in_progress": self._series(self._in_progress),
            },
        )

    def _series(self, counts: list[int]) -> list[float]:
        series = [float(count) for count in counts[: self.buckets]]
        series[-1:] = [float(sum(counts[self.buckets - 1 :]))]  # what rounding put beyond the end
        return series

    def _peak(self, scenario: Scenario) -> float:
        """Return the highest rate of requests after the trouble, or of all if it never ends."""
        trouble = scenario.trouble()
        after = self._requests[int(trouble[1] * self._rate) if trouble else 0 : self.buckets]
        return max(after or self._requests) * self._rate

    def _recovered_after(self, scenario: Scenario) -> float:
        """Return the time from the end of the trouble to the end of the last bad bucket."""
        trouble = scenario.trouble()
        if trouble is None:
            return nan
        start, end = trouble
        path = [scenario.servers[name] for name in scenario.path()]
        usual = 1 - prod(1 - server.failure_rate for server in path)
        waiting = self._waiting()
        tail = slice(int(_TAIL * self.buckets), self.buckets)
        if waiting[-1] > 0 and not sum(self._succeeded[tail]):
            return inf
        usually = waiting[: int(start * self._rate)] or waiting[tail]
        if waiting[-1] > 2 * waiting[min(self.buckets, int(end * self._rate))] + _FEW:
            return inf  # they pile up, whatever is usual
        most = 2 * sum(usually) / len(usually) + _FEW
        bad = [
            index
            for index in range(self.buckets)
            if waiting[index] > most or not self._well(index, usual + _TOLERATED)
        ]
        over = (bad[-1] + 1) * self._bucket if bad else 0.0
        if max(over, end) > _TAIL * scenario.duration:
            return inf
        return max(0.0, over - end)

    def _waiting(self) -> list[int]:
        """Return how many calls had begun and not ended at the end of each bucket."""
        changes = zip(self._calls, self._succeeded, self._failed, strict=True)
        return list(accumulate(begun - well - badly for begun, well, badly in changes))

    def _well(self, index: int, tolerated: float) -> bool:
        trouble = self._failures[index] + self._refused[index]
        total = self._succeeded[index] + trouble
        chance = _CHANCE * sqrt(total * tolerated * max(0.0, 1 - tolerated))
        return trouble <= tolerated * total + chance


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the value that the share `q` does not exceed; of nothing there is none."""
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Summary:
    """One run. Times are seconds; `requests` are what reached the last server."""

    calls: int
    """Calls that were begun."""
    succeeded: int
    failed: int
    unfinished: int
    """Calls that still ran or waited when the time was over."""
    attempts: int
    """Attempts that the clients made."""
    requests: int
    failures: int
    """Attempts of the clients that failed."""
    crashes: int
    success_rate: float
    """The share of the calls begun that ended well before the run was over."""
    attempts_per_call: float
    """What the clients send for each call."""
    amplification: float
    """Requests at the last server for each call."""
    peak_load: float
    """The highest rate of requests after the trouble, over the capacity of the last server."""
    recovered_after: float
    """Seconds from the end of the last trouble until all is well and stays so; inf for never."""
    recovered: float
    """1 if all was well again before the end, else 0; the mean of trials is a share."""
    p50: float
    p99: float
    p999: float
    """Quantiles of the time that calls took which ended well, waits included."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why calls failed: how many for each `tarry.Reason`."""
    bucket: float = 1.0
    series: dict[str, list[float]] = field(default_factory=dict)
    """Per bucket: calls (begun), requests, succeeded, failed, in_progress."""

    def __eq__(self, other: object) -> bool:
        """Compare all that is shown: two numbers without a value are the same here."""
        return isinstance(other, Summary) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def metrics(self) -> dict[str, float]:
        """Return every number by its name."""
        return {name: float(getattr(self, name)) for name in METRICS}


class Metric(NamedTuple):
    """A number for people: how it is written, and what it means."""

    unit: str
    """One of "", "s", "%" and "x"."""
    meaning: str


MEANINGS: dict[str, Metric] = {
    "calls": Metric("", "calls that were begun"),
    "succeeded": Metric("", "calls that ended well before the run was over"),
    "failed": Metric("", "calls that were given up"),
    "unfinished": Metric("", "calls that still ran or waited at the end of the run"),
    "attempts": Metric("", "attempts that the clients made"),
    "requests": Metric("", "what reached the last server"),
    "failures": Metric("", "attempts of the clients that failed"),
    "crashes": Metric("", "how often servers died of their load"),
    "success_rate": Metric("%", "calls that succeeded, of those begun"),
    "attempts_per_call": Metric("x", "what the clients sent for each call"),
    "amplification": Metric("x", "requests at the last server for each call"),
    "peak_load": Metric("x", "busiest second after the trouble, over what the last server can do"),
    "recovered": Metric("%", "the share of runs in which all was well again"),
    "recovered_after": Metric("s", "from the end of the trouble until all is well and stays so"),
    "p50": Metric("s", "half of the calls that succeeded were quicker, waits included"),
    "p99": Metric("s", "99 of 100 calls that succeeded were quicker"),
    "p999": Metric("s", "999 of 1,000 calls that succeeded were quicker"),
}
METRICS = tuple(MEANINGS)
