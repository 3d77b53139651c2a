"""The listener for OpenTelemetry: metrics, and either span events or a span for each attempt.

    tarry.listen(OpenTelemetryListener())

The span of an attempt ends before the wait that follows, so that backoff does not count as latency.
A retried error is recorded only on the span of its attempt. The listener sets no error status on
the current span of the program, because the code that handles the final error does so.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, TypeAlias

from tarry.core import events
from tarry.core.checks import check_one_of
from tarry.core.extras import require_extra
from tarry.core.outcome import Kind
from tarry.errors import ConfigurationTypeError, ResultNotAccepted
from tarry.telemetry import metrics as common_metrics
from tarry.telemetry.logs import EVENT_NAMES

with require_extra("this listener needs opentelemetry-api", "otel"):
    from opentelemetry import metrics, trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

MAX_OPEN_SPANS = 16
"""Limit of open spans in a context. Without a limit the spans of cancelled attempts, which no event
ends, would accumulate in an asyncio task."""

_MIN_HTTP_STATUS, _MAX_HTTP_STATUS = 100, 599

_match_http_operation = re.compile(r"\S+ https?://").match
"""Matches operations of the HTTP adapters, whose names consist of method and origin."""

_AttemptKey: TypeAlias = tuple[str, str | None, int]
"""Operation, downstream and number of an attempt whose span has not ended."""


class OpenTelemetryListener:
    """Records spans and metrics, by default with the global providers.

    `spans`: how attempts are traced. "events" adds a span event to the current span when an attempt
    or a call fails; "spans" creates a span for each attempt, of kind CLIENT if it has a downstream.
    `max_names`: the maximum number of operations, of downstreams and of error types in metrics.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        spans: Literal["events", "spans"] = "events",
        *,
        max_names: int = common_metrics.MAX_LABEL_VALUES,
    ) -> None:
        check_one_of("spans", spans, ("events", "spans"))
        _check_provider("tracer_provider", tracer_provider, "get_tracer")
        _check_provider("meter_provider", meter_provider, "get_meter")
        self._tracer = trace.get_tracer("tarry", tracer_provider=tracer_provider)
        self._metrics = OpenTelemetryMetrics(meter_provider, max_names)
        self._error_type_limit = common_metrics.LabelLimit(max_names, "_OTHER")
        self._record_trace = self._start_or_end_span if spans == "spans" else self._add_span_event
        # An event does not identify its call. But all events of a call are emitted in one asyncio
        # or trio task or one thread, so a context variable can hold the open spans. Each listener
        # has its own variable, which is never freed; a program has few listeners.
        self._open_spans: ContextVar[tuple[tuple[_AttemptKey, Span], ...]] = ContextVar(
            "tarry_open_spans", default=()
        )

    def __call__(self, event: events.Event) -> None:
        """Record one event."""
        error_type = None
        if isinstance(event, events.AttemptFailed):
            error_type = self._error_type_limit.limit(_error_type(event))
        self._record_trace(event, error_type)
        self._metrics.count(event, error_type)

    def _add_span_event(self, event: events.Event, error_type: str | None) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        if isinstance(event, events.AttemptFailed):
            attributes = _attempt_attributes(event)
            attributes |= {"tarry.outcome": event.kind.value, "error.type": error_type or ""}
            span.add_event(EVENT_NAMES[events.AttemptFailed], attributes)
        elif isinstance(event, events.GaveUp):
            attributes = _call_attributes(event)
            attributes |= {"tarry.attempts": event.attempts, "tarry.reason": event.reason.value}
            span.add_event(EVENT_NAMES[events.GaveUp], attributes)

    def _start_or_end_span(self, event: events.Event, error_type: str | None) -> None:
        if isinstance(event, events.AttemptStarted):
            # The span is not made the current span, because after a cancellation no event
            # would restore the previous one.
            kinds, attributes = trace.SpanKind, _attempt_attributes(event)
            kind = kinds.INTERNAL if event.downstream is None else kinds.CLIENT
            span = self._tracer.start_span(event.operation, kind=kind, attributes=attributes)
            key = event.operation, event.downstream, event.attempt
            outer_spans = self._open_spans.get()[1 - MAX_OPEN_SPANS :]
            self._open_spans.set((*outer_spans, (key, span)))
        elif isinstance(event, events.AttemptFailed):
            key = event.operation, event.downstream, event.attempt
            self._end_span(key, event.kind, error_type)
        elif isinstance(event, events.Succeeded):
            key = event.operation, event.downstream, event.attempts
            self._end_span(key, Kind.SUCCESS, None)

    def _end_span(self, key: _AttemptKey, outcome: Kind, error_type: str | None) -> None:
        """End the span of the innermost attempt with this key.

        Attempts that started inside this attempt and are still open were cancelled; their spans are
        dropped. Hedges, and attempts that began before the listener was added, have no span.
        """
        spans = self._open_spans.get()
        for index in range(len(spans) - 1, -1, -1):
            open_key, span = spans[index]
            if open_key == key:
                self._open_spans.set(spans[:index])
                span.set_attribute("tarry.outcome", outcome.value)
                if error_type is not None:
                    span.set_attribute("error.type", error_type)
                    span.set_status(trace.StatusCode.ERROR)
                span.end()
                return


