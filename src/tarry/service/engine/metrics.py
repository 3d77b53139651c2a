"""The service's numbers for Prometheus, counted as things happen.

Counting is on the path of every attempt, so things are only noted there. The notes are counted some
hundreds at once, or when somebody asks; then it all becomes Prometheus' own classes. Labels are
bounded: what comes after the first hundred policies is counted as `other`, and only the hundred
lanes that need a look have gauges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from typing import TYPE_CHECKING

from tarry.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
except ImportError as _missing:
    _needed = "metrics need prometheus-client: pip install 'tarry[service]'"
    raise MissingExtra(_needed) from _missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    from prometheus_client.core import Metric

    from tarry.service.engine.lanes import Lanes
    from tarry.service.model import AttemptRecord
    from tarry.service.store import Counters

    _Tried: TypeAlias = tuple[str, str, int, float | None, float | None]
    """The outcome and the policy of an attempt, its lag, its duration, the delay after it."""
    _Ended: TypeAlias = tuple[str, int, int]
    """How a task ended, after how many attempts, at what age."""

_MOST_LABELS = 100
_OTHER = "other"
_SHORT = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000)
_LONG = (
    100, 500, 1_000, 5_000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 14_400_000, 43_200_000,
    86_400_000, 604_800_000,
)  # fmt: skip
_MOST_NOTES = 500
_STATES = ("closed", "open", "half-open")
_MOVES = {"parked": "open", "probing": "half-open", "resumed": "closed"}


class _Histogram:
    """Counts of milliseconds by upper bound, which Prometheus wants in seconds."""

    __slots__ = ("_bounds", "_count", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: tuple[int, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * len(bounds)
        """How many values did not exceed each bound."""
        self._count = 0
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count values; one below 0 counts as 0: a clock was set back."""
        ordered = sorted(values)  # so each bound is looked up only once
        self._count += len(ordered)
        self._sum += sum(ordered[bisect_left(ordered, 0) :])
        for place, bound in enumerate(self._bounds):
            self._counts[place] += bisect_right(ordered, bound)

    def family(self) -> Metric:
        """Return what Prometheus makes of it."""
        bounds = (str(bound / 1000) for bound in self._bounds)
        buckets = [*zip(bounds, self._counts, strict=True), ("+Inf", self._count)]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum / 1000)
        return family


