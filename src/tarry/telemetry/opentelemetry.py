"""OpenTelemetry: failed attempts as events of the current span, or a span for each attempt.

    tarry.listen(OpenTelemetryListener())

A span of an attempt ends before the wait that follows it, so backoff is nobody's latency. Errors
that were retried are told on the attempt alone: the span of the operation is left as it is, and
the error that ends a call is recorded by whoever it is raised to.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from tarry.core.checks import check_one_of
from tarry.core.events import (
    AttemptFailed,
    AttemptStarted,
    BreakerMoved,
    GaveUp,
    HedgeFired,
    HedgeWon,
    Succeeded,
    WillWait,
)
from tarry.core.outcome import Kind
from tarry.errors import ConfigurationTypeError, MissingExtra, ResultNotAccepted
from tarry.telemetry.event_fields import EVENT_NAMES
from tarry.telemetry.metrics import (
    DELAY_BUCKETS_S,
    MAX_LABEL_VALUES,
    LabelLimit,
    call_result,
    count_breaker_states,
    sum_budget_balances,
)

try:
    from opentelemetry import metrics, trace
except ImportError as _missing:
    raise MissingExtra(
        "this listener needs opentelemetry-api: pip install 'tarry[otel]'"
    ) from _missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

    from tarry.core.events import Event

_DEEPEST = 16
"""Attempts within attempts that are kept apart. One that is cancelled ends without an event, so a
task that is cancelled again and again would keep ever more."""

_LEAST_STATUS, _MOST_STATUS = 100, 599

_IS_HTTP = re.compile(r"\S+ https?://").match
"""What the HTTP adapters call an operation: the method and the origin."""

_Key: TypeAlias = tuple[str, str | None, int]


class _Running(NamedTuple):
    """An attempt whose span has not ended."""

    key: _Key
    span: Span


class OpenTelemetryListener:
    """Tells spans and keeps metrics; providers that are not given are the global ones.

    `spans`: "events" puts an event on the current span for each attempt that failed and for giving
    up; "spans" makes a span for each attempt, that of a client where there is a downstream.
    `max_names`: operations, downstreams and types of errors that the metrics tell apart.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        spans: Literal["events", "spans"] = "events",
        *,
        max_names: int = MAX_LABEL_VALUES,
    ) -> None:
        check_one_of("spans", spans, ("events", "spans"))
        _has("tracer_provider", tracer_provider, "get_tracer")
        _has("meter_provider", meter_provider, "get_meter")
        self._tracer = trace.get_tracer("tarry", tracer_provider=tracer_provider)
        self._metrics = OpenTelemetryMetrics(meter_provider, max_names)
        self._errors = LabelLimit(max_names, "_OTHER")
        self._trace = self._tell_spans if spans == "spans" else self._tell_events
        # Events do not say which call they belong to, but a call stays in one context: that of its
        # task or thread. One variable for each listener, because there are few.
        self._running: ContextVar[tuple[_Running, ...]] = ContextVar("tarry_running", default=())

    def __call__(self, event: Event) -> None:
        """Tell one event."""
        error_type = None
        if isinstance(event, AttemptFailed):
            error_type = self._errors(_error_type(event))
        self._trace(event, error_type)
        self._metrics.count(event, error_type)

    def _tell_events(self, event: Event, error_type: str | None) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        match event:
            case AttemptFailed():
                attributes = _attributes(event)
                attributes |= {"tarry.outcome": event.kind.value, "error.type": error_type or ""}
                span.add_event(EVENT_NAMES[AttemptFailed], attributes)
            case GaveUp():
                attributes = _who(event)
                attributes |= {"tarry.attempts": event.attempts, "tarry.reason": event.reason.value}
                span.add_event(EVENT_NAMES[GaveUp], attributes)
            case _:
                return

    def _tell_spans(self, event: Event, error_type: str | None) -> None:
        match event:
            case AttemptStarted():
                # Not made the current one: after a cancellation nobody would take it back.
                kinds = trace.SpanKind
                kind = kinds.INTERNAL if event.downstream is None else kinds.CLIENT
                span = self._tracer.start_span(
                    event.operation, kind=kind, attributes=_attributes(event)
                )
                running = _Running((event.operation, event.downstream, event.attempt), span)
                self._running.set((*self._running.get()[1 - _DEEPEST :], running))
            case AttemptFailed():
                found = self._take((event.operation, event.downstream, event.attempt))
                if found is not None:
                    found.set_attribute("tarry.outcome", event.kind.value)
                    found.set_attribute("error.type", error_type or "")
                    found.set_status(trace.StatusCode.ERROR)
                    found.end()
            case Succeeded():
                found = self._take((event.operation, event.downstream, event.attempts))
                if found is not None:
                    found.set_attribute("tarry.outcome", "success")
                    found.end()
            case _:
                return

    def _take(self, key: _Key) -> Span | None:
        """Take the innermost attempt of this key, and forget those inside it that were cancelled.

        None for one that began before the listener did, and for hedges.
        """
        running = self._running.get()
        for place in range(len(running) - 1, -1, -1):
            if running[place].key == key:
                self._running.set(running[:place])
                return running[place].span
        return None


