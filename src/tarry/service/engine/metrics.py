"""The service's numbers for Prometheus, counted as things happen.

Counting is on the path of every attempt, so it is a few additions here, and becomes Prometheus'
own classes when somebody asks. Labels are bounded: what comes after the first hundred policies is
counted as `other`, and only the hundred lanes that need a look have gauges.
"""

from __future__ import annotations

from bisect import bisect_left
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
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from tarry.service.engine.lanes import Lanes
    from tarry.service.model import Attempt
    from tarry.service.store import Counters

_MOST_LABELS = 100
_OTHER = "other"
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 604800.0)
_STATES = ("closed", "open", "half-open")
_MOVES = {"parked": "open", "probing": "half-open", "resumed": "closed"}


class _Histogram:
    """Counts of values by upper bound."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        """Return what Prometheus makes of it."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return family


class Metrics:
    """Counts what it is told, and renders it."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
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

    def attempt(self, attempt: Attempt, policy_id: str) -> None:
        """Count an attempt."""
        policy = policy_id if policy_id in self._policies else self._label(policy_id)
        self._attempts[attempt.outcome, policy] += 1
        self._lag.observe(max(0, attempt.started_at - attempt.scheduled_at) / 1000)
        if attempt.duration_ms is not None:
            self._duration.observe(attempt.duration_ms / 1000)
        decision = attempt.decision
        if decision is not None and decision.delay_ms is not None:
            self._delay.observe(decision.delay_ms / 1000)

    def ended(self, kind: str, attempts: int, age: int) -> None:
        """Count a task that ended `age` ms after it was added."""
        self._outcomes[kind, "first" if attempts <= 1 else "retried"] += 1
        self._age.observe(max(0, age) / 1000)

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

    def _counted(self) -> Iterator[Metric]:
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
            state, balance = lane.downstream.standing(now)
            for known in _STATES:
                states.add_metric([lane.name, known], known == state)
            if balance is not None:
                balances.add_metric([lane.name], balance)
        yield from (tasks, states, balances)

    def _label(self, policy_id: str) -> str:
        """Return the label of a policy that has none yet."""
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