def _check_provider(field: str, provider: object, method: str) -> None:
    """Raise if `provider` lacks the method; not all providers share a base class."""
    if provider is not None and not callable(getattr(provider, method, None)):
        raise ConfigurationTypeError(field, "must be a provider of opentelemetry or None", provider)


def _call_attributes(event: events.Event) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {"tarry.operation": event.operation}
    if event.downstream is not None:
        attributes["tarry.downstream"] = event.downstream
    return attributes


def _attempt_attributes(
    event: events.AttemptStarted | events.AttemptFailed,
) -> dict[str, str | int]:
    attributes = _call_attributes(event) | {"tarry.attempt": event.attempt}
    # The semantic conventions omit this attribute on the first attempt.
    if event.attempt > 1 and _match_http_operation(event.operation):
        attributes["http.request.resend_count"] = event.attempt - 1
    return attributes


def _error_type(event: events.AttemptFailed) -> str:
    """Return the status of a result, or the failure's detail (a code), or the error's class."""
    error = event.error
    if isinstance(error, ResultNotAccepted):
        for name in ("status_code", "status"):
            status = getattr(error.result, name, None)
            if isinstance(status, int) and _MIN_HTTP_STATUS <= status <= _MAX_HTTP_STATUS:
                return str(int(status))
    if error is None or event.detail not in ("", type(error).__name__):
        return event.detail or "_OTHER"
    return type(error).__qualname__


class OpenTelemetryMetrics:
    """The same metrics as in `PrometheusListener`, named by the conventions of OpenTelemetry."""

    def __init__(self, provider: MeterProvider | None, max_names: int) -> None:
        meter = metrics.get_meter("tarry", meter_provider=provider)
        self._operation_limit = common_metrics.LabelLimit(max_names)
        self._downstream_limit = common_metrics.LabelLimit(max_names)
        create_counter = meter.create_counter
        self._attempts = create_counter(
            "tarry.attempts", "{attempt}", "Attempts that ended, by outcome."
        )
        self._calls = create_counter(
            "tarry.calls", "{call}", "Calls that ended, by result and reason."
        )
        self._delays = meter.create_histogram(
            "tarry.retry.delay",
            "s",
            "Delays before retries, with jitter and the server's hint.",
            explicit_bucket_boundaries_advisory=common_metrics.DELAY_BUCKETS_S,
        )
        self._transitions = create_counter(
            "tarry.breaker.transitions", "{transition}", "State changes of circuit breakers."
        )
        self._hedges = create_counter(
            "tarry.hedges", "{hedge}", "Hedges (additional attempts of calls): fired, and won."
        )
        meter.create_observable_up_down_counter(
            "tarry.breaker.state",
            [self._observe_states],
            "{breaker}",
            "Circuit breakers in each state.",
        )
        meter.create_observable_gauge(
            "tarry.budget.balance", [self._observe_balances], "{token}", "Tokens in retry budgets."
        )

    def count(self, event: events.Event, error_type: str | None) -> None:
        """Count one event; `error_type` is set for failed attempts."""
        if isinstance(event, events.AttemptFailed):
            attributes = self._attributes(event) | {"tarry.outcome": event.kind.value}
            self._attempts.add(1, attributes | {"error.type": error_type or ""})
        elif isinstance(event, events.Succeeded):
            attributes = self._attributes(event)
            self._attempts.add(1, attributes | {"tarry.outcome": Kind.SUCCESS.value})
            self._calls.add(1, attributes | {"tarry.result": common_metrics.call_result(event)})
        elif isinstance(event, events.GaveUp):
            attributes = self._attributes(event) | {"tarry.reason": event.reason.value}
            self._calls.add(1, attributes | {"tarry.result": common_metrics.call_result(event)})
        elif isinstance(event, events.WillWait):
            self._delays.record(event.delay, self._attributes(event))
        elif isinstance(event, events.BreakerStateChanged):
            before, after = event.before.value, event.after.value
            states = {"tarry.breaker.before": before, "tarry.breaker.after": after}
            self._transitions.add(1, self._attributes(event) | states)
        elif isinstance(event, events.HedgeFired):
            self._hedges.add(1, self._attributes(event) | {"tarry.result": "fired"})
        elif isinstance(event, events.HedgeWon):
            self._hedges.add(1, self._attributes(event) | {"tarry.result": "won"})

    def _attributes(self, event: events.Event) -> dict[str, str]:
        attributes: dict[str, str] = {}
        if event.operation:  # events of breakers belong to no operation
            attributes["tarry.operation"] = self._operation_limit.limit(event.operation)
        if event.downstream is not None:
            attributes["tarry.downstream"] = self._downstream_limit.limit(event.downstream)
        return attributes

    def _observe_states(self, _: CallbackOptions) -> Iterator[Observation]:
        counts = common_metrics.count_breaker_states(self._downstream_limit)
        for (name, state), count in counts.items():
            attributes = {"tarry.downstream": name, "tarry.breaker.state": state.value}
            yield metrics.Observation(count, attributes)

    def _observe_balances(self, _: CallbackOptions) -> Iterator[Observation]:
        for name, balance in common_metrics.sum_budget_balances(self._downstream_limit).items():
            yield metrics.Observation(balance, {"tarry.downstream": name})
