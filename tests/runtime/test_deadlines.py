"""Deadlines: nested blocks, remaining time, threads, tasks, and calls under a deadline."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

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
    async_sleep,
    elapsed_s,
)

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)
with_and_without_listener = pytest.mark.parametrize(
    "has_listener", [False, True], ids=["no listener", "listener"]
)


def approximately(number: float) -> object:
    """Return an object that equals numbers close to this one."""
    return pytest.approx(number, abs=1e-6)


# --- remaining time -------------------------------------------------------------------------------


def test_remaining_time_without_a_deadline() -> None:
    """Without a deadline, `remaining` returns None."""
    assert None is tarry.remaining()


def test_remaining_time_decreases(clock: VirtualClock) -> None:
    with tarry.deadline(2):
        assert approximately(2) == tarry.remaining()
        clock.advance(1.5)
        assert approximately(0.5) == tarry.remaining()
        clock.advance(1.5)
        assert 0 == tarry.remaining()
    assert None is tarry.remaining()


def test_longer_inner_deadline_does_not_extend_the_outer_one(clock: VirtualClock) -> None:
    with tarry.deadline(1), tarry.deadline(10):
        assert approximately(1) == tarry.remaining()


def test_shorter_inner_deadline_applies_to_its_block(clock: VirtualClock) -> None:
    """A shorter inner deadline applies to its block; after it the outer one applies again."""
    with tarry.deadline(10):
        with tarry.deadline(1):
            assert approximately(1) == tarry.remaining()
        assert approximately(10) == tarry.remaining()


def test_error_removes_the_deadline_of_its_block(clock: VirtualClock) -> None:
    with pytest.raises(ValueError, match="left"), tarry.deadline(1):
        raise ValueError("left")

    assert None is tarry.remaining()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), "1", True])
def test_invalid_deadline_is_rejected(seconds: float) -> None:
    """A deadline must be a finite number of seconds."""
    with pytest.raises(tarry.ConfigurationError, match="seconds must be"), tarry.deadline(seconds):
        pass


@pytest.mark.parametrize("seconds", [0, -1])
def test_no_call_starts_after_the_deadline(seconds: float) -> None:
    """With a deadline of 0 or less, no call in the block starts."""
    with tarry.deadline(seconds), pytest.raises(tarry.DeadlineExceeded):
        tarry.retry(on=OSError)(lambda: 1)()


# --- threads and tasks ----------------------------------------------------------------------------


def test_threads_begin_without_deadline(clock: VirtualClock) -> None:
    """A new thread has no deadline unless it runs in the caller's context.

    In free-threaded Python, it does so by default.
    """
    with tarry.deadline(5), ThreadPoolExecutor(1) as pool:
        without_context = pool.submit(tarry.remaining).result()
        with_context = pool.submit(contextvars.copy_context().run, tarry.remaining).result()

    inherits_context = getattr(sys.flags, "thread_inherit_context", 0)  # since Python 3.14
    expected = approximately(5) if inherits_context else None
    assert (expected, approximately(5)) == (without_context, with_context)


def test_attempts_in_threads_see_the_deadline(clock: VirtualClock) -> None:
    """In the thread of an attempt, `remaining` is limited by the deadline and the timeout."""
    left = tarry.call(tarry.remaining, on=ConnectionError, timeout=10, deadline=3)

    assert approximately(3) == left
    assert approximately(2) == tarry.call(
        tarry.remaining, on=ConnectionError, timeout=2, deadline=3
    )


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_tasks_have_their_own_deadlines(loop: str, clock: VirtualClock) -> None:
    """A deadline in one task does not apply to another task."""
    left: dict[int, float | None] = {}

    async def work(seconds: int) -> None:
        with tarry.deadline(seconds):
            await async_sleep(0.5)
            left[seconds] = tarry.remaining()

    async def on_asyncio() -> None:
        await asyncio.gather(work(1), work(2))

    async def on_trio() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, 1)
            nursery.start_soon(work, 2)

    (clock.run(on_asyncio) if loop == "asyncio" else clock.run_trio(on_trio))

    assert {1: approximately(0.5), 2: approximately(1.5)} == left


# --- calls under a deadline -----------------------------------------------------------------------


@every_driver
@with_and_without_listener
def test_call_does_not_wait_past_the_deadline(
    driver: Driver, has_listener: bool, clock: VirtualClock
) -> None:
    """A wait that would end after the deadline is chosen from the time that is left."""
    dependency = Dependency(clock, FAIL)

    with ExitStack() as stack:
        if has_listener:
            stack.enter_context(captured_events())
        stack.enter_context(tarry.deadline(0.3))
        with pytest.raises(ConnectionError) as caught:
            driver.run(clock, dependency)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (4, Reason.ATTEMPTS) == (record.attempts, record.reason)
    # After waits of 0.05 and 0.1 s, the next wait is from 0 to 0.15 s instead of 0 to 0.4 s.
    assert approximately(0.225) == elapsed_s(clock)


@every_driver
@with_and_without_listener
def test_call_after_the_deadline_is_rejected(
    driver: Driver, has_listener: bool, clock: VirtualClock
) -> None:
    """After the deadline a call is rejected before its first attempt."""
    dependency = Dependency(clock, OK)

    with ExitStack() as stack:
        if has_listener:
            stack.enter_context(captured_events())
        stack.enter_context(tarry.deadline(1))
        clock.advance(2)
        with pytest.raises(tarry.DeadlineExceeded) as caught:
            driver.run(clock, dependency)

    assert [] == dependency.starts
    record = tarry.record_of(caught.value)
    assert record is not None
    assert (0, Reason.DEADLINE) == (record.attempts, record.reason)


@every_driver
def test_call_rejected_for_its_deadline_is_not_counted(driver: Driver, clock: VirtualClock) -> None:
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))
    dependency = Dependency(clock, OK)

    with tarry.deadline(1):
        clock.advance(2)
        with pytest.raises(tarry.DeadlineExceeded):
            driver.run(clock, dependency, downstream=payments)

    assert [] == dependency.starts
    assert tarry.BreakerState.CLOSED == payments.state


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
@with_and_without_listener
@pytest.mark.parametrize(
    "steps",
    [(Step(duration_s=10),), (FAIL, Step(duration_s=10))],
    ids=["first attempt", "second attempt"],
)
def test_coroutine_is_cancelled_at_the_deadline(
    driver: Driver, has_listener: bool, steps: tuple[Step, ...], clock: VirtualClock
) -> None:
    """A coroutine that still runs at the deadline is cancelled, in any attempt."""
    with ExitStack() as stack:
        if has_listener:
            stack.enter_context(captured_events())
        stack.enter_context(tarry.deadline(1))
        with pytest.raises(tarry.DeadlineExceeded):
            driver.run(clock, Dependency(clock, *steps))

    assert 1 == elapsed_s(clock)


@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_plain_function_is_not_interrupted(driver: Driver, clock: VirtualClock) -> None:
    """The deadline does not interrupt a plain function, whose late result is returned."""
    dependency = Dependency(clock, Step("late", duration_s=10))

    assert "late" == driver.run(clock, dependency, deadline=1)


@every_driver
def test_attempt_sees_the_deadline_of_its_call(driver: Driver, clock: VirtualClock) -> None:
    """Inside an attempt, `remaining` returns the time to the deadline; None afterwards."""
    left: list[float | None] = []

    def record_remaining() -> None:
        left.append(tarry.remaining())
        if len(left) == 1:
            raise ConnectionError

    async def async_record_remaining() -> None:
        record_remaining()

    driver.run_function(
        clock,
        driver.wrap(record_remaining if driver.is_sync else async_record_remaining, deadline=2),
    )

    assert [approximately(2), approximately(1.95)] == left
    assert None is tarry.remaining()


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_attempt_sees_its_own_timeout(driver: Driver, clock: VirtualClock) -> None:
    """`remaining` returns the timeout of the attempt if it is shorter than the deadline."""
    left: list[float | None] = []

    async def record_remaining() -> None:
        left.append(tarry.remaining())

    driver.run_function(clock, driver.wrap(record_remaining, timeout=1, deadline=5))

    assert [approximately(1)] == left


@every_driver
def test_retry_must_fit_before_the_deadline(driver: Driver, clock: VirtualClock) -> None:
    """A retry starts early enough for its expected duration to fit before the deadline."""
    payments = Downstream("payments")
    for _ in range(3):
        driver.run(clock, Dependency(clock, Step(duration_s=1)), downstream=payments)
    before = clock.elapsed
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, downstream=payments, deadline=1.1)

    assert 4 == len(dependency.starts)
    assert all(start + 1 < before + 1.1 for start in dependency.starts)


def test_threads_have_their_own_deadlines() -> None:
    """A deadline in one thread does not apply to another thread."""
    seen: dict[float, float | None] = {}
    barrier = threading.Barrier(2, timeout=10)

    def work(seconds: float) -> None:
        with tarry.deadline(seconds):
            barrier.wait()
            seen[seconds] = tarry.remaining()
            barrier.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [100.0, 200.0]))

    assert 100 >= (seen[100.0] or 0) > 50
    assert 200 >= (seen[200.0] or 0) > 150


def test_times_may_be_timedeltas(clock: VirtualClock) -> None:
    """`deadline`, `timeout` and `tarry.deadline` accept a `timedelta`."""
    with tarry.deadline(timedelta(minutes=1)):
        assert 60 == tarry.remaining()

    @tarry.retry(on=ConnectionError, deadline=timedelta(seconds=5))
    def load() -> float | None:
        return tarry.remaining()

    @tarry.retry(on=ConnectionError, timeout=timedelta(seconds=2), deadline=5)
    def load_with_timeout() -> float | None:
        return tarry.remaining()

    assert (5, 2) == (load(), load_with_timeout())
