"""Regression tests for bugs of other retry libraries: single calls."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import Downstream, Hint, Kind, Policy
from tarry.testing import VirtualClock, no_wait, scripted_random
from tests.runtime.drivers import (
    ASYNC_DRIVERS,
    DRIVERS,
    FAIL,
    OK,
    SYNC_DRIVERS,
    ClassifiedError,
    Dependency,
    Driver,
    Function,
    Step,
    async_sleep,
    classify,
    failing_step,
)

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


# --- deadlines ------------------------------------------------------------------------------------

delays = st.floats(0.001, 100)
policies = st.builds(
    lambda **fields: Policy(max_delay=200, **fields),
    max_attempts=st.integers(1, 20),
    initial_delay=delays,
    multiplier=st.floats(1, 5),
    backoff=st.sampled_from(["fixed", "linear", "exponential"]),
    jitter=st.sampled_from(["none", "full", "equal", "decorrelated"]),
    total_budget=st.none() | delays,
)
failures = st.builds(
    lambda kind, hint, exact, duration_s: Step(
        raises=failing_step(kind, hint=Hint(hint, exact=exact)).raises, duration_s=duration_s
    ),
    st.sampled_from([Kind.TRANSIENT, Kind.THROTTLED]),
    st.none() | delays,
    st.booleans(),
    st.just(0.0) | delays,
)
random_numbers = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20)


@given(policies, st.lists(failures, min_size=1, max_size=20), random_numbers, delays)
def test_plain_functions_do_not_wait_past_the_deadline(
    policy: Policy, steps: list[Step], numbers: list[float], deadline: float
) -> None:
    """No attempt begins at or after the deadline, and no wait ends after it."""
    for driver in SYNC_DRIVERS:
        with VirtualClock() as clock, scripted_random(numbers):
            dependency = Dependency(clock, *steps)
            with pytest.raises((ClassifiedError, tarry.Rejected)):
                driver.run(clock, dependency, on=classify, policy=policy, deadline=deadline)

        assert all(start < deadline + 1e-6 for start in dependency.starts)
        last = len(dependency.starts) - 1
        ended = dependency.starts[last] + steps[min(last, len(steps) - 1)].duration_s
        assert clock.elapsed <= max(deadline, ended) + 1e-5


@given(policies, st.lists(failures, min_size=1, max_size=20), random_numbers, delays)
def test_coroutines_do_not_wait_past_the_deadline(
    policy: Policy, steps: list[Step], numbers: list[float], deadline: float
) -> None:
    """A coroutine ends by its deadline, because a running attempt is cancelled."""
    for driver in ASYNC_DRIVERS[::4]:
        with VirtualClock() as clock, scripted_random(numbers):
            with pytest.raises((ClassifiedError, tarry.Rejected)):
                driver.run(
                    clock,
                    Dependency(clock, *steps),
                    on=classify,
                    policy=policy,
                    deadline=deadline,
                )

            assert clock.elapsed <= deadline + 1e-6


@given(delays, st.lists(st.floats(0, 0.1), max_size=5))
def test_attempt_cancelled_at_the_deadline_raises_deadline_exceeded(
    deadline: float, shares: list[float]
) -> None:
    """An attempt that reaches the deadline raises DeadlineExceeded despite float rounding."""
    steps = [Step(raises=ConnectionError, duration_s=share * deadline) for share in shares]
    policy = Policy(max_attempts=6, initial_delay=deadline / 1e3, max_delay=deadline / 100)
    for driver in ASYNC_DRIVERS[::4]:
        with VirtualClock() as clock, pytest.raises(tarry.DeadlineExceeded):
            dependency = Dependency(clock, *steps, Step(duration_s=1000))
            driver.run(clock, dependency, deadline=deadline, policy=policy)


# --- errors ---------------------------------------------------------------------------------------


@every_driver
def test_cause_of_the_user_is_kept(driver: Driver, clock: VirtualClock) -> None:
    """The cause set by `raise ... from ...` in the function is kept."""

    def fail() -> None:
        try:
            raise KeyError("deep")
        except KeyError as error:
            raise ConnectionError("shallow") from error

    async def async_fail() -> None:
        fail()

    with pytest.raises(ConnectionError, match="shallow") as caught:
        driver.run_function(clock, driver.wrap(fail if driver.is_sync else async_fail))

    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__ is caught.value.__context__


@every_driver
def test_rejections_are_new_objects(driver: Driver, clock: VirtualClock) -> None:
    """Every rejection is a new exception with a traceback of the same length."""
    payments = Downstream("payments", breaker=tarry.Breaker())
    payments.force("open")
    dependency = Dependency(clock, OK)

    errors = []
    for _ in range(5):
        with pytest.raises(tarry.BreakerOpen) as caught:
            driver.run(clock, dependency, downstream=payments)
        errors.append(caught.value)

    assert 5 == len({id(error) for error in errors})
    assert 1 == len({len(traceback.extract_tb(error.__traceback__)) for error in errors})


def test_mock_that_raises_one_object(clock: VirtualClock) -> None:
    """A mock that raises one object every time is retried, and the object keeps one note."""
    error = ConnectionError("always the same")
    mock = Mock(side_effect=error)

    for _ in range(5):
        with pytest.raises(ConnectionError, match="always the same"):
            tarry.call(lambda: mock(), on=ConnectionError, name="op")  # noqa: PLW0108

    assert 20 == mock.call_count
    assert 1 == len(error.__notes__)


class DepthLimitedMock(Mock):
    """A mock that fails if attributes of its attributes are looked up without end."""

    def _get_child_mock(self, **kwargs: Any) -> Mock:
        parents, parent = 0, self._mock_parent
        while parent is not None:
            parents, parent = parents + 1, parent._mock_parent
        assert parents < 20, "attributes of a mock are looked up without end"
        return type(self)(**kwargs)


class DepthLimitedAsyncMock(DepthLimitedMock, AsyncMock):
    """A `DepthLimitedMock` of a coroutine function."""


def test_mock_can_be_called(clock: VirtualClock) -> None:
    """A mock, which has every attribute, can be called with retries."""
    assert "done" == tarry.call(
        DepthLimitedMock(side_effect=[ConnectionError, "done"]), on=ConnectionError
    )


def test_async_mock_can_be_called(clock: VirtualClock) -> None:
    """The decorator recognises an AsyncMock as a coroutine function."""
    mock = DepthLimitedAsyncMock(side_effect=[ConnectionError, "done"])

    assert "done" == clock.run(tarry.retry(on=ConnectionError)(mock))


def test_callable_that_looks_like_a_partial(clock: VirtualClock) -> None:
    """A callable object with attributes `func` and `keywords` of its own is called itself."""

    async def other() -> None: ...

    class Job:
        def __init__(self) -> None:
            self.func = other
            self.keywords = ("urgent",)

        def __call__(self) -> str:
            return "done"

    assert "done" == tarry.call(Job(), on=ConnectionError)


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_cancel_token_ends_the_outer_loop_too(driver: Driver, clock: VirtualClock) -> None:
    """An outer loop does not retry or count a cancelled wait, whatever its `on`."""
    token = tarry.CancelToken()
    token.cancel()
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))
    dependency = Dependency(clock, FAIL)
    inner = driver.wrap(dependency.call, cancel=token)
    outer = driver.wrap(inner, on=Exception, downstream=payments)

    with pytest.raises(tarry.Cancelled):
        outer()

    assert [0] == dependency.starts
    assert tarry.BreakerState.CLOSED == payments.state


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_predicate_is_not_called_for_a_cancellation(driver: Driver, clock: VirtualClock) -> None:
    calls = []

    async def work() -> None:
        calls.append(1)
        if driver.loop == "asyncio":
            raise asyncio.CancelledError
        with trio.CancelScope() as scope:
            scope.cancel()
            await driver.wrap(partial(async_sleep, 1), on=lambda _: True)()
        raise Stopped

    class Stopped(BaseException):
        pass

    with pytest.raises((asyncio.CancelledError, Stopped)):
        driver.run_function(clock, driver.wrap(work, on=lambda _: True))

    assert [1] == calls


# --- event loops ----------------------------------------------------------------------------------


LOOPS = ["asyncio", "trio"]


def run_in_loop(clock: VirtualClock, loop: str, function: Callable[[], object]) -> object:
    """Call a plain function in a coroutine of an event loop."""

    async def main() -> object:
        return function()

    result: object = (clock.run if loop == "asyncio" else clock.run_trio)(main)
    return result


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"deadline": 5}, {"downstream": Downstream("payments", breaker=tarry.Breaker())}],
    ids=["fast path", "slow path", "downstream"],
)
def test_plain_function_runs_on_an_event_loop(
    driver: Driver, loop: str, options: dict[str, Any], clock: VirtualClock
) -> None:
    """A plain function that succeeds runs on an event loop as anywhere else."""
    call = driver.wrap(Dependency(clock, OK, OK).call, **options)
    assert ["done", "done"] == [run_in_loop(clock, loop, call) for _ in range(2)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"deadline": 50}], ids=["fast path", "slow path"])
@pytest.mark.parametrize("has_downstream", [True, False])
def test_error_is_raised_instead_of_a_wait_on_an_event_loop(
    driver: Driver, loop: str, options: dict[str, Any], has_downstream: bool, clock: VirtualClock
) -> None:
    """Where a wait would block a loop, the error of the attempt is raised, with a note."""
    payments = Downstream("payments", budget=tarry.TokenBudget(), max_in_flight=1)
    dependency = Dependency(clock, FAIL, OK)
    call = driver.wrap(
        dependency.call, **options | ({"downstream": payments} if has_downstream else {})
    )

    with pytest.raises(ConnectionError) as caught:
        run_in_loop(clock, loop, call)

    (note,) = caught.value.__notes__
    for part in (
        "was not retried, because a wait of ",
        "would block the running event loop",
        "`await`",
        'blocking="allow"',
        "tarry.configure",
    ):
        assert part in note
    assert ([0], 0) == (dependency.starts, clock.elapsed)
    assert 500 == payments.balance
    assert "done" == call()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_wait_that_may_block_an_event_loop(driver: Driver, loop: str, clock: VirtualClock) -> None:
    """With `blocking="allow"`, the waits of a call block the loop, and it is retried."""
    call = driver.wrap(Dependency(clock, FAIL, OK).call, blocking="allow")
    assert "done" == run_in_loop(clock, loop, call)


def test_waits_of_the_process_may_block_an_event_loop(clock: VirtualClock) -> None:
    """`tarry.configure` applies to the whole process; the argument of a call takes precedence."""

    def fetch(**options: Any) -> object:
        dependency = Dependency(clock, FAIL, OK)
        return tarry.call(dependency.call, on=ConnectionError, **options)

    tarry.configure(blocking="allow")
    try:
        assert "done" == run_in_loop(clock, "asyncio", fetch)
        with pytest.raises(ConnectionError):
            run_in_loop(clock, "asyncio", lambda: fetch(blocking="raise"))
    finally:
        tarry.configure(blocking="raise")
    with pytest.raises(ConnectionError):
        run_in_loop(clock, "asyncio", fetch)


def test_invalid_blocking() -> None:
    """A value other than "allow" and "raise" is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="blocking must be one of allow, raise"):
        tarry.configure(blocking="yes")  # type: ignore[arg-type] # rejected at run time
    with pytest.raises(tarry.ConfigurationError, match="blocking must be one of allow, raise"):
        tarry.retry(on=OSError, blocking="yes")  # type: ignore[arg-type] # rejected at run time


