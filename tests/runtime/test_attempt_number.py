"""The number of the attempt that is running."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

import tarry
from tarry.runtime import scopes
from tarry.testing import VirtualClock
from tests.runtime.drivers import ASYNC_DRIVERS, DRIVERS, SYNC_DRIVERS, Driver

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)

OPTIONS: dict[str, dict[str, Any]] = {
    "no options": {},
    "downstream": {"downstream": tarry.Downstream("d")},
    "deadline": {"deadline": 60.0},
    "stop": {"stop": lambda _: False},
}


class Numbers:
    """A function that records the attempt number, and fails until its last attempt."""

    def __init__(self, attempts: int = 3) -> None:
        self._attempts = attempts
        self.seen: list[int] = []

    def call(self) -> str:
        """Record the number."""
        self.seen.append(tarry.current_attempt())
        if len(self.seen) % self._attempts:
            raise ConnectionError
        return "done"

    async def acall(self) -> str:
        """Record the number in a coroutine function."""
        return self.call()

    def function(self, driver: Driver) -> Any:
        """Return the function for a driver."""
        return self.call if driver.is_sync else self.acall


@every_driver
@pytest.mark.parametrize("options", OPTIONS)
def test_number_inside_the_function(driver: Driver, options: str, clock: VirtualClock) -> None:
    """The number is 1 in the first attempt, 2 in the second, and again 1 after the call."""
    numbers = Numbers()
    call = driver.wrap(numbers.function(driver), **OPTIONS[options])

    for _ in range(2):
        assert "done" == driver.run_function(clock, call)

    assert [1, 2, 3, 1, 2, 3] == numbers.seen
    assert 1 == tarry.current_attempt()
    assert scopes.current_scope.get() is None


@every_driver
def test_number_after_a_call_that_fails(driver: Driver, clock: VirtualClock) -> None:
    """After a call that is given up, the number is again 1."""
    numbers = Numbers(attempts=9)

    with pytest.raises(ConnectionError):
        driver.run_function(clock, driver.wrap(numbers.function(driver), attempts=2))

    assert [1, 2] == numbers.seen
    assert 1 == tarry.current_attempt()


@pytest.mark.parametrize("driver", [d for d in DRIVERS if str(d) != "sync-block"], ids=str)
def test_number_with_a_timeout(driver: Driver, clock: VirtualClock) -> None:
    """The number is the same in the thread of a plain function with a timeout."""
    numbers = Numbers()

    driver.run_function(clock, driver.wrap(numbers.function(driver), timeout=60.0))

    assert [1, 2, 3] == numbers.seen


@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_nested_call_has_its_own_numbers(driver: Driver, clock: VirtualClock) -> None:
    """In a nested call the number is that of the inner call, and afterwards that of the outer."""
    inner_numbers = Numbers(attempts=2)
    inner = driver.wrap(inner_numbers.call)
    seen: list[int] = []

    def outer() -> str:
        inner()
        seen.append(tarry.current_attempt())
        if len(seen) < 3:
            raise ConnectionError
        return "done"

    assert "done" == driver.wrap(outer)()

    assert [1, 2, 1, 2, 1, 2] == inner_numbers.seen
    assert [1, 2, 3] == seen


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_nested_async_call_has_its_own_numbers(driver: Driver, clock: VirtualClock) -> None:
    inner_numbers = Numbers(attempts=2)
    inner = driver.wrap(inner_numbers.acall)
    seen: list[int] = []

    async def outer() -> str:
        await inner()
        seen.append(tarry.current_attempt())
        if len(seen) < 3:
            raise ConnectionError
        return "done"

    assert "done" == driver.run_function(clock, driver.wrap(outer))

    assert [1, 2, 1, 2, 1, 2] == inner_numbers.seen
    assert [1, 2, 3] == seen


def test_deadline_inside_an_attempt_keeps_the_number(clock: VirtualClock) -> None:
    """A deadline that is set in an attempt does not change the number, and the retry sets none."""
    seen: list[tuple[int, float | None]] = []

    @tarry.retry(on=ConnectionError)
    def call() -> None:
        with tarry.deadline(5.0):
            seen.append((tarry.current_attempt(), tarry.remaining()))
        seen.append((tarry.current_attempt(), tarry.remaining()))
        if len(seen) < 4:
            raise ConnectionError

    call()

    assert [(1, 5.0), (1, None), (2, 5.0), (2, None)] == seen


def test_retry_keeps_the_deadline_around_the_call(clock: VirtualClock) -> None:
    seen: list[float | None] = []

    @tarry.retry(on=ConnectionError)
    def call() -> None:
        seen.append(tarry.remaining())
        if len(seen) < 2:
            raise ConnectionError

    with tarry.deadline(5.0):
        call()

    assert [5.0, 4.95] == [None if left is None else round(left, 6) for left in seen]


def test_threads_and_tasks_of_an_attempt(clock: VirtualClock) -> None:
    """A thread with the context variables of the attempt, and a task, have its number."""
    seen: list[int] = []

    @tarry.retry(on=ConnectionError)
    async def call() -> None:
        async def in_task() -> None:
            seen.append(tarry.current_attempt())

        await asyncio.create_task(in_task())
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(lambda: seen.append(tarry.current_attempt()),))
        thread.start()
        thread.join()
        if len(seen) < 4:
            raise ConnectionError

    clock.run(call)

    assert [1, 1, 2, 2] == seen


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_copies_of_a_hedged_call(loop: str, clock: VirtualClock) -> None:
    """The copies of a hedged call have the numbers 1 and 2, also inside a retried call."""
    seen: list[int] = []

    async def fail_once() -> int:
        seen.append(tarry.current_attempt())
        if len(seen) % 2:
            raise ConnectionError
        return tarry.current_attempt()

    @tarry.retry(on=ValueError)
    async def outer() -> int:
        number = await tarry.hedge(fail_once, after=1.0, on=ConnectionError)
        if tarry.current_attempt() == 1:
            raise ValueError
        return number

    run = clock.run if loop == "asyncio" else clock.run_trio
    assert 2 == run(outer)

    assert [1, 2, 1, 2] == seen


def test_copies_of_a_hedged_plain_call() -> None:
    """The copies of `hedge_sync` have the numbers 1 and 2."""
    seen: list[int] = []

    def fail_once() -> int:
        seen.append(tarry.current_attempt())
        if len(seen) < 2:
            raise ConnectionError
        return tarry.current_attempt()

    assert 2 == tarry.hedge_sync(fail_once, after=60.0, on=ConnectionError)

    assert [1, 2] == seen


def test_number_in_a_fallback_and_a_hook(clock: VirtualClock) -> None:
    """The fallback and the hook of a call are not part of its attempts."""
    seen: list[int] = []

    def record(_: object) -> str:
        seen.append(tarry.current_attempt())
        return "cached"

    tarry.call(
        Numbers(attempts=9).call, on=ConnectionError, attempts=3, on_retry=record, fallback=record
    )

    assert [1, 1, 1] == seen


@every_driver
def test_number_in_predicates(driver: Driver, clock: VirtualClock) -> None:
    """Predicates are called between attempts: their number is that of the call around, here 1."""
    seen: list[int] = []

    def is_retryable(error: Exception) -> bool:
        seen.append(tarry.current_attempt())
        return True

    driver.run_function(clock, driver.wrap(Numbers().function(driver), on=is_retryable))

    assert [1, 1] == seen


@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_number_in_an_event_loop_of_a_plain_function(driver: Driver, clock: VirtualClock) -> None:
    """A coroutine that a plain function runs has the number of the function's attempt."""
    seen: list[int] = []

    async def main() -> None:
        seen.append(tarry.current_attempt())

    def call() -> None:
        asyncio.run(main())
        if len(seen) < 3:
            raise ConnectionError

    driver.wrap(call)()

    assert [1, 2, 3] == seen
