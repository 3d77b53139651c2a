"""`stop=`: a function of the user that ends a call before a retry."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

import tarry
from tarry import CallState
from tarry.testing import VirtualClock
from tests.runtime.drivers import (
    DRIVERS,
    FAIL,
    FUNCTION_DRIVERS,
    OK,
    Dependency,
    Driver,
    Step,
)

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


@every_driver
def test_stop_function_ends_the_call(driver: Driver, clock: VirtualClock) -> None:
    """If the function returns True, the call ends with the last error and the reason STOPPED."""
    states: list[CallState] = []
    first, second = ConnectionError("first"), ConnectionError("second")
    dependency = Dependency(clock, Step(raises=first, duration_s=2.0), Step(raises=second))

    def stop(state: CallState) -> bool:
        states.append(state)
        return state.attempts == 2

    with pytest.raises(ConnectionError, match="second") as caught:
        driver.run(clock, dependency, stop=stop)

    assert [("op", 1, 0.05, first), ("op", 2, 0.1, second)] == [
        (state.operation, state.attempts, state.delay, state.error) for state in states
    ]
    assert [2.0, 2.05] == [round(state.elapsed, 6) for state in states]
    record = tarry.record_of(caught.value)
    assert record is not None
    assert (2, tarry.Reason.STOPPED, 0.05) == (record.attempts, record.reason, record.waited)
    [note] = caught.value.__notes__
    assert note.endswith("after 2 attempts and 50 ms of waiting: the stop function ended the call")


@every_driver
def test_call_continues_while_the_function_returns_false(
    driver: Driver, clock: VirtualClock
) -> None:
    dependency = Dependency(clock, FAIL, FAIL, OK)

    assert "done" == driver.run(clock, dependency, stop=lambda _: False)

    assert [0, 0.05, 0.15] == dependency.starts


@every_driver
@pytest.mark.parametrize("step", [OK, Step(raises=ValueError)], ids=["success", "permanent"])
def test_function_is_called_only_before_a_retry(
    driver: Driver, step: Step, clock: VirtualClock
) -> None:
    """The function is not called after a success, a permanent error or the last attempt."""
    states: list[CallState] = []

    def stop(state: CallState) -> bool:
        states.append(state)
        return False

    for first_step, attempts in ((step, 4), (FAIL, 1)):
        with suppress(ValueError, ConnectionError):
            driver.run(clock, Dependency(clock, first_step), attempts=attempts, stop=stop)

    assert [] == states


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_rejected_result(driver: Driver, clock: VirtualClock) -> None:
    """For a result that `until` rejects, the state has a `ResultNotAccepted` with the result."""
    results: list[object] = []

    def stop(state: CallState) -> bool:
        assert isinstance(state.error, tarry.ResultNotAccepted)
        results.append(state.error.result)
        return True

    with pytest.raises(tarry.ResultNotAccepted):
        driver.run(clock, Dependency(clock, Step(503)), until=lambda _: False, stop=stop)

    assert [503] == results


@every_driver
@pytest.mark.parametrize("raises", [False, True])
def test_retry_budget_is_not_charged(driver: Driver, raises: bool, clock: VirtualClock) -> None:
    """A retry that the function prevents is not charged, also if the function raises."""
    downstream = tarry.Downstream("d", budget=tarry.TokenBudget())

    def stop(state: CallState) -> bool:
        if raises:
            raise LookupError("a bug in the stop function")
        return True

    expected = LookupError if raises else ConnectionError
    with pytest.raises(expected):
        driver.run(clock, Dependency(clock, FAIL), downstream=downstream, stop=stop)

    assert downstream.budget is not None
    assert 500 == downstream.budget.balance(0.0)


async def async_stop(state: CallState) -> bool:
    """Return True."""
    return True


class TenacityStop:
    """Stands for `tenacity.stop_after_attempt(3)`."""

    __module__ = "tenacity.stop"

    def __call__(self, retry_state: object) -> bool:
        """Return False."""
        return False


def awaitable_stop(state: CallState) -> Any:
    """Return a coroutine object."""
    return async_stop(state)


class Marker:
    """A class, whose objects are always true."""


@every_driver
def test_stop_function_that_returns_an_awaitable(driver: Driver, clock: VirtualClock) -> None:
    """A result that is an awaitable, which would always be true, is rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^stop returned an awaitable"):
        driver.run(clock, Dependency(clock, FAIL), stop=awaitable_stop)


@pytest.mark.parametrize("invalid", [3, TenacityStop(), Marker, async_stop], ids=repr)
def test_invalid_stop_function(invalid: Any) -> None:
    """A limit, a class, a stop object of tenacity and a coroutine function are rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^stop must be a"):
        tarry.retry(on=OSError, stop=invalid)
