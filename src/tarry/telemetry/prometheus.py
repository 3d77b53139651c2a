"""The listener for Prometheus: calls, attempts, delays, breakers, budgets and hedges.

    tarry.listen(PrometheusListener())

Counters are updated by events. The states of breakers and the balances of budgets are read from
the downstreams at each scrape.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tarry.core import events
from tarry.core.extras import require_extra
from tarry.core.outcome import Kind
from tarry.errors import ConfigurationTypeError
from tarry.telemetry import metrics

with require_extra("this listener needs prometheus-client", "prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

_LABELS = ("operation", "downstream")


class PrometheusListener:
    """Counts events in the metrics of a registry, by default the global one.

    `max_names`: the maximum number of distinct operations, and of downstreams, with their own time
    series. All others are counted as "other".
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        max_names: int = metrics.MAX_LABEL_VALUES,
    ) -> None:
        registry = REGISTRY if registry is None else registry
        if not isinstance(registry, CollectorRegistry):
            rule = "must be a prometheus_client.CollectorRegistry()"
            raise ConfigurationTypeError("registry", rule, registry)
        self._operation_limit = metrics.LabelLimit(max_names)
        self._downstream_limit = metrics.LabelLimit(max_names)
        create_counter = partial(Counter, registry=registry)
        self._attempts = create_counter(
            "tarry_attempts", "Attempts that ended, by outcome.", (*_LABELS, "outcome")
        )
        self._calls = create_counter(
            "tarry_calls",
            "Calls that ended, by result. Failed calls also by the reason why they ended.",
            (*_LABELS, "result", "reason"),
        )
        self._delays = Histogram(
            "tarry_retry_delay_seconds",
            "Delays before retries, with jitter and the server's hint.",
            _LABELS,
            buckets=metrics.DELAY_BUCKETS_S,
            registry=registry,
        )
        self._transitions = create_counter(
            "tarry_breaker_transitions",
            "State changes of circuit breakers.",
            ("downstream", "before", "after"),
        )
        self._hedges = create_counter(
            "tarry_hedges",
            "Hedges (additional attempts of calls): fired, and won.",
            (*_LABELS, "result"),
        )
        registry.register(_DownstreamCollector(self._downstream_limit))

    def __call__(self, event: events.Event) -> None:
        """Count one event."""
        if isinstance(event, events.AttemptFailed):
            self._attempts.labels(*self._labels(event), event.kind.value).inc()
        elif isinstance(event, events.Succeeded):
            labels = self._labels(event)
            self._attempts.labels(*labels, Kind.SUCCESS.value).inc()
            self._calls.labels(*labels, metrics.call_result(event), "").inc()
        elif isinstance(event, events.GaveUp):
            labels = self._labels(event)
            self._calls.labels(*labels, metrics.call_result(event), event.reason.value).inc()
        elif isinstance(event, events.WillWait):
            self._delays.labels(*self._labels(event)).observe(event.delay)
        elif isinstance(event, events.BreakerStateChanged):
            states = event.before.value, event.after.value
            self._transitions.labels(self._downstream_label(event), *states).inc()
        elif isinstance(event, events.HedgeFired):
            self._hedges.labels(*self._labels(event), "fired").inc()
        elif isinstance(event, events.HedgeWon):
            self._hedges.labels(*self._labels(event), "won").inc()

    def _labels(self, event: events.Event) -> tuple[str, str]:
        return self._operation_limit.limit(event.operation), self._downstream_label(event)

    def _downstream_label(self, event: events.Event) -> str:
        """Return the downstream's label; Prometheus treats an empty label as absent."""
        return "" if event.downstream is None else self._downstream_limit.limit(event.downstream)


class _DownstreamCollector(Collector):
    """Reads the states of breakers and the balances of budgets at each scrape."""

    def __init__(self, name_limit: metrics.LabelLimit) -> None:
        self._name_limit = name_limit

    def collect(self) -> Iterator[Metric]:
        """Return the current gauges."""
        labels = "downstream", "state"
        states = GaugeMetricFamily(
            "tarry_breaker_state", "Circuit breakers in each state.", labels=labels
        )
        for (name, breaker_state), count in metrics.count_breaker_states(self._name_limit).items():
            states.add_metric((name, breaker_state.value), count)
        yield states
        balances = GaugeMetricFamily(
            "tarry_budget_balance", "Tokens in retry budgets.", labels=("downstream",)
        )
        for name, balance in metrics.sum_budget_balances(self._name_limit).items():
            balances.add_metric((name,), balance)
        yield balances