def test_rejected_result_on_an_event_loop(clock: VirtualClock) -> None:
    """Where a wait for a better result would block a loop, `ResultNotAccepted` is raised."""
    with pytest.raises(tarry.ResultNotAccepted) as caught:
        run_in_loop(clock, "asyncio", lambda: tarry.call(lambda: 1, until=lambda n: n > 1))
    assert "would block the running event loop" in caught.value.__notes__[-1]


# --- clocks and random numbers --------------------------------------------------------------------


@every_driver
def test_system_time_that_jumps(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the system time has no effect: elapsed time is monotonic."""
    jumps = count(-1e9, 1e6)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=4))
    clock = VirtualClock()  # not entered: the real clock is used
    dependency = Dependency(clock, FAIL, FAIL, FAIL, OK)

    with no_wait():
        result = driver.run(
            _RealLoops(),  # type: ignore[arg-type]
            dependency,
            deadline=1000,
            policy=Policy(total_budget=1000),
            downstream=payments,
        )

    assert "done" == result


class _RealLoops:
    """Runs real event loops instead of virtual ones."""

    def run(self, main: Function) -> Any:
        return asyncio.run(main())

    def run_trio(self, main: Function) -> Any:
        return trio.run(main)


FORK_PROGRAM = """
import os, random, sys, tarry
from tarry.testing import captured_events, no_wait

def fail():
    raise ConnectionError

def delays():
    if "seed" in sys.argv:
        random.seed(42)
    with captured_events() as events, no_wait():
        try:
            tarry.call(fail, on=ConnectionError, attempts=6)
        except ConnectionError:
            pass
    return [event.delay for event in events if type(event) is tarry.WillWait]

delays()  # draw before the fork, like a server that forks its workers
print(*delays(), flush=True)
if "multiprocessing" in sys.argv:
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(3) as pool:
        for result in [pool.apply_async(delays) for _ in range(3)]:
            print(*result.get(), flush=True)
else:
    for _ in range(3):
        child = os.fork()
        if not child:
            print(*delays(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("method", ["fork", "multiprocessing"])
@pytest.mark.parametrize("seed", ["seed", "no seed"])
def test_forked_workers_have_different_delays(method: str, seed: str) -> None:
    """Forked workers have different delays, even if each calls random.seed(42)."""
    done = subprocess.run(
        [sys.executable, "-c", FORK_PROGRAM, method, seed],
        check=True,
        capture_output=True,
        text=True,
    )

    delays = done.stdout.split()
    assert 20 == len(delays)
    assert 20 == len(set(delays))


def test_global_random_generator_is_not_used(clock: VirtualClock) -> None:
    """Retries draw no numbers from the global random generator."""
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)

    actual = []
    for _ in range(3):
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)
        actual.append(random.random())

    assert expected == actual


# --- missing arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: tarry.retry(lambda: None),  # type: ignore[arg-type]
        lambda: tarry.retry()(lambda: None),
        lambda: tarry.call(lambda: None),
    ],
    ids=["bare decorator", "empty decorator", "call"],
)
def test_missing_on_is_rejected(mistake: Callable[[], object]) -> None:
    """The error for a missing `on` says what to write and why."""
    with pytest.raises(tarry.ConfigurationTypeError, match="which errors are worth") as caught:
        mistake()

    assert "on=ConnectionError" in str(caught.value)
    assert "bugs" in str(caught.value)


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counts free memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class LargeObject:
    """A large object that a frame refers to."""


