"""Calls that are cancelled or time out, through every driver.

A cancellation is neither retried nor counted nor swallowed, and the call releases its permit.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import trio

import tarry
from tarry import Downstream, Reason
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import (
    ASYNC_DRIVERS,
    DRIVERS,
    FAIL,
    OK,
    SYNC_DRIVERS,
    Dependency,
    Driver,
    Step,
    elapsed_s,
)

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)
async_drivers = pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
sync_drivers = pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)


class FrameworkExit(BaseException):
    """A BaseException that a framework might raise."""


def downstream_with_breaker() -> Downstream:
    """Return a downstream with one in-flight slot, whose breaker opens at the first failure."""
    return Downstream(
        "payments",
        breaker=tarry.Breaker(consecutive=1),
        budget=tarry.TokenBudget(),
        max_in_flight=1,
    )


def downstream_without_breaker() -> Downstream:
    """Return a downstream with one in-flight slot and a retry budget."""
    return Downstream("payments", budget=tarry.TokenBudget(), max_in_flight=1)


async def cancel_after(delay_s: float, main: Callable[[], Awaitable[Any]]) -> str:
    """Cancel a coroutine after a delay; return "cancelled", or "swallowed" if it returns."""
    if trio.lowlevel.in_trio_task():
        with trio.CancelScope(deadline=trio.current_time() + delay_s) as scope:
            await main()
        return "cancelled" if scope.cancelled_caught else "swallowed"
    task = asyncio.ensure_future(main())
    asyncio.get_running_loop().call_later(delay_s, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    return "swallowed"


# --- cancellation during an attempt ---------------------------------------------------------------


@every_driver
@pytest.mark.parametrize("has_listener", [False, True], ids=["no listener", "listener"])
@pytest.mark.parametrize("error_type", [FrameworkExit, KeyboardInterrupt, SystemExit])
def test_base_exception_during_an_attempt(
    driver: Driver, error_type: type[BaseException], has_listener: bool, clock: VirtualClock
) -> None:
    """A BaseException is raised without being classified or counted; the permit is released."""
    payments = downstream_with_breaker()
    dependency = Dependency(clock, Step(raises=error_type), OK)
    classified: list[BaseException] = []

    with captured_events() if has_listener else nullcontext(), pytest.raises(error_type) as caught:
        driver.run(clock, dependency, on=classified.append, downstream=payments)

    assert [] == classified
    assert [0] == dependency.starts
    assert not hasattr(caught.value, "__notes__")
    assert (tarry.BreakerState.CLOSED, 500) == (payments.state, payments.balance)
    assert "done" == driver.run(clock, dependency, downstream=payments)


@every_driver
def test_base_exception_of_a_probe(driver: Driver, clock: VirtualClock) -> None:
    """A cancelled probe of a half-open breaker releases its permit for the next one."""
    payments = Downstream(
        "payments", breaker=tarry.Breaker(consecutive=1, spread=0, probes=1, open_for=30)
    )
    dependency = Dependency(clock, FAIL, Step(raises=FrameworkExit), OK)
    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, downstream=payments)
    clock.advance(30)

    with pytest.raises(FrameworkExit):
        driver.run(clock, dependency, downstream=payments)

    assert tarry.BreakerState.HALF_OPEN == payments.state
    assert "done" == driver.run(clock, dependency, downstream=payments)


@async_drivers
def test_cancellation_during_an_attempt(driver: Driver, clock: VirtualClock) -> None:
    """A task that is cancelled during an attempt ends at once, and nothing is counted."""
    payments = downstream_with_breaker()
    dependency = Dependency(clock, Step(duration_s=10), OK)
    call = driver.wrap(dependency.acall, on=Exception, downstream=payments)

    assert "cancelled" == driver.run_function(clock, lambda: cancel_after(0.5, call))

    assert [0] == dependency.starts
    assert 0.5 == elapsed_s(clock)
    assert (tarry.BreakerState.CLOSED, 500) == (payments.state, payments.balance)
    assert "done" == driver.run(clock, dependency, downstream=payments)


@async_drivers
def test_cancellation_wins_over_a_timeout(driver: Driver, clock: VirtualClock) -> None:
    """A cancellation inside an attempt that has a timeout is still a cancellation."""
    dependency = Dependency(clock, Step(duration_s=10))
    call = driver.wrap(dependency.acall, on=Exception, timeout=1, deadline=5)

    assert "cancelled" == driver.run_function(clock, lambda: cancel_after(0.5, call))
    assert [0] == dependency.starts


# --- cancellation during a wait -------------------------------------------------------------------


@async_drivers
@pytest.mark.parametrize("has_listener", [False, True], ids=["no listener", "listener"])
def test_cancellation_during_a_wait(
    driver: Driver, has_listener: bool, clock: VirtualClock
) -> None:
    """A task that is cancelled during a wait ends at once, and its retry is refunded."""
    payments = downstream_without_breaker()
    dependency = Dependency(clock, FAIL, OK)
    call = driver.wrap(
        dependency.acall, downstream=payments, policy=tarry.Policy(initial_delay=2.0)
    )

    with captured_events() if has_listener else nullcontext():
        assert "cancelled" == driver.run_function(clock, lambda: cancel_after(0.5, call))

    assert [0] == dependency.starts
    assert 0.5 == elapsed_s(clock)
    assert 500 == payments.balance
    assert "done" == driver.run(clock, dependency, downstream=payments)


@async_drivers
def test_cancellation_during_a_rate_limit_delay(driver: Driver, clock: VirtualClock) -> None:
    """A task that is cancelled during a rate limit delay releases its permit."""
    payments = Downstream("payments", limiter=tarry.AdaptiveRate(), max_in_flight=1)
    throttled = tarry.Outcome(tarry.Kind.THROTTLED)
    dependency = Dependency(clock, FAIL, OK)
    call = driver.wrap(dependency.acall, on=lambda _: throttled, downstream=payments)

    # The wait ends after 0.5 s; the rate limit delays the attempt until 2 s.
    assert "cancelled" == driver.run_function(clock, lambda: cancel_after(1, call))

    assert [0] == dependency.starts
    assert "done" == driver.run(clock, dependency, downstream=payments)


@sync_drivers
def test_keyboard_interrupt_during_a_wait(driver: Driver) -> None:
    """KeyboardInterrupt ends the wait of a plain function and refunds its retry and permit."""
    payments = downstream_without_breaker()
    clock = VirtualClock()  # not entered: the wait is a real one
    dependency = Dependency(clock, FAIL, OK)
    policy = tarry.Policy(initial_delay=30, jitter="none")

    with interrupt_wait(), pytest.raises(KeyboardInterrupt):
        driver.run(clock, dependency, downstream=payments, policy=policy)

    assert 1 == len(dependency.starts)
    assert 500 == payments.balance
    assert "done" == driver.run(clock, dependency, downstream=payments)


@contextmanager
def interrupt_wait() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread 30 ms after a wait has begun."""

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def schedule_interrupt(event: tarry.Event) -> None:
        if type(event) is tarry.WillWait:
            threading.Timer(0.03, interrupt).start()

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    remove = tarry.listen(schedule_interrupt)
    try:
        yield
    finally:
        remove()
        signal.signal(signal.SIGUSR1, before)


