"""OpenTelemetry metrics, which are the Prometheus metrics with other names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import tarry
from tarry.telemetry.opentelemetry import OpenTelemetryListener
from tarry.testing import VirtualClock
from tests.runtime.drivers import FAIL, OK, Dependency, Driver, Step
from tests.telemetry.sample_calls import (
    CALL_COUNT,
    ConcurrentCaller,
    SampleCall,
    every_driver,
    every_sample_call,
    in_tasks_and_threads,
    listening,
    reopen_breaker,
    sync_and_async_hedged_call,
)


class Meter:
    """A listener whose metrics can be read."""

    def __init__(self, **options: Any) -> None:
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader])
        self.listener = OpenTelemetryListener(meter_provider=provider, **options)

    def points(self, name: str) -> list[Any]:
        """Return the data points of a metric."""
        data: Any = self._reader.get_metrics_data()
        if data is None:
            return []
        [scope] = data.resource_metrics[0].scope_metrics
        return [p for m in scope.metrics if m.name == name for p in m.data.data_points]

    def values(self, name: str, *attributes: str) -> dict[tuple[Any, ...], float]:
        """Return the values of a metric by these attributes."""
        return {
            tuple(point.attributes.get(attribute, "") for attribute in attributes): point.value
            for point in self.points(name)
        }


@pytest.fixture
def meter() -> Meter:
    """A listener with its own meter provider."""
    return Meter()


@every_driver
@every_sample_call
def test_sample_calls_are_counted(
    driver: Driver, sample: SampleCall, clock: VirtualClock, meter: Meter
) -> None:
    """Every sample call is counted with its attempts and delays, with every driver."""
    with listening(meter.listener):
        sample.run(driver, clock)

    attempts = meter.values("tarry.attempts", "tarry.outcome")
    assert {(outcome,): number for outcome, number in sample.attempts.items()} == attempts
    assert {sample.result_and_reason: 1} == meter.values(
        "tarry.calls", "tarry.result", "tarry.reason"
    )
    assert sample.delays == sum(point.count for point in meter.points("tarry.retry.delay"))


def test_attributes_of_data_points(clock: VirtualClock, meter: Meter) -> None:
    """Data points have the operation and the downstream; failed attempts the error type."""
    disk = tarry.Downstream("disk")
    with listening(meter.listener):
        tarry.call(
            Dependency(clock, FAIL, OK).call, on=ConnectionError, name="load", downstream=disk
        )

    common_attributes = {"tarry.operation": "load", "tarry.downstream": "disk"}
    assert [
        common_attributes | {"tarry.outcome": "transient", "error.type": "ConnectionError"},
        common_attributes | {"tarry.outcome": "success"},
    ] == [dict(point.attributes) for point in meter.points("tarry.attempts")]
    [delays] = meter.points("tarry.retry.delay")
    assert pytest.approx(0.05) == delays.sum
    assert 3600 == max(delays.explicit_bounds)


@sync_and_async_hedged_call
def test_hedges_are_counted(make_hedged_call: Callable[[], None], meter: Meter) -> None:
    """A copy that was sent and won is counted as fired and as won."""
    with listening(meter.listener):
        make_hedged_call()

    assert {("read", "fired"): 1, ("read", "won"): 1} == meter.values(
        "tarry.hedges", "tarry.operation", "tarry.result"
    )
    assert {("after-retries",): 1} == meter.values("tarry.calls", "tarry.result")


def test_breaker_transitions_and_state(clock: VirtualClock, meter: Meter) -> None:
    """State changes of a breaker are counted; the gauge is 1 for its state, else 0."""
    with listening(meter.listener):
        downstream = reopen_breaker(clock, "otel-breaker")

    assert {("closed", "open"): 1, ("open", "half-open"): 1, ("half-open", "open"): 1} == (
        meter.values("tarry.breaker.transitions", "tarry.breaker.before", "tarry.breaker.after")
    )
    states = meter.values("tarry.breaker.state", "tarry.downstream", "tarry.breaker.state")
    assert {state.value: state is downstream.state for state in tarry.BreakerState} == {
        state: bool(value) for (name, state), value in states.items() if name == "otel-breaker"
    }


def test_budget_is_read_at_each_export(meter: Meter) -> None:
    """The balance gauge is read when metrics are exported."""
    downstream = tarry.Downstream("otel-budget", budget=tarry.TokenBudget(capacity=40))
    assert downstream.budget is not None
    downstream.budget.withdraw(5, 0)

    assert 35 == meter.values("tarry.budget.balance", "tarry.downstream")["otel-budget",]


def test_number_of_names_is_limited() -> None:
    """Operations and error types beyond the limit are counted as "other"."""
    meter = Meter(max_names=2)
    with listening(meter.listener):
        for number in range(4):
            error = type(f"Error{number}", (Exception,), {})
            with pytest.raises(error):
                tarry.call(Step(raises=error).finish, on=OSError, name=f"job {number}")

    assert {("job 0", "Error0"): 1, ("job 1", "Error1"): 1, ("other", "_OTHER"): 2} == (
        meter.values("tarry.attempts", "tarry.operation", "error.type")
    )


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (SimpleNamespace(status_code=503), "503"),
        (SimpleNamespace(status=429), "429"),
        (SimpleNamespace(status="failed"), "ResultNotAccepted"),
        (SimpleNamespace(status=1_000_000), "ResultNotAccepted"),
        (None, "ResultNotAccepted"),
    ],
)
def test_error_type_of_a_response_that_was_not_accepted(
    response: object, expected: str, clock: VirtualClock, meter: Meter
) -> None:
    """The error type of a response that was not accepted is its HTTP status, if it has one."""
    with listening(meter.listener):
        dependency = Dependency(clock, Step(response), OK)
        tarry.call(dependency.call, on=OSError, until=lambda result: result == "done")

    assert {("success", ""): 1, ("transient", expected): 1} == (
        meter.values("tarry.attempts", "tarry.outcome", "error.type")
    )


def test_error_type_of_a_failure_with_a_code(clock: VirtualClock, meter: Meter) -> None:
    """The error type is the code in the outcome, not the class of the error."""
    unavailable = tarry.outcome_of_code("UNAVAILABLE")
    with listening(meter.listener):
        tarry.call(Dependency(clock, FAIL, OK).call, on=lambda _: unavailable)

    assert {("success", ""): 1, ("transient", "UNAVAILABLE"): 1} == (
        meter.values("tarry.attempts", "tarry.outcome", "error.type")
    )


def test_error_type_of_a_nested_class(clock: VirtualClock, meter: Meter) -> None:
    class Lost(ConnectionError):
        pass

    with listening(meter.listener):
        steps = Step(raises=Lost()), OK
        tarry.call(Dependency(clock, *steps).call, on=tarry.outcome_of_exception)

    assert {("success", ""): 1, ("transient", Lost.__qualname__): 1} == (
        meter.values("tarry.attempts", "tarry.outcome", "error.type")
    )


@in_tasks_and_threads
def test_concurrent_calls(make_calls: ConcurrentCaller, meter: Meter) -> None:
    """Concurrent calls are counted separately."""
    with listening(meter.listener):
        make_calls(context_of=lambda _: nullcontext())

    assert {
        (f"op{number}", "after-retries" if number % 3 else "first-try"): 1
        for number in range(CALL_COUNT)
    } == meter.values("tarry.calls", "tarry.operation", "tarry.result")
