"""`CancelToken`, which ends the waits of plain functions."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable

import pytest

import tarry
from tarry import CancelToken, Downstream
from tarry.testing import VirtualClock, no_wait
from tests.runtime.drivers import FAIL, OK, SYNC_DRIVERS, Dependency, Driver

sync_drivers = pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)


def test_token_stays_cancelled() -> None:
    token = CancelToken()

    assert not token.cancelled
    token.cancel()
    token.cancel()
    assert token.cancelled


def test_token_can_be_waited_for() -> None:
    """`wait` returns whether the token was cancelled."""
    token = CancelToken()
    assert not token.wait(0)

    token.cancel()

    assert token.wait(10)


@sync_drivers
def test_call_with_a_cancelled_token(driver: Driver, clock: VirtualClock) -> None:
    """With a cancelled token the first attempt runs, and the first wait ends the call."""
    token = CancelToken()
    token.cancel()
    dependency = Dependency(clock, FAIL)

    with pytest.raises(tarry.Cancelled) as caught:
        driver.run(clock, dependency, cancel=token)

    assert "op: cancelled while waiting for the next attempt" == str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert [0] == dependency.starts
    assert 0 == clock.elapsed


@sync_drivers
def test_first_attempt_succeeds_with_a_cancelled_token(driver: Driver, clock: VirtualClock) -> None:
    """With a cancelled token a call can still succeed at its first attempt."""
    token = CancelToken()
    token.cancel()

    assert "done" == driver.run(clock, Dependency(clock, OK), cancel=token)


@sync_drivers
def test_token_that_is_not_cancelled(driver: Driver, clock: VirtualClock) -> None:
    """A token that is not cancelled has no effect."""
    dependency = Dependency(clock, FAIL, OK)

    assert "done" == driver.run(clock, dependency, cancel=CancelToken())
    assert [0, 0.05] == dependency.starts


@sync_drivers
def test_cancelled_call_with_no_wait(driver: Driver, clock: VirtualClock) -> None:
    """A cancelled call ends between two attempts even if `no_wait` skips the wait."""
    token = CancelToken()
    dependency = Dependency(clock, FAIL)

    def on(_: Exception) -> bool:
        if len(dependency.starts) == 2:
            token.cancel()
        return True

    with no_wait(), pytest.raises(tarry.Cancelled):
        driver.run(clock, dependency, on=on, cancel=token)

    assert 2 == len(dependency.starts)


@sync_drivers
def test_cancelled_by_another_thread(driver: Driver) -> None:
    """A real wait of half a minute ends as soon as another thread cancels the token."""
    token = CancelToken()
    payments = Downstream("payments", budget=tarry.TokenBudget(), max_in_flight=1)
    clock = VirtualClock()  # not entered: the wait is a real one
    dependency = Dependency(clock, FAIL, OK)
    policy = tarry.Policy(initial_delay=30, jitter="none")

    def cancel_during_the_wait(event: tarry.Event) -> None:
        if type(event) is tarry.WillWait:
            threading.Timer(0.01, token.cancel).start()

    remove = tarry.listen(cancel_during_the_wait)
    try:
        with pytest.raises(tarry.Cancelled):
            driver.run(clock, dependency, cancel=token, policy=policy, downstream=payments)
    finally:
        remove()

    assert 1 == len(dependency.starts)
    assert 500 == payments.balance
    assert "done" == driver.run(clock, dependency, downstream=payments)


@sync_drivers
def test_cancelled_during_a_rate_limit_delay(driver: Driver, clock: VirtualClock) -> None:
    """A token ends a rate limit delay, and the permit is released."""
    token = CancelToken()
    payments = Downstream("payments", limiter=tarry.AdaptiveRate(), max_in_flight=1)
    throttled = tarry.Outcome(tarry.Kind.THROTTLED)
    with pytest.raises(ConnectionError):  # lowers the rate to one attempt in two seconds
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


@sync_drivers
def test_each_cancelled_call_raises_a_new_error(driver: Driver, clock: VirtualClock) -> None:
    token = CancelToken()
    token.cancel()
    errors = []

    for _ in range(2):
        with pytest.raises(tarry.Cancelled) as caught:
            driver.run(clock, Dependency(clock, FAIL), cancel=token)
        errors.append(caught.value)

    assert errors[0] is not errors[1]


async def coroutine() -> None:
    """Do nothing."""


async def generator() -> AsyncIterator[None]:
    """Yield once."""
    yield


@pytest.mark.parametrize("fn", [coroutine, generator])
def test_token_for_a_coroutine_is_rejected(fn: Callable[[], object]) -> None:
    """A token for a coroutine function is rejected at decoration, with the reason."""
    with pytest.raises(tarry.ConfigurationError, match="cancel the task"):
        tarry.retry(on=ConnectionError, cancel=CancelToken())(fn)


def test_token_for_an_async_block_is_rejected() -> None:
    """A token for `async for` over attempts is rejected, with the reason."""
    with pytest.raises(tarry.ConfigurationError, match="cancel the task"):
        aiter(tarry.attempts(on=ConnectionError, cancel=CancelToken()))
