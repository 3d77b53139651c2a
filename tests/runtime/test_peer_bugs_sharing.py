"""Regression tests for bugs of other retry libraries: concurrent calls."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import trio

import tarry
from tarry import Breaker, BreakerState, Downstream, Policy
from tarry.testing import VirtualClock, captured_events, no_wait
from tests.runtime.drivers import FAIL, Dependency, async_sleep

TIMEOUT_S = 10.0
"""The time after which a hanging test fails; a passing test does not wait for it."""


class OwnedError(Exception):
    """An error with the number of the call that raised it."""

    def __init__(self, owner: int) -> None:
        super().__init__(owner)
        self.owner = owner


def run_in_threads(workers: int, work: Callable[[int], Any]) -> list[Any]:
    """Run the work in threads that start at the same time; return their results or errors."""
    barrier = threading.Barrier(workers, timeout=TIMEOUT_S)

    def begin(number: int) -> Any:
        barrier.wait()
        try:
            return work(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(begin, range(workers)))


def run_in_tasks(
    clock: VirtualClock, loop: str, workers: int, work: Callable[[int], Awaitable[Any]]
) -> list[Any]:
    """Run the work in tasks; return their results or errors."""
    results: list[Any] = [None] * workers

    async def begin(number: int) -> None:
        try:
            results[number] = await work(number)
        except Exception as error:
            results[number] = error

    async def on_asyncio() -> None:
        await asyncio.gather(*(begin(number) for number in range(workers)))

    async def on_trio() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(workers):
                nursery.start_soon(begin, number)

    if loop == "asyncio":
        clock.run(on_asyncio)
    else:
        clock.run_trio(on_trio)
    return results


def expected_result(number: int) -> tuple[object, int]:
    """Return the expected result and number of attempts; four failures end a call."""
    return (number, number % 5 + 1) if number % 5 < 4 else ("gave up", 4)


def summarize(result: object, attempts: int) -> tuple[object, int]:
    """Return a result in the format of `expected_result`; check the record of an error."""
    if isinstance(result, OwnedError):
        record = tarry.record_of(result)
        assert record is not None
        assert attempts == record.attempts
        assert 1 == len(result.__notes__)
        return "gave up", attempts
    return result, attempts


# --- separate state of calls ----------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("has_downstream", [False, True], ids=["no downstream", "downstream"])
def test_decorator_shared_by_fifty_tasks(
    loop: str, has_downstream: bool, clock: VirtualClock
) -> None:
    """Fifty tasks through one decorator each have their own attempts, result and error."""
    calls = [0] * 50
    downstream = (
        Downstream("shared", budget=tarry.TokenBudget(capacity=10_000)) if has_downstream else None
    )

    @tarry.retry(on=OwnedError, policy=Policy(), downstream=downstream)
    async def work(number: int) -> int:
        calls[number] += 1
        await async_sleep(0.01 * (number % 7))
        if calls[number] <= number % 5:
            raise OwnedError(number)
        return number

    results = run_in_tasks(clock, loop, 50, work)

    actual = [summarize(result, count) for result, count in zip(results, calls, strict=True)]
    assert [expected_result(number) for number in range(50)] == actual
    owners = [error.owner for error in results if isinstance(error, OwnedError)]
    assert [number for number in range(50) if number % 5 == 4] == owners


@pytest.mark.parametrize("has_downstream", [False, True], ids=["no downstream", "downstream"])
@pytest.mark.parametrize("timeout", [None, TIMEOUT_S], ids=["no timeout", "timeout"])
def test_decorator_shared_by_eight_threads(has_downstream: bool, timeout: float | None) -> None:
    """Eight threads through one decorator each have their own attempts, result and error."""
    calls = [0] * 400
    downstream = (
        Downstream("shared", budget=tarry.TokenBudget(capacity=10_000)) if has_downstream else None
    )

    @tarry.retry(on=OwnedError, policy=Policy(), downstream=downstream, timeout=timeout)
    def work(number: int) -> int:
        calls[number] += 1
        if calls[number] <= number % 5:
            raise OwnedError(number)
        return number

    def call_fifty_times(worker: int) -> list[tuple[object, int]]:
        found: list[tuple[object, int]] = []
        for number in range(worker * 50, worker * 50 + 50):
            result: object
            try:
                result = work(number)
            except OwnedError as error:
                result = error if number == error.owner else "error of another call"
            found.append(summarize(result, calls[number]))
        return found

    with no_wait():
        results = run_in_threads(8, call_fifty_times)

    assert [expected_result(number) for number in range(400)] == [
        result for worker_results in results for result in worker_results
    ]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_error_object_shared_by_two_tasks(loop: str, clock: VirtualClock) -> None:
    """Calls that fail with one shared error object, as after a lost connection, all retry."""
    lost = ConnectionError("connection lost")
    calls = [0, 0]

    @tarry.retry(on=ConnectionError, attempts=2)
    async def work(number: int) -> str:
        calls[number] += 1
        if number == 1:
            await async_sleep(60)  # meanwhile the other call gives up on the same object
        if number == 0 or calls[1] == 1:
            raise lost
        return "done"

    first, second = run_in_tasks(clock, loop, 2, work)

    assert lost is first
    assert "done" == second
    assert [2, 2] == calls


def test_error_object_shared_by_two_threads() -> None:
    """A call ignores a record that another thread attached to the same error object."""
    lost = ConnectionError("connection lost")
    given_up = threading.Event()
    calls = [0, 0]

    @tarry.retry(on=ConnectionError, attempts=2)
    def work(number: int) -> str:
        calls[number] += 1
        if number == 1 and calls[1] == 1:
            given_up.wait(TIMEOUT_S)
        if number == 0 or calls[1] == 1:
            raise lost
        return "done"

    def begin(number: int) -> str:
        try:
            return work(number)
        finally:
            given_up.set()

    with no_wait():
        first, second = run_in_threads(2, begin)

    assert lost is first
    assert "done" == second


def test_attempts_object_can_be_iterated_many_times(clock: VirtualClock) -> None:
    attempts = tarry.attempts(on=ConnectionError)
    dependency = Dependency(clock, FAIL)

    for _ in range(3):
        with pytest.raises(ConnectionError):
            for attempt in attempts:
                with attempt:
                    dependency.call()

    assert 12 == len(dependency.starts)


# --- locks ----------------------------------------------------------------------------------------


def test_no_lock_while_the_function_runs() -> None:
    """Eight threads run the function at the same time, with a closed breaker."""
    inside = threading.Barrier(8, timeout=TIMEOUT_S)
    payments = Downstream("payments", breaker=Breaker(), budget=tarry.TokenBudget())

    @tarry.retry(on=ConnectionError, downstream=payments)
    def work(number: int) -> int:
        inside.wait()
        return number

    assert list(range(8)) == run_in_threads(8, work)


def test_no_lock_while_probes_run(clock: VirtualClock) -> None:
    """Eight probes of a half-open breaker run the function at the same time."""
    inside = threading.Barrier(8, timeout=TIMEOUT_S)
    payments = half_open_downstream(clock, probes=8)

    @tarry.retry(on=ConnectionError, downstream=payments)
    def work(number: int) -> int:
        inside.wait()
        return number

    assert list(range(8)) == run_in_threads(8, work)
    assert BreakerState.CLOSED == payments.state


@pytest.mark.parametrize("where", ["on", "until", "listener", "jitter", "backoff"])
def test_no_lock_while_user_code_runs(where: str) -> None:
    """No lock is held while a predicate, a listener, or a custom jitter or backoff runs."""
    inside = threading.Barrier(2, timeout=1)
    calls = [0, 0]

    def wait_for_other_thread(value: Any) -> Any:
        inside.wait()
        return value

    options: dict[str, Any] = {
        "on": ConnectionError,
        "downstream": Downstream("d", breaker=Breaker()),
    }
    listener: Callable[[tarry.Event], None] | None = None
    match where:
        case "on":
            options["on"] = lambda _: wait_for_other_thread(value=True)
        case "until":
            options["until"] = lambda _: wait_for_other_thread(value=True)
        case "jitter":
            options["policy"] = Policy(
                jitter=lambda _ceiling, _previous, _u: wait_for_other_thread(0.0)
            )
        case "backoff":
            options["policy"] = Policy(backoff=lambda _k: wait_for_other_thread(0.0))
        case _:

            def listener(event: tarry.Event) -> None:
                if isinstance(event, tarry.AttemptFailed):
                    inside.wait()

    @tarry.retry(**options)
    def work(number: int) -> int:
        calls[number] += 1
        if calls[number] == 1:
            raise ConnectionError
        return number

    with no_wait(), listening(listener):
        assert [0, 1] == run_in_threads(2, work)
    assert not inside.broken


@contextmanager
def listening(listener: Callable[[tarry.Event], None] | None) -> Iterator[None]:
    """Add a listener during the block; do nothing if it is None."""
    remove = tarry.listen(listener) if listener else None
    try:
        yield
    finally:
        if remove:
            remove()


# --- thundering herds -----------------------------------------------------------------------------


def half_open_downstream(clock: VirtualClock, probes: int) -> Downstream:
    """Return a downstream whose breaker is half-open."""
    breaker = Breaker(consecutive=1, spread=0, probes=probes)
    payments = Downstream("payments", breaker=breaker)
    with pytest.raises(ConnectionError):
        tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, downstream=payments)
    clock.advance(30)
    return payments


def test_half_open_and_thirty_threads(clock: VirtualClock) -> None:
    """Of thirty threads at a half-open breaker, three are admitted and 27 rejected."""
    payments = half_open_downstream(clock, probes=3)
    rejected: SimpleQueue[int] = SimpleQueue()
    release = threading.Event()
    entered = []

    @tarry.retry(on=ConnectionError, downstream=payments)
    def work(number: int) -> str:
        entered.append(number)
        release.wait(TIMEOUT_S)
        return "done"

    def begin(number: int) -> str:
        try:
            return work(number)
        except tarry.BreakerOpen:
            rejected.put(number)
            if rejected.qsize() == 27:
                release.set()
            return "rejected"

    results = run_in_threads(30, begin)

    assert (3, 27) == (results.count("done"), results.count("rejected"))
    assert 3 == len(entered)
    assert BreakerState.CLOSED == payments.state


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_half_open_and_thirty_tasks(loop: str, clock: VirtualClock) -> None:
    """Of thirty tasks at a half-open breaker, three are admitted and 27 rejected."""
    payments = half_open_downstream(clock, probes=3)
    entered = []

    @tarry.retry(on=ConnectionError, downstream=payments)
    async def work(number: int) -> str:
        entered.append(number)
        await async_sleep(1)
        return "done"

    results = run_in_tasks(clock, loop, 30, work)

    rejected = [result for result in results if isinstance(result, tarry.BreakerOpen)]
    assert (3, 27) == (results.count("done"), len(rejected))
    assert 3 == len(entered)
    assert BreakerState.CLOSED == payments.state


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_half_open_and_thirty_calls_that_waited(loop: str, clock: VirtualClock) -> None:
    """Calls that waited send no more retries to a half-open breaker than it has probes."""
    breaker = Breaker(min_calls=30, min_span=0, failure_rate=1.0, open_for=1, spread=0, probes=3)
    payments = Downstream("payments", breaker=breaker)
    policy = Policy(initial_delay=2, backoff="fixed", jitter="none")
    calls = [0] * 30

    @tarry.retry(on=ConnectionError, downstream=payments, policy=policy)
    async def work(number: int) -> str:
        calls[number] += 1
        if calls[number] == 1:
            raise ConnectionError  # the thirtieth opens the breaker while the others wait
        await async_sleep(1)
        return "done"

    results = run_in_tasks(clock, loop, 30, work)

    assert 3 == results.count("done")
    assert 33 == sum(calls)
    records = [tarry.record_of(result) for result in results if isinstance(result, ConnectionError)]
    assert [tarry.Reason.BREAKER_OPEN] * 27 == [record.reason for record in records if record]


def test_random_numbers_of_threads_differ() -> None:
    """Eight threads that each call random.seed(42) still draw different delays."""

    def work(number: int) -> list[float]:
        random.seed(42)
        with pytest.raises(ConnectionError):
            tarry.call(fail, on=ConnectionError, attempts=6, name=str(number))
        return [wait.delay for wait in waits if wait.operation == str(number)]

    def fail() -> None:
        raise ConnectionError

    waits: list[tarry.WillWait] = []

    def add_wait(event: tarry.Event) -> None:
        if type(event) is tarry.WillWait:
            waits.append(event)

    with no_wait(), listening(add_wait):
        drawn = run_in_threads(8, work)

    first_delays = {delays[0] for delays in drawn}
    assert 8 == len(first_delays)
    assert 40 == len({delay for delays in drawn for delay in delays})


def test_captured_events_of_threads_are_complete() -> None:
    """Events of eight threads are all captured, none twice."""
    with captured_events() as events, no_wait():
        run_in_threads(
            8, lambda number: tarry.call(lambda: number, on=ConnectionError, name=str(number))
        )

    succeeded = [event.operation for event in events if isinstance(event, tarry.Succeeded)]
    assert [str(number) for number in range(8)] == sorted(succeeded)