# --- timeouts -------------------------------------------------------------------------------------


@async_drivers
def test_attempt_that_times_out_is_retried(driver: Driver, clock: VirtualClock) -> None:
    """An attempt that times out is retried even if `on` does not name TimeoutError."""
    dependency = Dependency(clock, Step(duration_s=10), OK)

    assert "done" == driver.run(clock, dependency, timeout=1)
    assert [0, 1.05] == dependency.starts


@async_drivers
def test_every_attempt_times_out(driver: Driver, clock: VirtualClock) -> None:
    """When every attempt times out, the call raises AttemptTimeout with a record."""
    dependency = Dependency(clock, Step(duration_s=10))

    with pytest.raises(tarry.AttemptTimeout) as caught:
        driver.run(clock, dependency, timeout=1, attempts=2)

    assert "op: attempt 2 took longer than 1 s" == str(caught.value)
    assert [0, 1.05] == dependency.starts
    assert 2.05 == elapsed_s(clock)
    record = tarry.record_of(caught.value)
    assert record is not None
    assert (2, Reason.ATTEMPTS) == (record.attempts, record.reason)
    assert isinstance(caught.value, TimeoutError)


@async_drivers
def test_budget_charges_a_retry_after_a_timeout(driver: Driver, clock: VirtualClock) -> None:
    payments = Downstream("payments", budget=tarry.TokenBudget("aws-2020"))

    with pytest.raises(tarry.AttemptTimeout):
        driver.run(
            clock,
            Dependency(clock, Step(duration_s=10)),
            timeout=1,
            attempts=3,
            downstream=payments,
        )

    assert 480 == payments.balance


@async_drivers
def test_timeout_that_the_attempt_raises_itself(driver: Driver, clock: VirtualClock) -> None:
    """A TimeoutError that the function raises is classified by `on`."""
    dependency = Dependency(clock, Step(raises=TimeoutError("from the function"), duration_s=0.5))

    with pytest.raises(TimeoutError, match="from the function"):
        driver.run(clock, dependency, on=ValueError, timeout=1)

    assert [0] == dependency.starts


@async_drivers
def test_attempt_is_cancelled_at_the_deadline(driver: Driver, clock: VirtualClock) -> None:
    """A coroutine that still runs at the deadline of its call is cancelled."""
    dependency = Dependency(clock, FAIL, Step(duration_s=10))

    with pytest.raises(tarry.DeadlineExceeded) as caught:
        driver.run(clock, dependency, deadline=1)

    assert "op: the deadline passed during attempt 2" == str(caught.value)
    assert [0, 0.05] == dependency.starts
    assert 1 == elapsed_s(clock)


@pytest.mark.parametrize("driver", [d for d in SYNC_DRIVERS if d.form != "block"], ids=str)
def test_timeout_of_a_plain_attempt(driver: Driver, clock: VirtualClock) -> None:
    """A plain function that times out is retried; its thread continues to run."""
    release = threading.Event()
    starts = []

    def block_at_first_attempt() -> str:
        starts.append(threading.current_thread())
        if len(starts) == 1:
            release.wait(10)
        return "done"

    try:
        assert "done" == driver.run_function(
            clock, driver.wrap(block_at_first_attempt, timeout=0.3)
        )
    finally:
        release.set()
        starts[0].join(10)

    assert 2 == len(set(starts))
    assert threading.current_thread() not in starts


def test_timeout_of_a_plain_block_is_rejected() -> None:
    with pytest.raises(tarry.ConfigurationError, match="timeout cannot interrupt the body of"):
        iter(tarry.attempts(on=ConnectionError, timeout=1))
