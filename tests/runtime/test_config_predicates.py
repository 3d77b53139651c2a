"""The values that the predicates `on` and `until` may return."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import tarry
from tarry import Kind, Outcome
from tarry.testing import VirtualClock
from tests.runtime.drivers import (
    DRIVERS,
    FAIL,
    OK,
    RESULT_DRIVERS,
    Dependency,
    Driver,
    Step,
)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
@pytest.mark.parametrize("delay", [0, 3, 2.5])
def test_number_from_on_is_the_delay(driver: Driver, delay: float, clock: VirtualClock) -> None:
    """If `on` returns a number, the next attempt starts after exactly that many seconds."""
    dependency = Dependency(clock, FAIL, FAIL, OK)

    assert "done" == driver.run(clock, dependency, on=lambda _: delay)

    assert [0, delay, 2 * delay] == dependency.starts


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_timedelta_from_on_is_the_delay(driver: Driver, clock: VirtualClock) -> None:
    """If `on` returns a `timedelta`, the next attempt starts after exactly that time."""
    dependency = Dependency(clock, FAIL, OK)

    assert "done" == driver.run(clock, dependency, on=lambda _: timedelta(minutes=1))

    assert [0, 60] == dependency.starts


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
@pytest.mark.parametrize(
    "answer", [Kind.THROTTLED, Outcome(Kind.THROTTLED)], ids=["kind", "outcome"]
)
def test_failure_from_until_is_retried(driver: Driver, answer: Any, clock: VirtualClock) -> None:
    """A result for which `until` returns a retryable outcome is retried after its delay."""
    dependency = Dependency(clock, Step(503), Step(200))

    assert 200 == driver.run(
        clock,
        dependency,
        until=lambda status: status == 200 or answer,
    )

    assert [0, 0.5] == dependency.starts  # the delay of throttled attempts


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_hint_from_until_is_obeyed(driver: Driver, clock: VirtualClock) -> None:
    """The server's hint in an outcome that `until` returns is a floor for the delay."""
    dependency = Dependency(clock, Step(503), Step(200))

    def classify_status(status: int) -> Outcome:
        return tarry.outcome_of_status(status, {"Retry-After": "7"}, now=0.0)

    assert 200 == driver.run(clock, dependency, until=classify_status)

    assert 7 <= dependency.starts[1] <= 7.7


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_failure_from_until_is_not_a_success(driver: Driver, clock: VirtualClock) -> None:
    """A result for which `until` never returns a success raises `ResultNotAccepted`."""
    dependency = Dependency(clock, Step(503))

    with pytest.raises(tarry.ResultNotAccepted) as caught:
        driver.run(clock, dependency, until=lambda _: Outcome(Kind.TRANSIENT), attempts=2)

    assert (503, 2) == (caught.value.result, len(dependency.starts))


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_permanent_failure_from_until_ends_the_call(driver: Driver, clock: VirtualClock) -> None:
    """A result for which `until` returns a permanent outcome is returned without a retry."""
    dependency = Dependency(clock, Step(404), Step(200))

    assert 404 == driver.run(clock, dependency, until=lambda _: Outcome(Kind.PERMANENT))

    assert [0] == dependency.starts