def _has(field: str, provider: object, method: str) -> None:
    """Refuse what is no provider: they are told by their method, since not all derive from one."""
    if provider is not None and not callable(getattr(provider, method, None)):
        raise ConfigurationTypeError(field, "must be a provider of opentelemetry or None", provider)


def _who(event: Event) -> dict[str, str | int]:
    who: dict[str, str | int] = {"tarry.operation": event.operation}
    if event.downstream is not None:
        who["tarry.downstream"] = event.downstream
    return who


def _attributes(event: AttemptStarted | AttemptFailed) -> dict[str, str | int]:
    attributes = _who(event) | {"tarry.attempt": event.attempt}
    # The convention: absent on what was not sent again.
    if event.attempt > 1 and _IS_HTTP(event.operation):
        attributes["http.request.resend_count"] = event.attempt - 1
    return attributes


def _error_type(event: AttemptFailed) -> str:
    """Return the status or the code of a failure, else the name of the error's class."""
    error = event.error
    if isinstance(error, ResultNotAccepted):
        for name in ("status_code", "status"):
            status = getattr(error.result, name, None)
            if isinstance(status, int) and _LEAST_STATUS <= status <= _MOST_STATUS:
                return str(int(status))
    if error is None or event.detail not in ("", type(error).__name__):
        return event.detail or "_OTHER"
    return type(error).__qualname__


class OpenTelemetryMetrics:
    """The instruments, and what each event adds to them."""

    def __init__(self, provider: MeterProvider | None, max_names: int) -> None:
        meter = metrics.get_meter("tarry", meter_provider=provider)
        self._operations = LabelLimit(max_names)
        self._downstreams = LabelLimit(max_names)
        self._attempts = meter.create_counter(
            "tarry.attempts", "{attempt}", "Attempts that ended, by what they came to."
        )
        self._calls = meter.create_counter(
            "tarry.calls", "{call}", "Calls that ended, and why those that failed did."
        )
        self._delays = meter.create_histogram(
            "tarry.retry.delay",
            "s",
            "Delays before retries, after jitter and the server's hint.",
            explicit_bucket_boundaries_advisory=DELAY_BUCKETS_S,
        )
        self._transitions = meter.create_counter(
            "tarry.breaker.transitions", "{transition}", "Moves of circuit breakers."
        )
        self._hedges = meter.create_counter(
            "tarry.hedges", "{hedge}", "Further copies of hedged calls: those sent, those that won."
        )
        meter.create_observable_up_down_counter(
            "tarry.breaker.state", [self._states], "{breaker}", "Circuit breakers in each state."
        )
        meter.create_observable_gauge(
            "tarry.budget.balance", [self._balances], "{token}", "What retry budgets hold."
        )

    def count(self, event: Event, error_type: str | None) -> None:
        """Count one event; an attempt that failed with its type of error."""
        match event:
            case AttemptFailed():
                attributes = self._who(event) | {"tarry.outcome": event.kind.value}
                self._attempts.add(1, attributes | {"error.type": error_type or ""})
            case Succeeded():
                who = self._who(event)
                self._attempts.add(1, who | {"tarry.outcome": Kind.SUCCESS.value})
                self._calls.add(1, who | {"tarry.result": call_result(event)})
            case GaveUp():
                attributes = self._who(event) | {"tarry.result": call_result(event)}
                self._calls.add(1, attributes | {"tarry.reason": event.reason.value})
            case WillWait():
                self._delays.record(event.delay, self._who(event))
            case BreakerMoved():
                moved = {
                    "tarry.breaker.before": event.before.value,
                    "tarry.breaker.after": event.after.value,
                }
                self._transitions.add(1, self._who(event) | moved)
            case HedgeFired():
                self._hedges.add(1, self._who(event) | {"tarry.result": "fired"})
            case HedgeWon():
                self._hedges.add(1, self._who(event) | {"tarry.result": "won"})
            case _:
                return

    def _who(self, event: Event) -> dict[str, str]:
        who: dict[str, str] = {}
        if event.operation:  # a breaker moves for all operations
            who["tarry.operation"] = self._operations(event.operation)
        if event.downstream is not None:
            who["tarry.downstream"] = self._downstreams(event.downstream)
        return who

    def _states(self, _: CallbackOptions) -> Iterator[Observation]:
        for (name, state), number in count_breaker_states(self._downstreams).items():
            attributes = {"tarry.downstream": name, "tarry.breaker.state": state.value}
            yield metrics.Observation(number, attributes)

    def _balances(self, _: CallbackOptions) -> Iterator[Observation]:
        for name, balance in sum_budget_balances(self._downstreams).items():
            yield metrics.Observation(balance, {"tarry.downstream": name})
