"""The metrics of a run: `MetricsRecorder` counts events during the run and returns a `Summary`.

Time is divided into buckets of equal width. The disruption lasts from the start of the first
failure or surge to the end of the last one.
"""

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

# These tolerances decide whether a bucket is healthy, and whether a run has recovered.
_TOLERATED_FAILURE_RATE = 0.05
"""The failure rate of a healthy bucket may exceed that of the servers by this much."""
_TOLERATED_STANDARD_DEVIATIONS = 4.0
"""The number of failures in a healthy bucket may exceed its expected value by this many standard
deviations, because the failure rate of a bucket with few calls varies by chance."""
_TOLERATED_WAITING_CALLS = 10
"""In a healthy bucket, the number of calls without a result is at most this number plus twice the
average of the buckets before the disruption."""
_RECOVERY_CUTOFF = 0.9
"""A run has recovered if all buckets after this share of its duration are healthy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Summary:
    """The metrics of one run, as `METRICS` describes them: times in seconds, nan for no value."""

    calls: int
    succeeded: int
    failed: int
    unfinished: int
    attempts: int
    requests: int
    failures: int
    crashes: int
    success_rate: float
    attempts_per_call: float
    amplification: float
    peak_load: float
    recovered_after: float
    """Infinite if the run did not recover."""
    recovered: float
    """1 or 0, so that the mean over trials is the share of runs that recovered."""
    p50: float
    p99: float
    p999: float
    reasons: dict[str, int] = field(default_factory=dict)
    """The number of failed calls by the value of `tarry.Reason`."""
    bucket: float = 1.0
    """The width of a bucket of `series`, in seconds."""
    series: dict[str, list[float]] = field(default_factory=dict)
    """Time series by name: calls (started), succeeded, failed, requests, in_progress (requests)."""

    def __eq__(self, other: object) -> bool:
        """Compare the representations, so that nan equals nan."""
        return isinstance(other, Summary) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def metrics(self) -> dict[str, float]:
        """Return the value of each metric by its name."""
        return {name: float(getattr(self, name)) for name in METRICS}


class Metric(NamedTuple):
    """The unit and the description of a metric."""

    unit: str
    """One of "", "s", "%" and "x"."""
    description: str


METRICS: dict[str, Metric] = {
    "calls": Metric("", "calls that were started"),
    "succeeded": Metric("", "calls that succeeded before the end of the run"),
    "failed": Metric("", "calls that failed"),
    "unfinished": Metric("", "calls that still ran or waited at the end of the run"),
    "attempts": Metric("", "attempts that the clients made"),
    "requests": Metric("", "requests that reached the last server"),
    "failures": Metric("", "attempts of the clients that failed"),
    "crashes": Metric("", "crashes of servers under load"),
    "success_rate": Metric("%", "started calls that succeeded"),
    "attempts_per_call": Metric("x", "attempts of the clients per call"),
    "amplification": Metric("x", "requests at the last server per call"),
    "peak_load": Metric(
        "x", "highest request rate after the disruption, divided by the last server's capacity"
    ),
    "recovered": Metric("%", "runs that recovered"),
    "recovered_after": Metric(
        "s", "time from the end of the disruption until the run stays healthy"
    ),
    "p50": Metric("s", "median duration of successful calls, waits included"),
    "p99": Metric("s", "99th percentile of that duration"),
    "p999": Metric("s", "99.9th percentile of that duration"),
}


class MetricsRecorder:
    """Counts the events of one run, in buckets of equal width. Times are in seconds."""

    def __init__(self, duration: float, bucket_width: float) -> None:
        self.bucket_count: int = max(1, ceil(duration / bucket_width - 1e-9))
        size = self.bucket_count + 1  # rounding can put an event at the very end of the run
        self._bucket_width = bucket_width
        self._buckets_per_second = 1 / bucket_width
        self._calls = [0] * size
        self._requests = [0] * size
        self._succeeded = [0] * size
        self._failed = [0] * size
        self._failed_attempts = [0] * size
        self._failed_without_attempt = [0] * size
        self._in_progress = [0] * size
        self._durations = array("d")
        self._reasons: dict[str, int] = {}
        self.attempt_count: int = 0

    def record_call(self, now: float) -> None:
        """Count a started call."""
        self._calls[int(now * self._buckets_per_second)] += 1

    def record_request(self, now: float) -> None:
        """Count a request that reached the last server, at the end of the chain of calls."""
        self._requests[int(now * self._buckets_per_second)] += 1

    def record_failed_attempt(self, now: float) -> None:
        """Count a failed attempt of a client."""
        self._failed_attempts[int(now * self._buckets_per_second)] += 1

    def record_success(self, now: float, duration: float) -> None:
        """Count a call that succeeded."""
        self._succeeded[int(now * self._buckets_per_second)] += 1
        self._durations.append(duration)

    def record_failed_call(self, now: float, reason: Reason, attempt_count: int) -> None:
        """Count a call that failed after this number of attempts."""
        index = int(now * self._buckets_per_second)
        self._failed[index] += 1
        self._failed_without_attempt[index] += not attempt_count
        self._reasons[reason.value] = self._reasons.get(reason.value, 0) + 1

    def record_in_progress(self, bucket_index: int, request_count: int) -> None:
        """Store the number of requests in progress at the start of a bucket."""
        self._in_progress[bucket_index] = request_count

    def summarize(self, scenario: Scenario, crash_count: int) -> Summary:
        """Return the metrics of the whole run."""
        calls, requests = sum(self._calls), sum(self._requests)
        succeeded, failed = sum(self._succeeded), sum(self._failed)
        capacity = scenario.servers[scenario.path()[-1]].capacity
        durations = sorted(self._durations)
        recovered_after = self._recovery_time(scenario)
        return Summary(
            calls=calls,
            succeeded=succeeded,
            failed=failed,
            unfinished=calls - succeeded - failed,
            attempts=self.attempt_count,
            requests=requests,
            failures=sum(self._failed_attempts),
            crashes=crash_count,
            success_rate=succeeded / calls if calls else nan,
            attempts_per_call=self.attempt_count / calls if calls else nan,
            amplification=requests / calls if calls else nan,
            peak_load=self._peak_request_rate(scenario) / capacity if capacity else nan,
            recovered=nan if isnan(recovered_after) else float(recovered_after < inf),
            recovered_after=recovered_after,
            p50=quantile(durations, 0.5),
            p99=quantile(durations, 0.99),
            p999=quantile(durations, 0.999),
            reasons=dict(sorted(self._reasons.items())),
            bucket=self._bucket_width,
            series={
                "calls": self._to_series(self._calls),
                "requests": self._to_series(self._requests),
                "succeeded": self._to_series(self._succeeded),
                "failed": self._to_series(self._failed),
                "in_progress": self._to_series(self._in_progress),
            },
        )

    def _to_series(self, counts: list[int]) -> list[float]:
        series = [float(count) for count in counts[: self.bucket_count]]
        # The last bucket includes the events that rounding has put into the bucket after it.
        series[-1:] = [float(sum(counts[self.bucket_count - 1 :]))]
        return series

    def _peak_request_rate(self, scenario: Scenario) -> float:
        """Return the highest request rate after the disruption, if any, else of the run."""
        disruption = scenario.disruption()
        start = int(disruption[1] * self._buckets_per_second) if disruption else 0
        counts_after = self._requests[start : self.bucket_count]
        return max(counts_after or self._requests) * self._buckets_per_second

    def _recovery_time(self, scenario: Scenario) -> float:
        """Return the time from the end of the disruption until all later buckets are healthy.

        Return nan if there is no disruption, and inf if the run does not recover.
        """
        disruption = scenario.disruption()
        if disruption is None:
            return nan
        start, end = disruption
        path = [scenario.servers[name] for name in scenario.path()]
        base_failure_rate = 1 - prod(1 - server.failure_rate for server in path)
        counts = zip(self._calls, self._succeeded, self._failed, strict=True)
        # The number of calls without a result at the end of each bucket.
        waiting = list(accumulate(new - succeeded - failed for new, succeeded, failed in counts))
        last_tenth = slice(int(_RECOVERY_CUTOFF * self.bucket_count), self.bucket_count)
        if waiting[-1] > 0 and not sum(self._succeeded[last_tenth]):
            return inf  # calls are waiting and none succeeds
        waiting_before = waiting[: int(start * self._buckets_per_second)]
        if not waiting_before:  # the end of the run shows the usual number, unless calls pile up
            waiting_before = waiting[last_tenth]
            waiting_after = waiting[min(self.bucket_count, int(end * self._buckets_per_second))]
            if waiting[-1] > 2 * waiting_after + _TOLERATED_WAITING_CALLS:
                return inf
        max_waiting = 2 * sum(waiting_before) / len(waiting_before) + _TOLERATED_WAITING_CALLS
        tolerated_rate = base_failure_rate + _TOLERATED_FAILURE_RATE
        unhealthy = [
            index
            for index in range(self.bucket_count)
            if waiting[index] > max_waiting or not self._has_few_failures(index, tolerated_rate)
        ]
        healthy_from = (unhealthy[-1] + 1) * self._bucket_width if unhealthy else 0.0
        if max(healthy_from, end) > _RECOVERY_CUTOFF * scenario.duration:
            return inf
        return max(0.0, healthy_from - end)

    def _has_few_failures(self, index: int, tolerated_rate: float) -> bool:
        """Return whether failed attempts and calls without an attempt are within the tolerances."""
        failures = self._failed_attempts[index] + self._failed_without_attempt[index]
        total = self._succeeded[index] + failures
        deviation = sqrt(total * tolerated_rate * max(0.0, 1 - tolerated_rate))
        return failures <= tolerated_rate * total + _TOLERATED_STANDARD_DEVIATIONS * deviation


def quantile(sorted_values: Sequence[float], q: float) -> float:
    """Return the quantile `q` of sorted values, or nan if there are no values."""
    index = min(int(q * len(sorted_values)), len(sorted_values) - 1)
    return sorted_values[index] if sorted_values else nan
