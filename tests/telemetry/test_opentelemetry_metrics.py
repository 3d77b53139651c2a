"""The metrics of OpenTelemetry: what Prometheus counts, by other names."""

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
    MANY,
    Story,
    both_hedges,
    broken_breaker,
    every_driver,
    every_story,
    listening,
    side_by_side,
)


class Meter:
    """A listener whose metrics can be read."""

    def __init__(self, **options: Any) -> None:
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader])
        self.listener = OpenTelemetryListener(meter_provider=provider, **options)

    def points(self, name: str) -> list[Any]:
        """The data points of a metric."""
        data: Any = self._reader.get_metrics_data()
        if data is None:
            return []
        [scope] = data.resource_metrics[0].scope_metrics
        return [p for m in scope.metrics if m.name == name for p in m.data.data_points]

    def values(self, name: str, *attributes: str) -> dict[tuple[Any, ...], float]:
        """The values of a metric by these attributes."""
        return {
            tuple(point.attributes.get(attribute, "") for attribute in attributes): point.value
            for point in self.points(name)
        }


@pytest.fixture
def meter() -> Meter:
    """A listener of one's own."""
    return Meter()


@every_driver
@every_story
def test_story(driver: Driver, story: Story, clock: VirtualClock, meter: Meter) -> None:
    """Every kind of call is counted as Prometheus would, by every driver."""
    with listening(meter.listener):
        story.play(driver, clock)

    attempts = meter.values("tarry.attempts", "tarry.outcome")
    assert {(outcome,): number for outcome, number in story.attempts.items()} == attempts
    assert {story.call: 1} == meter.values("tarry.calls", "tarry.result", "tarry.reason")
    assert story.delays == sum(point.count for point in meter.points("tarry.retry.delay"))


def test_who_and_what(clock: VirtualClock, meter: Meter) -> None:
    """Points name the operation and the downstream; those that failed have the type of error."""
    disk = tarry.Downstream("disk")
    with listening(meter.listener):
        tarry.call(
            Dependency(clock, FAIL, OK).hit, on=ConnectionError, name="load", downstream=disk
        )

    who = {"tarry.operation": "load", "tarry.downstream": "disk"}
    assert [
        who | {"tarry.outcome": "transient", "error.type": "ConnectionError"},
        who | {"tarry.outcome": "success"},
    ] == [dict(point.attributes) for point in meter.points("tarry.attempts")]
    [delays] = meter.points("tarry.retry.delay")
    assert pytest.approx(0.05) == delays.sum
    assert 3600 == max(delays.explicit_bounds)


@both_hedges
def test_hedges(hedged: Callable[[], None], meter: Meter) -> None:
    """A copy that was sent and won is counted as both."""
    with listening(meter.listener):
        hedged()

    assert {("read", "fired"): 1, ("read", "won"): 1} == meter.values(
        "tarry.hedges", "tarry.operation", "tarry.result"
    )
    assert {("after-retries",): 1} == meter.values("tarry.calls", "tarry.result")


def test_breaker(clock: VirtualClock, meter: Meter) -> None:
    """Each move of a breaker is counted, and its state is 1 where it stands and 0 elsewhere."""
    with listening(meter.listener):
        downstream = broken_breaker(clock, "shifted")

    assert {("closed", "open"): 1, ("open", "half-open"): 1, ("half-open", "open"): 1} == (
        meter.values("tarry.breaker.transitions", "tarry.breaker.before", "tarry.breaker.after")
    )
    states = meter.values("tarry.breaker.state", "tarry.downstream", "tarry.breaker.state")
    assert {state.value: state is downstream.state for state in tarry.BreakerState} == {
        state: bool(value) for (name, state), value in states.items() if name == "shifted"
    }


def test_budget(meter: Meter) -> None:
    """The balance is read when it is exported."""
    downstream = tarry.Downstream("wealthy", budget=tarry.TokenBudget(capacity=40))
    assert downstream.budget is not None
    downstream.budget.withdraw(5, 0)

    assert 35 == meter.values("tarry.budget.balance", "tarry.downstream")["wealthy",]


def test_names_are_bounded() -> None:
    """From the name that is one too many on, all are one: operations and types of errors."""
    meter = Meter(max_names=2)
    with listening(meter.listener):
        for number in range(4):
            error = type(f"Error{number}", (Exception,), {})
            with pytest.raises(error):
                tarry.call(Step(raises=error).end, on=OSError, name=f"job {number}")

    assert {("job 0", "Error0"): 1, ("job 1", "Error1"): 1, ("other", "_OTHER"): 2} == (
        meter.values("tarry.attempts", "tarry.operation", "error.type")
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (SimpleNamespace(status_code=503), "503"),
        (SimpleNamespace(status=429), "429"),
        (SimpleNamespace(status="failed"), "ResultNotAccepted"),
        (SimpleNamespace(status=1_000_000), "ResultNotAccepted"),
        (None, "ResultNotAccepted"),
    ],
)
def test_type_of_an_answer_that_was_not_accepted(
    answer: object, expected: str, clock: VirtualClock, meter: Meter
) -> None:
    """The status is the type of error, where the answer has one."""
    with listening(meter.listener):
        dependency = Dependency(clock, Step(answer), OK)
        tarry.call(dependency.hit, on=OSError, until=lambda result: result == "done")

    assert {("success", ""): 1, ("transient", expected): 1} == (
        meter.values("tarry.attempts", "tarry.outcome", "error.type")
    )


def test_type_of_a_failure_with_a_code(clock: VirtualClock, meter: Meter) -> None:
    """The code that a classifier names is the type of error, not the class that carries it."""
    unavailable = tarry.outcome_of_code("UNAVAILABLE")
    with listening(meter.listener):
        tarry.call(Dependency(clock, FAIL, OK).hit, on=lambda _: unavailable)

    assert {("success", ""): 1, ("transient", "UNAVAILABLE"): 1} == (
        meter.values("tarry.attempts", "tarry.outcome", "error.type")
    )


def test_type_of_a_nested_class(clock: VirtualClock, meter: Meter) -> None:
    """A class is named in full, also where the classifier names it in short."""

    class Lost(ConnectionError):
        pass

    with listening(meter.listener):
        steps = Step(raises=Lost()), OK
        tarry.call(Dependency(clock, *steps).hit, on=tarry.outcome_of_exception)

    assert {("success", ""): 1, ("transient", Lost.__qualname__): 1} == (
        meter.values("tarry.attempts", "tarry.outcome", "error.type")
    )


@side_by_side
def test_calls_side_by_side(many: Callable[[Any], None], meter: Meter) -> None:
    """Calls that run at the same time are counted each for itself."""
    with listening(meter.listener):
        many(lambda _: nullcontext())

    assert {
        (f"op{number}", "after-retries" if number % 3 else "first-try"): 1 for number in range(MANY)
    } == meter.values("tarry.calls", "tarry.operation", "tarry.result")