@every_driver
@pytest.mark.parametrize("has_downstream", [False, True], ids=["no downstream", "downstream"])
def test_no_cycle_after_success(
    driver: Driver, has_downstream: bool, no_gc: None, clock: VirtualClock
) -> None:
    """After a success nothing keeps the frames of failed attempts alive."""
    references: list[weakref.ref[LargeObject]] = []

    def work() -> str:
        large_object = LargeObject()
        references.append(weakref.ref(large_object))
        if len(references) < 3:
            raise ConnectionError
        return "done"

    async def async_work() -> str:
        large_object = LargeObject()
        references.append(weakref.ref(large_object))
        if len(references) < 3:
            raise ConnectionError
        return "done"

    downstream = Downstream("payments", max_in_flight=1) if has_downstream else None
    call = driver.wrap(work if driver.is_sync else async_work, downstream=downstream)

    async def main() -> list[LargeObject | None]:
        await call()
        return [reference() for reference in references]

    if driver.is_sync:
        call()
        alive = [reference() for reference in references]
    else:
        alive = driver.run_function(clock, main)

    assert [None] * 3 == alive


def test_no_cycle_after_success_in_a_thread(no_gc: None) -> None:
    """After a success in a thread nothing keeps the frames of failed attempts alive."""
    references: list[weakref.ref[LargeObject]] = []

    def work() -> str:
        large_object = LargeObject()
        references.append(weakref.ref(large_object))
        if len(references) < 3:
            raise ConnectionError
        return "done"

    with no_wait():
        tarry.call(work, on=ConnectionError, timeout=10)

    assert [None] * 3 == [reference() for reference in references]
