"""`fallback=`: what a call returns instead of the error when it is given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tarry
from tarry.testing import VirtualClock
from tests.runtime.drivers import (
    ASYNC_DRIVERS,
    FAIL,
    FUNCTION_DRIVERS,
    OK,
    Dependency,
    Driver,
    Step,
)

ASYNC_FUNCTION_DRIVERS = [driver for driver in ASYNC_DRIVERS if driver in FUNCTION_DRIVERS]


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
@pytest.mark.parametrize("value", ["cached", None, []], ids=repr)
def test_value_is_returned_after_the_last_attempt(
    driver: Driver, value: object, clock: VirtualClock
) -> None:
    """When no attempts are left, the call returns the value of `fallback`, also None."""
    dependency = Dependency(clock, FAIL)

    assert value is driver.run(clock, dependency, attempts=3, fallback=value)

    assert 3 == len(dependency.starts)


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_function_gets_the_error(driver: Driver, clock: VirtualClock) -> None:
    """A function is called with the error of the last attempt, which has its record."""
    errors: list[Exception] = []
    last = ConnectionError("last")
    dependency = Dependency(clock, FAIL, Step(raises=last))

    def recover(error: Exception) -> str:
        errors.append(error)
        return "cached"

    assert "cached" == driver.run(clock, dependency, attempts=2, fallback=recover)

    assert [last] == errors
    record = tarry.record_of(last)
    assert record is not None
    assert (2, tarry.Reason.ATTEMPTS) == (record.attempts, record.reason)


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
def test_coroutine_function_is_awaited(driver: Driver, clock: VirtualClock) -> None:
    """The fallback of an async call may be a coroutine function."""

    async def recover(error: Exception) -> str:
        return f"cached instead of {type(error).__name__}"

    result = driver.run(clock, Dependency(clock, FAIL), fallback=recover)

    assert "cached instead of ConnectionError" == result


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_success_does_not_use_the_fallback(driver: Driver, clock: VirtualClock) -> None:
    """A call that succeeds after a retry returns its own result."""
    assert "done" == driver.run(clock, Dependency(clock, FAIL, OK), fallback="cached")


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_permanent_error_is_raised(driver: Driver, clock: VirtualClock) -> None:
    """An error that `on` does not match, such as a bug, is raised in spite of the fallback."""
    dependency = Dependency(clock, FAIL, Step(raises=ValueError("a bug")))

    with pytest.raises(ValueError, match="a bug"):
        driver.run(clock, dependency, fallback="cached")

    assert 2 == len(dependency.starts)


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_result_that_is_not_accepted(driver: Driver, clock: VirtualClock) -> None:
    """If `until` accepts no result, a fallback can return the last one."""

    def last_result(error: Exception) -> object:
        assert isinstance(error, tarry.ResultNotAccepted)
        return error.result

    dependency = Dependency(clock, Step("queued"), Step("running"))

    result = driver.run(clock, dependency, until=lambda _: False, attempts=2, fallback=last_result)

    assert "running" == result


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_rejected_call(driver: Driver, clock: VirtualClock) -> None:
    """A call that an open breaker rejects returns the fallback; no attempt is made."""
    downstream = tarry.Downstream("d", breaker=tarry.Breaker())
    downstream.force("open")
    dependency = Dependency(clock, OK)

    result = driver.run(clock, dependency, downstream=downstream, fallback=lambda error: error)

    assert isinstance(result, tarry.BreakerOpen)
    assert [] == dependency.starts


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_deadline_and_budget(driver: Driver, clock: VirtualClock) -> None:
    """A call that a deadline or an empty retry budget ends returns the fallback."""
    slow = Dependency(clock, Step(raises=ConnectionError, duration_s=2.0))
    downstream = tarry.Downstream("d", budget=tarry.TokenBudget(capacity=1))

    assert "late" == driver.run(clock, slow, deadline=1.0, fallback="late")
    assert "empty" == driver.run(
        clock, Dependency(clock, FAIL), downstream=downstream, fallback="empty"
    )


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_error_of_the_fallback_is_raised(driver: Driver, clock: VirtualClock) -> None:
    """An error that the fallback raises replaces the error of the call, which is its context."""

    def fail(error: Exception) -> None:
        raise LookupError("no cached value")

    with pytest.raises(LookupError, match="no cached value") as caught:
        driver.run(clock, Dependency(clock, FAIL), fallback=fail)

    assert isinstance(caught.value.__context__, ConnectionError)


def test_cancelled_call_raises(clock: VirtualClock) -> None:
    """A call that is cancelled while it waits raises `Cancelled` in spite of the fallback."""
    token = tarry.CancelToken()
    token.cancel()

    with pytest.raises(tarry.Cancelled):
        tarry.call(Dependency(clock, FAIL).call, on=OSError, cancel=token, fallback=None)


def test_events_show_that_the_call_was_given_up(clock: VirtualClock) -> None:
    """A call that returns its fallback is still reported as given up."""
    events: list[tarry.Event] = []
    remove = tarry.listen(events.append)
    tarry.call(Dependency(clock, FAIL).call, on=OSError, attempts=1, fallback=None)
    remove()

    assert isinstance(events[-1], tarry.GaveUp)


def test_coroutine_function_for_a_plain_call() -> None:
    """A coroutine function is rejected as the fallback of a plain function."""

    async def recover_async(error: Exception) -> None: ...

    recover: Any = recover_async
    rule = "fallback is the coroutine function .*recover_async, which only an async call can await"
    with pytest.raises(tarry.ConfigurationTypeError, match=rule):
        tarry.call(lambda: None, on=OSError, fallback=recover)
    with pytest.raises(tarry.ConfigurationTypeError, match=rule):
        tarry.retry(on=OSError, fallback=recover)(lambda: None)
    with pytest.raises(tarry.ConfigurationTypeError, match="fallback must be a plain function"):
        tarry.hedge_sync(lambda: None, after=1.0, fallback=recover)


def test_fallback_of_a_generator_is_rejected() -> None:
    """Generators have no result that a fallback could replace."""

    def generate() -> Any:
        yield 1

    with pytest.raises(tarry.ConfigurationError, match=r"fallback replaces a result"):
        tarry.retry(on=OSError, fallback=())(generate)


def test_hedged_call_returns_its_fallback(clock: VirtualClock) -> None:
    """A hedged call whose copies all fail returns its fallback; other errors are raised."""

    async def fail(error: type[Exception]) -> str:
        raise error

    async def recover(error: Exception) -> str:
        return type(error).__name__

    def hedge(error: type[Exception]) -> Any:
        return clock.run(
            lambda: tarry.hedge(fail, error, after=1.0, on=ConnectionError, fallback=recover)
        )

    assert "ConnectionError" == hedge(ConnectionError)
    with pytest.raises(LookupError):
        hedge(LookupError)


def test_hedged_plain_call_returns_its_fallback() -> None:
    def fail(error: type[Exception]) -> str:
        raise error

    assert "cached" == tarry.hedge_sync(
        fail, ConnectionError, after=60.0, on=ConnectionError, fallback="cached"
    )
    with pytest.raises(LookupError):
        tarry.hedge_sync(fail, LookupError, after=60.0, on=ConnectionError, fallback="cached")


async def test_awaitable_value_is_not_awaited() -> None:
    """Only the result of a function is awaited: a value is returned as it is."""

    async def fail() -> object:
        raise ConnectionError

    value: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert value is await tarry.acall(fail, on=OSError, attempts=1, fallback=value)


@pytest.mark.parametrize("is_decorated", [False, True])
async def test_a_fallback_replaces_the_error_where_a_wait_would_block_an_event_loop(
    *, is_decorated: bool
) -> None:
    """The call is given up after the first attempt. A permanent error is still raised."""

    def fail(error: Exception) -> str:
        raise error

    def call(error: Exception) -> str:
        if is_decorated:
            return tarry.retry(on=OSError, fallback="cached")(fail)(error)
        return tarry.call(fail, error, on=OSError, fallback="cached")

    assert "cached" == call(OSError("no route"))
    with pytest.raises(ValueError, match="a bug"):
        call(ValueError("a bug"))
