"""Retry at one layer: an outer loop does not retry an error that an inner loop gave up on."""

from __future__ import annotations

import pytest

import tarry
from tarry import Policy, Reason
from tarry.testing import VirtualClock
from tests.runtime.drivers import (
    DRIVERS,
    FAIL,
    OK,
    Dependency,
    Driver,
    Function,
    Step,
)

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


def function_for(driver: Driver, dependency: Dependency) -> Function:
    """Return the dependency's plain or coroutine function, depending on the driver."""
    return dependency.call if driver.is_sync else dependency.acall


@every_driver
def test_three_layers_of_four_attempts_make_four_attempts(
    driver: Driver, clock: VirtualClock
) -> None:
    """Outer loops do not retry an error with a record: the leaf runs 4 times, not 64."""
    dependency = Dependency(clock, FAIL)
    call = function_for(driver, dependency)
    for name in ("leaf", "middle", "top"):
        call = driver.wrap(call, name=name)

    with pytest.raises(ConnectionError) as caught:
        driver.run_function(clock, call)

    assert 4 == len(dependency.starts)
    assert [
        "tarry: leaf gave up after 4 attempts and 350 ms of waiting: no attempts left",
        "tarry: middle gave up after 1 attempt: a layer below has already retried this error",
        "tarry: top gave up after 1 attempt: a layer below has already retried this error",
    ] == caught.value.__notes__
    record = tarry.record_of(caught.value)
    assert record is not None
    assert ("leaf", Reason.ATTEMPTS) == (record.operation, record.reason)


@every_driver
def test_error_raised_from_a_recorded_one(driver: Driver, clock: VirtualClock) -> None:
    """An error whose cause has a record is not retried."""
    dependency = Dependency(clock, FAIL)
    inner = driver.wrap(function_for(driver, dependency), name="leaf")

    class Unavailable(Exception):
        pass

    def translate() -> None:
        try:
            inner()
        except ConnectionError as error:
            raise Unavailable from error

    async def async_translate() -> None:
        try:
            await inner()
        except ConnectionError as error:
            raise Unavailable from error

    outer = driver.wrap(translate if driver.is_sync else async_translate, on=Unavailable)

    with pytest.raises(Unavailable):
        driver.run_function(clock, outer)

    assert 4 == len(dependency.starts)


def test_three_layers_in_threads(clock: VirtualClock) -> None:
    """An outer loop recognises the record of an error that was raised in a thread."""
    dependency = Dependency(clock, FAIL)

    @tarry.retry(on=ConnectionError, timeout=30)
    def leaf() -> None:
        dependency.call()

    @tarry.retry(on=ConnectionError, timeout=30)
    def middle() -> None:
        leaf()

    @tarry.retry(on=ConnectionError, timeout=30)
    def top() -> None:
        middle()

    with pytest.raises(ConnectionError):
        top()

    assert 4 == len(dependency.starts)


@every_driver
def test_record_survives_a_layer_with_other_errors(driver: Driver, clock: VirtualClock) -> None:
    """A middle layer that retries other errors keeps the record."""
    dependency = Dependency(clock, FAIL)
    call = driver.wrap(function_for(driver, dependency), name="leaf")
    call = driver.wrap(call, name="middle", on=ValueError)
    call = driver.wrap(call, name="top")

    with pytest.raises(ConnectionError) as caught:
        driver.run_function(clock, call)

    assert 4 == len(dependency.starts)
    record = tarry.record_of(caught.value)
    assert record is not None
    assert "leaf" == record.operation


@every_driver
def test_record_survives_a_layer_without_attempts_left(driver: Driver, clock: VirtualClock) -> None:
    """A middle layer with `ignore_retried_below` keeps the record when it gives up."""
    dependency = Dependency(clock, FAIL)
    call = driver.wrap(function_for(driver, dependency), attempts=2)
    call = driver.wrap(call, policy=Policy(max_attempts=1, ignore_retried_below=True))
    call = driver.wrap(call)

    with pytest.raises(ConnectionError):
        driver.run_function(clock, call)

    assert 2 == len(dependency.starts)


@every_driver
def test_ignore_retried_below(driver: Driver, clock: VirtualClock) -> None:
    """A loop with `ignore_retried_below=True` retries errors with a record."""
    dependency = Dependency(clock, FAIL)
    inner = driver.wrap(function_for(driver, dependency), attempts=2)
    outer = driver.wrap(inner, policy=Policy(max_attempts=3, ignore_retried_below=True))

    with pytest.raises(ConnectionError):
        driver.run_function(clock, outer)

    assert 6 == len(dependency.starts)


@every_driver
def test_error_that_was_not_retried_below_is_retried_above(
    driver: Driver, clock: VirtualClock
) -> None:
    """An outer loop retries an error that the inner loop does not retry."""
    dependency = Dependency(clock, FAIL, OK)
    inner = driver.wrap(function_for(driver, dependency), on=ValueError)
    outer = driver.wrap(inner)

    assert "done" == driver.run_function(clock, outer)
    assert 2 == len(dependency.starts)


@every_driver
def test_loop_with_one_attempt_leaves_retries_to_the_outer_one(
    driver: Driver, clock: VirtualClock
) -> None:
    dependency = Dependency(clock, FAIL, OK)
    inner = driver.wrap(function_for(driver, dependency), attempts=1)
    outer = driver.wrap(inner)

    assert "done" == driver.run_function(clock, outer)


@every_driver
def test_rejection_below_is_not_retried_above(driver: Driver, clock: VirtualClock) -> None:
    """A rejection by an inner breaker also ends the outer call."""
    payments = tarry.Downstream("payments", breaker=tarry.Breaker())
    payments.force("open")
    dependency = Dependency(clock, OK)
    inner = driver.wrap(function_for(driver, dependency), downstream=payments)
    outer = driver.wrap(inner, on=Exception)

    with pytest.raises(tarry.BreakerOpen):
        driver.run_function(clock, outer)

    assert 0 == clock.elapsed


@every_driver
def test_inner_loop_stops_before_the_outer_deadline(driver: Driver, clock: VirtualClock) -> None:
    dependency = Dependency(clock, FAIL)
    inner = driver.wrap(function_for(driver, dependency), attempts=100, deadline=50)
    outer = driver.wrap(inner, deadline=1)

    with pytest.raises(ConnectionError) as caught:
        driver.run_function(clock, outer)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert Reason.DEADLINE == record.reason
    assert clock.elapsed <= 1


@every_driver
def test_same_error_object_in_the_next_call_is_retried(driver: Driver, clock: VirtualClock) -> None:
    """A record applies only to its call: a later call retries the same error object."""
    error = ConnectionError("always the same")
    dependency = Dependency(clock, Step(raises=error))

    for _ in range(3):
        with pytest.raises(ConnectionError, match="always the same"):
            driver.run(clock, dependency)

    assert 12 == len(dependency.starts)
    assert 1 == len(error.__notes__)
