"""Counts what happens in a run, by bucket of time and in all."""

from __future__ import annotations

from array import array
from math import ceil, inf
from typing import TYPE_CHECKING

from tarry.simulator.summary import Summary

if TYPE_CHECKING:
    from tarry.core.verdict import Reason
    from tarry.simulator.scenario import Scenario

_TOLERATED = 0.05
"""The share of failures, above the scenario's own, with which a bucket still counts as well."""
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
        "_requests",
        "_succeeded",
        "_took",
        "attempts",
        "buckets",
    )

    def __init__(self, duration: float, bucket: float) -> None:
        self.buckets: int = ceil(duration / bucket - 1e-9)
        size = self.buckets + 1  # a sum of floats may fall on the end itself
        self._bucket = bucket
        self._rate = 1 / bucket
        self._calls = [0] * size
        self._requests = [0] * size
        self._succeeded = [0] * size
        self._failed = [0] * size
        self._failures = [0] * size
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

    def failed(self, now: float, reason: Reason) -> None:
        """Count a call that failed."""
        self._failed[int(now * self._rate)] += 1
        self._reasons[reason.value] = self._reasons.get(reason.value, 0) + 1

    def in_progress(self, index: int, load: int) -> None:
        """Note the load at the beginning of a bucket."""
        self._in_progress[index] = load

    def summary(self, scenario: Scenario, crashes: int) -> Summary:
        """Return what it all came to."""
        leaf = scenario.servers[scenario.path()[-1]]
        calls, requests = sum(self._calls), sum(self._requests)
        succeeded, failed = sum(self._succeeded), sum(self._failed)
        capacity = leaf.capacity
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
            success_rate=succeeded / max(1, calls),
            amplification=requests / max(1, calls),
            peak_load=self._peak(scenario) / capacity if capacity else 0.0,
            recovered=float(recovered_after < inf),
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
        series[-1:] = [float(sum(counts[self.buckets - 1 :]))]  # see `size`
        return series

    def _peak(self, scenario: Scenario) -> float:
        """Return the highest rate of requests after the trouble, or of all if it never ends."""
        after = self._requests[int(scenario.trouble_ends() * self._rate) : self.buckets]
        return max(after or self._requests) * self._rate

    def _recovered_after(self, scenario: Scenario) -> float:
        """Return the time from the end of the trouble to the end of the last bad bucket."""
        end = scenario.trouble_ends()
        tolerated = _TOLERATED + max(
            scenario.servers[name].failure_rate for name in scenario.path()
        )
        bad = [index for index in range(self.buckets) if not self._well(index, tolerated)]
        if not bad:
            return 0.0
        over = (bad[-1] + 1) * self._bucket
        return inf if over > _TAIL * scenario.duration else max(0.0, over - end)

    def _well(self, index: int, tolerated: float) -> bool:
        trouble = self._failures[index] + self._failed[index]
        return trouble <= tolerated * (self._succeeded[index] + trouble)


def quantile(ordered: list[float], q: float) -> float:
    """Return the value that the share `q` does not exceed; 0 of nothing."""
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else 0.0
