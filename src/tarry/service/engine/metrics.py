"""The Prometheus metrics of the service.

Recording must be cheap, because every attempt is recorded: it only appends a sample to a list.
Samples are added to counters and histograms 500 at a time, or when the metrics are read. Objects of
the Prometheus client are only built when the metrics are read. The number of label values is
bounded: policies and lanes after the first hundred are counted as `other`, and only a hundred lanes
have gauges (first those whose breaker is not closed, then those with the most leased tasks).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from math import ceil, log2
from typing import TYPE_CHECKING, TypeVar, cast

from tarry.core.extras import require_extra
from tarry.service.model import Status
from tarry.service.records.lane_activity import (
    BUCKETS_PER_DOUBLING,
    MIN_DURATION_MS,
    latency_bucket,
)
from tarry.service.tenant_shares import TenantShares
from tarry.wire.tasks import WAIT_REASONS

with require_extra("metrics need prometheus-client", "service"):
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from typing import TypeAlias

    from prometheus_client.core import Metric

    from tarry.core.breaker import BreakerState
    from tarry.service.engine.lanes import Lanes
    from tarry.service.model import AttemptRecord
    from tarry.service.store import Counters

    _AttemptSample: TypeAlias = tuple[str, str, str, int, float | None, float | None]
    """Outcome, policy id, lane, and in ms: lag after the due time, duration, delay of the retry."""
    _TaskSample: TypeAlias = tuple[str, int, str, int]
    """Final status, number of attempts, lane, and age in ms."""

T = TypeVar("T")

OPENMETRICS_MEDIA_TYPE = "application/openmetrics-text"
_MAX_LABEL_VALUES = 100
_MAX_POLICY_LANE_PAIRS = 1000
_OTHER = "other"
_MAX_LATENCY_LANES = 10_000
"""Number of lanes whose latencies are kept until they are stored; divided by `TenantShares`."""
_MIN_LATENCY_BUCKET = latency_bucket(0.0)
SHORT_BUCKETS_MS = (
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000,
)  # fmt: skip
_LONG_BUCKETS_MS = (
    100, 500, 1_000, 5_000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 14_400_000, 43_200_000,
    86_400_000, 604_800_000,
)  # fmt: skip
DELAY_BUCKETS_MS = (
    20, 50, 100, 200, 300, 500, 700, 1_000, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 30_000,
    60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000, 3_600_000, 14_400_000, 43_200_000,
    86_400_000, 604_800_000,
)  # fmt: skip
"""Narrow enough to show whether the jitter spreads the delays."""
_MAX_SAMPLES = 500  # then they are counted: sorting them is cheaper than a bucket search for each
_LANE_STATUSES = (Status.PENDING, Status.IN_FLIGHT, Status.EXHAUSTED)
_BREAKER_STATES = ("closed", "open", "half-open")
_COMPONENTS = ("store", "adding", "data", "bodies", "delivery", "encryption")


class _LabeledCounter(Counter[tuple[str, ...]]):
    """A counter with labels; the keys are tuples of label values."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        super().__init__()
        self._name, self._help, self._labels = name, help_text, labels

    def to_metric(self) -> Metric:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self.items():
            family.add_metric(values, count)
        return family


class _BoundedLabels(set[T]):
    """The values of a label that are not counted as `other`: the first `limit` values."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def admit(self, value: T) -> bool:
        """Return whether a value is one of the first `limit`."""
        if value not in self:
            if len(self) >= self._limit:
                return False
            self.add(value)
        return True


class _Histogram:
    """A histogram of durations. It observes milliseconds, and is rendered in seconds."""

    __slots__ = ("_bounds", "_cumulative_counts", "_help", "_name", "_sum", "_total_count")

    def __init__(self, name: str, help_text: str, bounds: tuple[int, ...]) -> None:
        self._name, self._help, self._bounds = name, help_text, bounds
        self._cumulative_counts = [0] * len(bounds)  # per bound, values up to it
        self._total_count = 0
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count values. A negative value, which occurs after a clock was set back, counts as 0."""
        ordered = sorted(values)  # one binary search per bound instead of one per value
        self._total_count += len(ordered)
        self._sum += sum(ordered[bisect_left(ordered, 0) :])
        for index, bound in enumerate(self._bounds):
            self._cumulative_counts[index] += bisect_right(ordered, bound)

    def bucket_counts(self) -> Iterator[tuple[str, int]]:
        """Yield each bucket that is not empty: its upper bound in ms (or `inf`), and its count."""
        below = 0
        for bound, count in zip(self._bounds, self._cumulative_counts, strict=True):
            if count > below:
                yield str(bound), count - below
            below = count
        if self._total_count > below:
            yield "inf", self._total_count - below

    def to_metric(self) -> Metric:
        bounds = (str(bound / 1000) for bound in self._bounds)
        buckets = [*zip(bounds, self._cumulative_counts, strict=True), ("+Inf", self._total_count)]
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum / 1000)
        return family


