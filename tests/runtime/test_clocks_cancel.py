"""The cancel token: it ends the waits of plain code, and only those."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable

import pytest

import tarry
from tarry import CancelToken, Downstream
from tarry.testing import VirtualClock, no_wait
from tests.runtime.drivers import FAIL, OK, PLAIN, Dependency, Driver

plain_drivers = pytest.mark.parametrize("driver", PLAIN, ids=str)


def test_token() -> None:
    """A token is cancelled once and for all."""
    token = CancelToken()

    assert not token.cancelled
    token.cancel()
    token.cancel()
    assert token.cancelled


def test_token_can_be_waited_for() -> None:
    """A token can be waited for directly, and says whether it was cancelled."""
    token = CancelToken()
    assert not token.wait(0)

    token.cancel()

    assert token.wait(10)


@plain_drivers
def test_cancelled_before(driver: Driver, clock: VirtualClock) -> None:
    """With a cancelled token the first attempt is made and the first wait ends the call."""
    token = CancelToken()
    token.cancel()
    dependency = Dependency(clock, FAIL)

    with pytest.raises(tarry.Cancelled) as caught:
        driver.run(clock, dependency, cancel=token)

    assert "op: cancelled while waiting for the next attempt" == str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert [0] == dependency.starts
    assert 0 == clock.elapsed


@plain_drivers
def test_success_needs_no_wait(driver: Driver, clock: VirtualClock) -> None:
    """A cancelled token does not keep a call from succeeding at once."""
    token = CancelToken()
    token.cancel()

    assert "done" == driver.run(clock, Dependency(clock, OK), cancel=token)


@plain_drivers
def test_not_cancelled(driver: Driver, clock: VirtualClock) -> None:
    """A token that is not cancelled changes nothing."""
    dependency = Dependency(clock, FAIL, OK)

    assert "done" == driver.run(clock, dependency, cancel=CancelToken())
    assert [0, 0.05] == dependency.starts


@plain_drivers
def test_cancelled_without_waiting(driver: Driver, clock: VirtualClock) -> None:
    """A cancelled call ends between two attempts although tests skip the wait."""
    token = CancelToken()
    dependency = Dependency(clock, FAIL)

    def on(_: Exception) -> bool:
        if len(dependency.starts) == 2:
            token.cancel()
        return True

    with no_wait(), pytest.raises(tarry.Cancelled):
        driver.run(clock, dependency, on=on, cancel=token)

    assert 2 == len(dependency.starts)


@plain_drivers
def test_cancelled_by_another_thread(driver: Driver) -> None:
    """A real wait of half a minute ends as soon as another thread cancels the token."""
    token = CancelToken()
    payments = Downstream("payments", budget=tarry.TokenBudget(), max_in_flight=1)
    clock = VirtualClock()  # not entered: the wait is a real one
    dependency = Dependency(clock, FAIL, OK)
    policy = tarry.Policy(initial_delay=30, jitter="none")

    def shut_down(event: tarry.Event) -> None:
        if type(event) is tarry.WillWait:
            threading.Timer(0.01, token.cancel).start()

    remove = tarry.listen(shut_down)
    try:
        with pytest.raises(tarry.Cancelled):
            driver.run(clock, dependency, cancel=token, policy=policy, downstream=payments)
    finally:
        remove()

    assert 1 == len(dependency.starts)
    assert 500 == payments.balance
    assert "done" == driver.run(clock, dependency, downstream=payments)


@plain_drivers
def test_cancelled_while_a_rate_holds_the_attempt_back(driver: Driver, clock: VirtualClock) -> None:
    """A token also ends the wait for a rate limit, and the place is given back."""
    token = CancelToken()
    payments = Downstream("payments", limiter=tarry.AdaptiveRate(), max_in_flight=1)
    throttled = tarry.Outcome(tarry.Kind.THROTTLED)
    with pytest.raises(ConnectionError):  # from here on, one attempt in two seconds
        driver.run(
            clock,
            Dependency(clock, FAIL),
            on=lambda _: throttled,
            downstream=payments,
            attempts=1,
        )
    dependency = Dependency(clock, OK)
    token.cancel()

    with pytest.raises(tarry.Cancelled):
        driver.run(clock, dependency, downstream=payments, cancel=token)

    assert [] == dependency.starts
    assert "done" == driver.run(clock, dependency, downstream=payments)


@plain_drivers
def test_error_is_new_each_time(driver: Driver, clock: VirtualClock) -> None:
    """Each cancelled call has an error of its own."""
    token = CancelToken()
    token.cancel()
    errors = []

    for _ in range(2):
        with pytest.raises(tarry.Cancelled) as caught:
            driver.run(clock, Dependency(clock, FAIL), cancel=token)
        errors.append(caught.value)

    assert errors[0] is not errors[1]


async def coroutine() -> None:
    """Be decorated."""


async def generator() -> AsyncIterator[None]:
    """Be decorated."""
    yield


@pytest.mark.parametrize("fn", [coroutine, generator])
def test_coroutines_have_tasks_instead(fn: Callable[[], object]) -> None:
    """A token for a coroutine is refused at decoration, with the reason."""
    with pytest.raises(tarry.ConfigurationError, match="cancel the task"):
        tarry.retry(on=ConnectionError, cancel=CancelToken())(fn)


def test_async_blocks_have_tasks_instead() -> None:
    """A token for `async for` is refused too."""
    with pytest.raises(tarry.ConfigurationError, match="cancel the task"):
        aiter(tarry.attempts(on=ConnectionError, cancel=CancelToken()))
