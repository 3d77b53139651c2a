"""Prometheus: calls, attempts, delays, breakers, budgets and hedges.

    tarry.listen(PrometheusListener())

Counters count events as they pass. Where breakers and budgets stand is read when it is scraped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.events import (
    AttemptFailed,
    BreakerMoved,
    GaveUp,
    HedgeFired,
    HedgeWon,
    Succeeded,
    WillWait,
)
from tarry.core.outcome import Kind
from tarry.errors import ConfigurationTypeError, MissingExtra
from tarry.telemetry.metrics import (
    DELAY_BUCKETS_S,
    MAX_LABEL_VALUES,
    LabelLimit,
    call_result,
    count_breaker_states,
    sum_budget_balances,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise MissingExtra(
        "this listener needs prometheus-client: pip install 'tarry[prometheus]'"
    ) from _missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from tarry.core.events import Event

_WHO = ("operation", "downstream")


class PrometheusListener:
    """Keeps the metrics of this process in a registry: the global one unless one is given.

    `max_names`: operations, and downstreams, that are told apart; the rest is "other".
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, max_names: int = MAX_LABEL_VALUES
    ) -> None:
        registry = REGISTRY if registry is None else registry
        if not isinstance(registry, CollectorRegistry):
            rule = "must be a prometheus_client.CollectorRegistry()"
            raise ConfigurationTypeError("registry", rule, registry)
        self._operations = LabelLimit(max_names)
        self._downstreams = LabelLimit(max_names)
        self._attempts = Counter(
            "tarry_attempts",
            "Attempts that ended, by what they came to.",
            (*_WHO, "outcome"),
            registry=registry,
        )
        self._calls = Counter(
            "tarry_calls",
            "Calls that ended; those that failed by the reason why there was no further attempt.",
            (*_WHO, "result", "reason"),
            registry=registry,
        )
        self._delays = Histogram(
            "tarry_retry_delay_seconds",
            "Delays before retries, after jitter and the server's hint.",
            _WHO,
            buckets=DELAY_BUCKETS_S,
            registry=registry,
        )
        self._transitions = Counter(
            "tarry_breaker_transitions",
            "Moves of circuit breakers from one state to another.",
            ("downstream", "before", "after"),
            registry=registry,
        )
        self._hedges = Counter(
            "tarry_hedges",
            "Further copies of hedged calls: those sent, and those of them that won.",
            (*_WHO, "result"),
            registry=registry,
        )
        registry.register(_Standing(self._downstreams))

    def __call__(self, event: Event) -> None:
        """Count one event."""
        match event:
            case AttemptFailed():
                self._attempts.labels(*self._who(event), event.kind.value).inc()
            case Succeeded():
                who = self._who(event)
                self._attempts.labels(*who, Kind.SUCCESS.value).inc()
                self._calls.labels(*who, call_result(event), "").inc()
            case GaveUp():
                who = self._who(event)
                self._calls.labels(*who, call_result(event), event.reason.value).inc()
            case WillWait():
                self._delays.labels(*self._who(event)).observe(event.delay)
            case BreakerMoved():
                moved = event.before.value, event.after.value
                self._transitions.labels(self._downstream(event), *moved).inc()
            case HedgeFired():
                self._hedges.labels(*self._who(event), "fired").inc()
            case HedgeWon():
                self._hedges.labels(*self._who(event), "won").inc()
            case _:
                return

    def _who(self, event: Event) -> tuple[str, str]:
        return self._operations(event.operation), self._downstream(event)

    def _downstream(self, event: Event) -> str:
        """Return the label; an empty one is the same as none."""
        return "" if event.downstream is None else self._downstreams(event.downstream)


class _Standing(Collector):
    """Where breakers and budgets stand, asked of the downstreams themselves at each scrape."""

    def __init__(self, names: LabelLimit) -> None:
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Read them."""
        state = GaugeMetricFamily(
            "tarry_breaker_state",
            "Circuit breakers in each state.",
            labels=("downstream", "state"),
        )
        for (name, where), number in count_breaker_states(self._names).items():
            state.add_metric((name, where.value), number)
        yield state
        balance = GaugeMetricFamily(
            "tarry_budget_balance", "What retry budgets hold.", labels=("downstream",)
        )
        for name, amount in sum_budget_balances(self._names).items():
            balance.add_metric((name,), amount)
        yield balance