class Metrics:
    """Counts attempts and finished tasks, and renders the metrics page."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._attempt_samples: list[_AttemptSample] = []
        self._task_samples: list[_TaskSample] = []
        self._latencies: dict[str, Counter[int]] = {}
        """Number of attempts by lane and `latency_bucket`, since the last `take_latencies`."""
        self._latency_lanes = TenantShares(_MAX_LATENCY_LANES)
        self._policies: _BoundedLabels[str] = _BoundedLabels(_MAX_LABEL_VALUES)
        self._lane_names: _BoundedLabels[str] = _BoundedLabels(_MAX_LABEL_VALUES)
        self._pairs: _BoundedLabels[tuple[str, str]] = _BoundedLabels(_MAX_POLICY_LANE_PAIRS)
        """Pairs of policy and lane labels. Without a limit, 100 of each would have 10,000 pairs."""
        help_text = "Attempts, by outcome, policy and lane."
        self.attempts: _LabeledCounter = _LabeledCounter(
            "retry_attempts", help_text, "outcome", "policy", "lane"
        )
        """Includes lost attempts, whose worker disappeared. They have empty policy and lane."""
        help_text = "Finished tasks, by outcome (final status), attempts (first or retried), lane."
        self._finished_tasks = _LabeledCounter(
            "retry_task_outcomes", help_text, "outcome", "attempts", "lane"
        )
        help_text = "Attempts that were postponed before they started, by reason and lane."
        self._deferrals = _LabeledCounter("retry_deferrals", help_text, "reason", "lane")
        self._transitions = _LabeledCounter(
            "retry_breaker_transitions", "Breaker transitions, by the new state.", "to"
        )
        self.superseded: _LabeledCounter = _LabeledCounter(
            "retry_superseded", "Results that arrived after their lease was lost."
        )
        self.superseded[()] = 0  # the metric has no labels
        self._age = _Histogram(
            "retry_task_age_seconds", "Age of tasks when they finish.", _LONG_BUCKETS_MS
        )
        self._delay = _Histogram("retry_delay_seconds", "Delay before retries.", DELAY_BUCKETS_MS)
        help_text = "Time from when an attempt was due, and its lane not blocked, to its start."
        self._lag = _Histogram("retry_scheduling_lag_seconds", help_text, SHORT_BUCKETS_MS)
        self._duration = _Histogram(
            "retry_attempt_duration_seconds", "Duration of attempts.", SHORT_BUCKETS_MS
        )

    def record_attempt(
        self, attempt: AttemptRecord, policy_id: str, lane: str, startable_since: int = 0
    ) -> None:
        """Record an attempt; for the lag, see `LocalLane.startable_since`."""
        lag = attempt.started_at - max(attempt.scheduled_at, startable_since)
        decision = attempt.decision
        delay = None if decision is None else decision.delay_ms
        samples = self._attempt_samples
        samples.append((attempt.outcome, policy_id, lane, lag, attempt.duration_ms, delay))
        if len(samples) >= _MAX_SAMPLES:
            self._count_attempts()

    def record_finished_task(self, status: str, attempt_count: int, lane: str, age_ms: int) -> None:
        """Record a task that was finished `age_ms` after it was added."""
        samples = self._task_samples
        samples.append((status, attempt_count, lane, age_ms))
        if len(samples) >= _MAX_SAMPLES:
            self._count_tasks()

    def count_deferral(self, reason: str, lane: str) -> None:
        """Count an attempt that the downstream of a lane rejected before it started."""
        self._deferrals[reason, self._lane_label(lane)] += 1

    def count_transition(self, before: BreakerState, after: BreakerState) -> None:
        """Count a change of a breaker's state, if the states differ."""
        if after is not before:
            self._transitions[(str(after),)] += 1

    def read_totals(self) -> Counter[str]:
        """Return the counts of all tenants since the start of the process, by name.

        The names are `attempts.OUTCOME`, `finished.STATUS.ATTEMPTS` (`first` or `retried`), and
        `lag.BOUND` and `delay.BOUND` for the buckets of the histograms, see `bucket_counts`.
        """
        self._count_attempts()
        self._count_tasks()
        totals: Counter[str] = Counter()
        for (outcome, _, _), count in self.attempts.items():
            totals[f"attempts.{outcome}"] += count
        for (status, attempts, _), count in self._finished_tasks.items():
            totals[f"finished.{status}.{attempts}"] += count
        for name, histogram in (("lag", self._lag), ("delay", self._delay)):
            for bound, count in histogram.bucket_counts():
                totals[f"{name}.{bound}"] = count
        return totals

    def read_latencies(self, lanes: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return the histograms of durations since the last `take_latencies`, by lane.

        Lanes without attempts are omitted. For the buckets see `LatencyWindow`.
        """
        self._count_attempts()
        found = ((lane, self._latencies.get(lane)) for lane in lanes)
        return {
            lane: {str(bucket): count for bucket, count in counts.items()}
            for lane, counts in found
            if counts
        }

    def take_latencies(self, *lanes: str) -> dict[str, dict[str, int]]:
        """Return the histograms of these lanes, or else of all, and start new ones."""
        self._count_attempts()
        latencies = self.read_latencies(lanes or tuple(self._latencies))
        for lane in latencies:
            del self._latencies[lane]
            self._latency_lanes.release(lane.partition("/")[0])
        return latencies

    def render(
        self,
        store_counters: Counters | None,
        now_s: float,
        tenant: str | None = None,
        accept: str = "",
        *,
        counters_age_s: float = 0.0,
        failing: Collection[str] = (),
    ) -> tuple[bytes, str]:
        """Return the metrics page and its content type.

        `store_counters`, which were read `counters_age_s` ago, are None if another process reports
        the tasks of the store, or if they were never read. With `tenant`, the page has only the
        gauges of the tenant's lanes and tasks, because the other metrics cover all tenants. The
        format is OpenMetrics if `accept`, the header of the request, names it, else the text format
        of Prometheus. `failing` has the names of the failing components.
        """
        registry = CollectorRegistry()
        metrics = list(self._gauges(store_counters, counters_age_s, now_s, tenant))
        if tenant is None:
            metrics = [*self._counters_and_histograms(), _component_gauge(failing), *metrics]
        registry.register(_MetricsCollector(metrics))
        media_types = {entry.partition(";")[0].strip().lower() for entry in accept.split(",")}
        if OPENMETRICS_MEDIA_TYPE in media_types:
            page = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return cast("bytes", page), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _count_attempts(self) -> None:
        if not self._attempt_samples:
            return
        samples = self._attempt_samples
        outcomes, policies, lanes, lags, durations, delays = zip(*samples, strict=True)
        samples.clear()
        groups = Counter(zip(outcomes, policies, lanes, strict=True))
        for (outcome, policy_id, lane), count in groups.items():
            policy_label = policy_id if self._policies.admit(policy_id) else _OTHER
            lane_label = self._lane_label(lane)
            if not self._pairs.admit((policy_label, lane_label)):
                lane_label = _OTHER
            self.attempts[outcome, policy_label, lane_label] += count
        # The same as `latency_bucket`. A function call would take 0.25 us more for each attempt.
        buckets = Counter(
            [
                (
                    lane,
                    ceil(log2(duration) * BUCKETS_PER_DOUBLING)
                    if duration > MIN_DURATION_MS
                    else _MIN_LATENCY_BUCKET,
                )
                for lane, duration in zip(lanes, durations, strict=True)
                if duration is not None
            ]
        )
        for (lane, bucket), count in buckets.items():
            if lane not in self._latencies:
                tenant = lane.partition("/")[0]
                if not self._latency_lanes.is_available(tenant):
                    continue
                self._latency_lanes.acquire(tenant)
                self._latencies[lane] = Counter()
            self._latencies[lane][bucket] += count
        self._lag.observe(lags)
        self._duration.observe([duration for duration in durations if duration is not None])
        self._delay.observe([delay for delay in delays if delay is not None])

    def _count_tasks(self) -> None:
        if not self._task_samples:
            return
        statuses, attempts, lanes, ages = zip(*self._task_samples, strict=True)
        self._task_samples.clear()
        groups = Counter(zip(statuses, attempts, lanes, strict=True))
        for (status, attempt_count, lane), count in groups.items():
            attempts_label = "first" if attempt_count <= 1 else "retried"
            self._finished_tasks[status, attempts_label, self._lane_label(lane)] += count
        self._age.observe(ages)

    def _counters_and_histograms(self) -> Iterator[Metric]:
        self._count_attempts()
        self._count_tasks()
        counters = self.attempts, self._finished_tasks, self._deferrals, self._transitions
        histograms = self._age, self._delay, self._lag, self._duration
        for metric in (*counters, self.superseded, *histograms):
            yield metric.to_metric()

    def _gauges(
        self, counters: Counters | None, counters_age_s: float, now_s: float, tenant: str | None
    ) -> Iterator[Metric]:
        if counters is not None:
            yield from _store_gauges(counters, counters_age_s)
        oldest_due = self._lanes.oldest_due(
            [] if counters is None else counters.due_lanes, int(now_s * 1000), tenant
        )
        help_text = "Time since the earliest due time of the tasks that wait, by the reason."
        ages = GaugeMetricFamily(
            "retry_oldest_due_task_age_seconds", help_text, labels=["waiting_for"]
        )
        for reason in WAIT_REASONS:
            due_at = oldest_due.get(reason)
            ages.add_metric([reason], 0.0 if due_at is None else max(0.0, now_s - due_at / 1000))
        yield ages
        help_text = "1 for the current state of the breaker of a lane."
        states = GaugeMetricFamily("retry_breaker_state", help_text, labels=["lane", "state"])
        help_text = "Retries that the budget of a lane still admits in this process."
        balances = GaugeMetricFamily("retry_budget_balance", help_text, labels=["lane"])
        for lane in self._lanes.tripped_and_busiest(_MAX_LABEL_VALUES, tenant):
            current_state, balance = lane.downstream.status(now_s)
            for state in _BREAKER_STATES:
                states.add_metric([lane.name, state], state == current_state)
            if balance is not None:
                balances.add_metric([lane.name], balance)
        yield from (states, balances)

    def _lane_label(self, lane: str) -> str:
        return lane if self._lane_names.admit(lane) else _OTHER


def _component_gauge(failing: Collection[str]) -> Metric:
    help_text = "1 if a component of this process is failing, else 0."
    family = GaugeMetricFamily("retry_component_failing", help_text, labels=["component"])
    for component in sorted({*_COMPONENTS, *failing}):
        family.add_metric([component], component in failing)
    return family


def _store_gauges(counters: Counters, age_s: float) -> Iterator[Metric]:
    help_text = "Age of the metrics that are read from the store."
    yield GaugeMetricFamily("retry_store_values_age_seconds", help_text, age_s)
    tasks = GaugeMetricFamily("retry_tasks", "Tasks, by status.", labels=["status"])
    for status, count in counters.task_counts.items():
        tasks.add_metric([status.name], count)
    help_text = "Unfinished and exhausted tasks of the lanes with the most pending tasks."
    lane_tasks = GaugeMetricFamily("retry_lane_tasks", help_text, labels=["lane", "status"])
    for lane in counters.busiest_lanes:
        counts = (lane.pending, lane.in_flight, lane.exhausted)
        for status, count in zip(_LANE_STATUSES, counts, strict=True):
            lane_tasks.add_metric([lane.name, status.name], count)
    yield from (tasks, lane_tasks)


class _MetricsCollector:
    """Provides metrics to a Prometheus registry, which calls `collect`."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