class Metrics:
    """Counts what it is told, and renders it."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._tried: list[_Tried] = []
        self._ended: list[_Ended] = []
        self._policies: set[str] = set()
        self._attempts: Counter[tuple[str, ...]] = Counter()
        self._outcomes: Counter[tuple[str, ...]] = Counter()
        self._transitions: Counter[tuple[str, ...]] = Counter()
        self._superseded = 0
        self._age = _Histogram("retry_task_age_seconds", "Age of tasks when they end.", _LONG)
        self._delay = _Histogram("retry_delay_seconds", "Delays before retries.", _LONG)
        self._lag = _Histogram(
            "retry_scheduling_lag_seconds", "From when an attempt was due to its start.", _SHORT
        )
        self._duration = _Histogram(
            "retry_attempt_duration_seconds", "How long attempts took.", _SHORT
        )

    def attempt(self, attempt: AttemptRecord, policy_id: str) -> None:
        """Note an attempt."""
        lag, decision = attempt.started_at - attempt.scheduled_at, attempt.decision
        delay = None if decision is None else decision.delay_ms
        tried = self._tried
        tried.append((attempt.outcome, policy_id, lag, attempt.duration_ms, delay))
        if len(tried) >= _MOST_NOTES:
            self._count_tried()

    def ended(self, kind: str, attempts: int, age: int) -> None:
        """Note a task that ended `age` ms after it was added."""
        ended = self._ended
        ended.append((kind, attempts, age))
        if len(ended) >= _MOST_NOTES:
            self._count_ended()

    def superseded(self) -> None:
        """Count a result that came after its lease was lost."""
        self._superseded += 1

    def lost(self, attempts: int) -> None:
        """Count attempts whose worker went away."""
        self._attempts["lost", ""] += attempts

    def moved(self, kind: str) -> None:
        """Count what became of a lane, where its breaker did it."""
        if kind in _MOVES:
            self._transitions[(_MOVES[kind],)] += 1

    def render(
        self, counters: Counters, now: float, tenant: str | None = None
    ) -> tuple[bytes, str]:
        """Return the page and its content type; `counters` are the store's.

        For a tenant it has what is the tenant's alone: what was counted is of all of them.
        """
        registry = CollectorRegistry()
        counted = self._counted() if tenant is None else ()
        registry.register(_Page([*counted, *self._gauges(counters, now, tenant)]))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _count_tried(self) -> None:
        """Count the attempts that were noted."""
        if not self._tried:
            return
        outcomes, policies, lags, durations, delays = zip(*self._tried, strict=True)
        self._tried.clear()
        for (outcome, policy_id), count in Counter(zip(outcomes, policies, strict=True)).items():
            self._attempts[outcome, self._label(policy_id)] += count
        self._lag.observe(lags)
        self._duration.observe([took for took in durations if took is not None])
        self._delay.observe([delay for delay in delays if delay is not None])

    def _count_ended(self) -> None:
        """Count the tasks that were noted."""
        if not self._ended:
            return
        kinds, attempts, ages = zip(*self._ended, strict=True)
        self._ended.clear()
        for (kind, made), count in Counter(zip(kinds, attempts, strict=True)).items():
            self._outcomes[kind, "first" if made <= 1 else "retried"] += count
        self._age.observe(ages)

    def _counted(self) -> Iterator[Metric]:
        self._count_tried()
        self._count_ended()
        yield _counter(
            "retry_attempts", "Attempts, by what they came to.",
            ["outcome", "policy"], self._attempts,
        )  # fmt: skip
        yield _counter(
            "retry_task_outcomes",
            "Tasks that ended, by how, and whether the first attempt was enough.",
            ["outcome", "attempts"],
            self._outcomes,
        )
        yield _counter(
            "retry_breaker_transitions", "Breakers that moved, by the state they moved to.",
            ["to"], self._transitions,
        )  # fmt: skip
        superseded = CounterMetricFamily(
            "retry_superseded", "Results that came after their lease was lost."
        )
        superseded.add_metric([], self._superseded)
        yield superseded
        for histogram in (self._age, self._delay, self._lag, self._duration):
            yield histogram.family()

    def _gauges(self, counters: Counters, now: float, tenant: str | None) -> Iterator[Metric]:
        tasks = GaugeMetricFamily("retry_tasks", "Tasks, by status.", labels=["status"])
        for status, count in counters.tasks.items():
            tasks.add_metric([status.name], count)
        states = GaugeMetricFamily(
            "retry_breaker_state",
            "1 for the state that a lane's breaker is in.",
            labels=["lane", "state"],
        )
        balances = GaugeMetricFamily(
            "retry_budget_balance", "Retries that a lane's budget still pays for.", labels=["lane"]
        )
        for lane in self._lanes.first(_MOST_LABELS, tenant):
            state, balance = lane.downstream.status(now)
            for known in _STATES:
                states.add_metric([lane.name, known], known == state)
            if balance is not None:
                balances.add_metric([lane.name], balance)
        yield from (tasks, states, balances)

    def _label(self, policy_id: str) -> str:
        """Return the label of a policy: its own for the first hundred."""
        if policy_id not in self._policies:
            if len(self._policies) >= _MOST_LABELS:
                return _OTHER
            self._policies.add(policy_id)
        return policy_id


class _Page:
    """What a registry wants: something to collect."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Hand out everything."""
        yield from self._families


def _counter(name: str, text: str, labels: list[str], counts: Counter[tuple[str, ...]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(list(values), count)
    return family
