"""OpenTelemetry: failed attempts as events of the current span."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode, use_span

import tarry
from tarry.telemetry.opentelemetry import OpenTelemetryListener
from tarry.testing import VirtualClock
from tests.runtime.drivers import FAIL, OK, Dependency, Driver
from tests.telemetry.sample_calls import every_driver, listening

tracer = TracerProvider().get_tracer("test")


@pytest.fixture
def listener() -> OpenTelemetryListener:
    """A listener with default arguments."""
    return OpenTelemetryListener()


def make_current(span: Any) -> Any:
    """Make a span the current one without recording errors."""
    return use_span(span, record_exception=False, set_status_on_exception=False)


def events_of(span: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and attributes of the events of a span."""
    return [(event.name, dict(event.attributes)) for event in span.events]


@every_driver
def test_failed_attempts_are_events(
    driver: Driver, clock: VirtualClock, listener: OpenTelemetryListener
) -> None:
    """Each failed attempt is an event, and the status of the span stays unset."""
    span: Any = tracer.start_span("operation")
    with make_current(span), listening(listener):
        driver.run(clock, Dependency(clock, FAIL, FAIL, OK))

    first = {
        "tarry.operation": "op",
        "tarry.attempt": 1,
        "tarry.outcome": "transient",
        "error.type": "ConnectionError",
    }
    second = first | {"tarry.attempt": 2}
    assert [("tarry.attempt_failed", first), ("tarry.attempt_failed", second)] == events_of(span)
    assert StatusCode.UNSET == span.status.status_code
    assert {} == dict(span.attributes)


def test_giving_up_is_an_event(clock: VirtualClock, listener: OpenTelemetryListener) -> None:
    """Giving up is an event with its reason; the error is not recorded on the span."""
    span: Any = tracer.start_span("operation")
    payments = tarry.Downstream("payments", budget=tarry.TokenBudget(capacity=1))
    with make_current(span), listening(listener), pytest.raises(ConnectionError):
        tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, downstream=payments, name="op")

    assert (
        "tarry.gave_up",
        {
            "tarry.operation": "op",
            "tarry.downstream": "payments",
            "tarry.attempts": 1,
            "tarry.reason": "budget-empty",
        },
    ) == events_of(span)[-1]
    assert StatusCode.UNSET == span.status.status_code


def test_listener_without_a_provider(clock: VirtualClock) -> None:
    """Without a configured provider the listener does not fail the call."""
    with listening(OpenTelemetryListener()):
        assert "done" == tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)


def test_unknown_mode_is_rejected() -> None:
    with pytest.raises(tarry.ConfigurationError, match="spans must be one of events, spans"):
        OpenTelemetryListener(spans="span")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["tracer_provider", "meter_provider"])
def test_providers_are_checked(field: str) -> None:
    """An object that is not a provider is rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match=f"{field} must be a provider"):
        OpenTelemetryListener(**{field: "x"})  # type: ignore[arg-type]


@every_driver
def test_listener_that_raises(
    driver: Driver,
    clock: VirtualClock,
    listener: OpenTelemetryListener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failure of the metrics does not fail the call, and is logged."""
    monkeypatch.setattr(listener, "_metrics", None)

    with listening(listener):
        assert "done" == driver.run(clock, Dependency(clock, FAIL, OK))

    assert 6 == sum(record.levelno == logging.ERROR for record in caplog.records)
