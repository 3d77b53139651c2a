"""Permits are released after KeyboardInterrupt and after errors in user code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

import tarry
from tarry import Downstream
from tarry.runtime import scopes
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
from tarry.testing import VirtualClock, no_wait
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver, Step


@pytest.fixture(autouse=True, scope="module")
def _exclude_existing_objects_from_garbage_collection() -> None:
    """Shorten the `gc.collect()` of each test: 0.13 s once reports of 4,000 tests are kept."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_deadline() -> Iterator[None]:
    """Remove a deadline that a failed test has left."""
    scopes.current_scope.set(None)
    yield
    scopes.current_scope.set(None)


class CustomBaseException(BaseException):
    """A BaseException that no code handles."""


@contextmanager
def interrupt_at(event: str, qualname: str, module: str = "tarry.") -> Iterator[None]:
    """Raise KeyboardInterrupt when a function of tarry is called or returns, as `event` says."""

    def profile(frame: FrameType, kind: str, arg: object) -> None:
        in_module = str(frame.f_globals.get("__name__", "")).startswith(module)
        if in_module and kind == event and frame.f_code.co_qualname == qualname:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def has_free_slot(downstream: Downstream) -> bool:
    """Return whether the only in-flight slot is free, after finalizers have run."""
    gc.collect()
    try:
        return tarry.call(lambda: True, on=OSError, downstream=downstream)
    except tarry.LimitReached:
        return False


# --- KeyboardInterrupt during a call --------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ("return", "RunningCall.begin_attempt"),
        ("call", "RunningCall.try_finish"),
        ("call", "Call.record_success"),
        ("call", "RunningCall.try_continue"),
        ("call", "Call.record_failure"),
    ],
)
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_interrupt_around_the_function(
    clock: VirtualClock, driver: Driver, event: str, where: str
) -> None:
    """An interrupt between taking a permit and recording the result releases the permit."""
    downstream = Downstream("payments", max_in_flight=1)

    with pytest.raises(KeyboardInterrupt), interrupt_at(event, where):
        driver.run(clock, Dependency(clock, FAIL, OK), downstream=downstream)

    assert has_free_slot(downstream)


BLOCKS = [driver for driver in DRIVERS if driver.form == "block"]


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ("call", "AttemptContext.__init__"),
        ("call", "AttemptContext.__enter__"),
        ("call", "AttemptContext.__exit__"),
    ],
)
@pytest.mark.parametrize("driver", BLOCKS, ids=str)
def test_interrupt_around_a_block(
    clock: VirtualClock, driver: Driver, event: str, where: str
) -> None:
    """An interrupt while a block is created, entered or left releases its permit."""
    downstream = Downstream("payments", max_in_flight=1)

    with pytest.raises(KeyboardInterrupt), interrupt_at(event, where):
        driver.run(clock, Dependency(clock, OK), downstream=downstream)

    assert has_free_slot(downstream)


def test_interrupt_while_a_block_takes_its_deadline(clock: VirtualClock) -> None:
    """An interrupt while a block sets its deadline releases the permit and the deadline."""
    downstream = Downstream("payments", max_in_flight=1)

    with pytest.raises(KeyboardInterrupt), interrupt_at("call", "enter"):
        BLOCKS[0].run(clock, Dependency(clock, OK), downstream=downstream, deadline=5)

    assert (None, True) == (tarry.remaining(), has_free_slot(downstream))


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ("call", "Hedging.delay"),
        ("return", "RunningHedgedCall.begin_first_copy"),
        ("call", "RunningHedgedCall.seconds_to_wait"),
        ("call", "RunningHedgedCall.record_final_result"),
    ],
)
@pytest.mark.parametrize("form", ["hedge", "hedge_sync"])
def test_interrupt_around_a_hedged_call(
    clock: VirtualClock, form: str, event: str, where: str
) -> None:
    """An interrupt between the permit and the success of a copy releases the permit."""
    downstream = Downstream("payments", max_in_flight=1)

    async def return_at_once() -> None:
        """Return at once."""

    async def main() -> None:
        await tarry.hedge(return_at_once, after=5, downstream=downstream)

    with pytest.raises(KeyboardInterrupt), interrupt_at(event, where):
        if form == "hedge":
            clock.run(main)
        else:
            tarry.hedge_sync(lambda: None, after=5, downstream=downstream)

    assert has_free_slot(downstream)


# --- the lock of a downstream ---------------------------------------------------------------------


def _count_successes(downstream: Downstream) -> None:
    downstream.uncounted_successes.extend([(0, 0.0, 0.0)] * MAX_UNCOUNTED_SUCCESSES)
    downstream.success_counter()(0, 0.0, 0.0)


LOCKED_METHODS: dict[str, Callable[[Downstream], object]] = {
    "admit": lambda d: d.admit(0.0),
    "record": lambda d: d.record(0, tarry.Outcome(tarry.Kind.TRANSIENT), 0.0, 0.0, 0.5),
    "release": lambda d: d.release(0, 0.0, 0.0),
    "check_retry": lambda d: d.check_retry(tarry.Outcome(tarry.Kind.TRANSIENT), 0.0),
    "withdraw": lambda d: d.withdraw(tarry.Outcome(tarry.Kind.TRANSIENT), 0.0),
    "refund": lambda d: d.refund(1.0, 0.0),
    "status": lambda d: d.status(0.0),
    "expected_duration": lambda d: d.expected_duration(),
    "hedge_delay": lambda d: d.hedge_delay(0.5, 1),
    "add_hedge_credit": lambda d: d.add_hedge_credit(0.5),
    "take_hedge_credit": lambda d: d.take_hedge_credit(),
    "return_hedge_credit": lambda d: d.return_hedge_credit(),
    "try_record_success": _count_successes,
    "force": lambda d: d.force("open"),
}


@pytest.mark.parametrize("name", LOCKED_METHODS)
def test_lock_is_free_after_an_interrupt(name: str) -> None:
    """An interrupt while the lock is held releases the lock."""
    downstream = Downstream("payments", breaker=tarry.Breaker(), max_in_flight=1)

    with (
        pytest.raises(KeyboardInterrupt),
        interrupt_at("call", f"Downstream.{name}", "tarry.core."),
    ):
        LOCKED_METHODS[name](downstream)

    assert not downstream._lock.locked()


@pytest.mark.parametrize("name", LOCKED_METHODS)
def test_lock_is_free_after_an_error_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BaseException while the lock is held releases the lock."""

    def raise_error(*args: object, **kwargs: object) -> None:
        raise CustomBaseException

    downstream = Downstream("payments", breaker=tarry.Breaker(), max_in_flight=1)
    monkeypatch.setattr(tarry.core.downstream.Downstream, name, raise_error)

    with pytest.raises(CustomBaseException):
        LOCKED_METHODS[name](downstream)

    assert not downstream._lock.locked()


# --- user code that raises ------------------------------------------------------------------------


class RaisingComponent:
    """A limiter, budget and random source; one method raises `times` times after `skip` calls."""

    def __init__(self, method: str, error: type[BaseException], times: int = 1, skip: int = 0):
        self._method = method
        self._error = error
        self._times = times
        self._skip = skip

    def _raise_if_due(self, method: str) -> None:
        if method == self._method:
            self._skip -= 1
            if self._skip < 0 and self._times:
                self._times -= 1
                raise self._error

    def acquire(self, now: float) -> float | None:
        """Admit every attempt."""
        self._raise_if_due("acquire")
        return 0.0

    def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
        """Do nothing."""
        self._raise_if_due("release")

    def on_recovery(self, now: float) -> None:
        """Do nothing."""

    def cost(self, outcome: tarry.Outcome) -> float:
        """Return the cost."""
        self._raise_if_due("cost")
        return 1.0

    def balance(self, now: float) -> float:
        """Return the balance."""
        self._raise_if_due("balance")
        return 100.0

    def withdraw(self, cost: float, now: float) -> bool:
        """Withdraw tokens."""
        self._raise_if_due("withdraw")
        return True

    def deposit(self, amount: float, now: float) -> None:
        """Deposit tokens."""
        self._raise_if_due("deposit")

    def record(self, outcome: tarry.Outcome, paid: float, now: float) -> None:
        """Do nothing."""
        self._raise_if_due("record")

    def random(self) -> float:
        """Return a random number."""
        self._raise_if_due("random")
        return 0.5


@pytest.mark.parametrize("error", [LookupError, CustomBaseException])
@pytest.mark.parametrize("steps", [(OK,), (FAIL, OK)], ids=["success", "failure"])
@pytest.mark.parametrize("method", ["acquire", "release"])
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_slot_is_released_when_a_limiter_raises(
    clock: VirtualClock,
    driver: Driver,
    method: str,
    steps: tuple[Step, ...],
    error: type[BaseException],
) -> None:
    downstream = Downstream("payments", limiter=RaisingComponent(method, error), max_in_flight=1)

    with pytest.raises(error):
        driver.run(clock, Dependency(clock, *steps), downstream=downstream)

    assert has_free_slot(downstream)


@pytest.mark.parametrize("error", [LookupError, CustomBaseException])
@pytest.mark.parametrize("method", ["cost", "balance", "withdraw", "record"])
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_slot_is_released_when_a_budget_raises(
    clock: VirtualClock, driver: Driver, method: str, error: type[BaseException]
) -> None:
    downstream = Downstream("payments", budget=RaisingComponent(method, error), max_in_flight=1)

    with pytest.raises(error):
        driver.run(clock, Dependency(clock, FAIL, OK), downstream=downstream)

    assert has_free_slot(downstream)


@pytest.mark.parametrize("error", [LookupError, CustomBaseException])
@pytest.mark.parametrize("steps", [(OK,), (FAIL, OK)], ids=["success", "failure"])
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_slot_is_released_when_a_random_source_raises(
    clock: VirtualClock, driver: Driver, steps: tuple[Step, ...], error: type[BaseException]
) -> None:
    downstream = Downstream("payments", max_in_flight=1)
    random_source = RaisingComponent("random", error)

    with pytest.raises(error):
        driver.run(clock, Dependency(clock, *steps), downstream=downstream, random=random_source)

    assert has_free_slot(downstream)


@pytest.mark.parametrize(
    "event_type",
    [tarry.AttemptStarted, tarry.AttemptFailed, tarry.WillWait, tarry.Waited, tarry.Succeeded],
)
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_slot_is_released_when_a_listener_raises(
    clock: VirtualClock, driver: Driver, event_type: type[tarry.Event]
) -> None:
    downstream = Downstream("payments", max_in_flight=1)

    def listener(event: tarry.Event) -> None:
        if isinstance(event, event_type):
            raise CustomBaseException

    remove = tarry.listen(listener)
    try:
        with pytest.raises(CustomBaseException):
            driver.run(clock, Dependency(clock, FAIL, OK), downstream=downstream)
    finally:
        remove()

    assert has_free_slot(downstream)


def half_open_downstream(clock: VirtualClock) -> Downstream:
    """Return a downstream whose half-open breaker admits one probe at a time."""
    breaker = tarry.Breaker(consecutive=1, open_for=5, spread=0, probes=1)
    downstream = Downstream("payments", breaker=breaker)
    downstream.record(breaker.generation, tarry.Outcome(tarry.Kind.TRANSIENT), 0.0, clock.now(), 0)
    clock.advance(5)
    return downstream


@pytest.mark.parametrize("error", [LookupError, CustomBaseException])
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_probe_is_released_when_the_random_source_raises(
    clock: VirtualClock, driver: Driver, error: type[BaseException]
) -> None:
    downstream = half_open_downstream(clock)

    with pytest.raises(error):
        driver.run(
            clock,
            Dependency(clock, FAIL, OK),
            downstream=downstream,
            random=RaisingComponent("random", error),
        )

    assert True is tarry.call(lambda: True, on=OSError, downstream=downstream)


@pytest.mark.parametrize("error", [LookupError, CustomBaseException])
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_probe_is_released_when_a_predicate_raises(
    clock: VirtualClock, driver: Driver, error: type[BaseException]
) -> None:
    downstream = half_open_downstream(clock)

    def on(failure: Exception) -> bool:
        raise error

    with pytest.raises(error):
        driver.run(clock, Dependency(clock, FAIL), downstream=downstream, on=on)

    assert True is tarry.call(lambda: True, on=OSError, downstream=downstream)


def free_slots(downstream: Downstream) -> int:
    """Return the number of free in-flight slots, by using them all."""
    permits: list[Any] = []
    while isinstance(permit := downstream.admit(0.0), int):
        permits.append(permit)
    for permit in permits:
        downstream.release(permit, 0.0, 0.0)
    return len(permits)


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("times", [1, 3])
def test_permits_of_a_hedged_call_are_released_when_a_limiter_raises(
    clock: VirtualClock, skip: int, times: int
) -> None:
    limiter = RaisingComponent("release", LookupError, times, skip)
    downstream = Downstream("payments", limiter=limiter, max_in_flight=3)
    sent: list[int] = []

    async def read() -> None:
        sent.append(1)
        if len(sent) < 3:
            await tarry.runtime.event_loops.async_sleep(60)

    async def main() -> None:
        await tarry.hedge(read, after=1, max_attempts=3, downstream=downstream)

    with pytest.raises(LookupError), no_wait():
        clock.run(main)
    limiter._times = 0

    assert 3 == free_slots(downstream)


# --- An interrupt at any point -------------------------------------------------------------------


@contextmanager
def interrupt_at_point(number: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a point of the code of tarry, counted from 1.

    The points are where CPython runs signal handlers: when a function starts and after a call. The
    yielded list has the number of points that were passed.
    """
    passed = [0]

    def profile(frame: FrameType, kind: str, arg: object) -> None:
        in_tarry = str(frame.f_globals.get("__name__", "")).startswith("tarry.")
        caller = frame.f_back
        names = frame.f_code.co_name, caller.f_code.co_name if caller else ""
        # Python ignores an exception that is raised in a finalizer.
        if (
            kind == "c_call"
            or not in_tarry
            or {"__del__", "release_permit_in_finalizer"} & {*names}
        ):
            return
        passed[0] += 1
        if passed[0] == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(None)


def succeed(downstream: Downstream) -> Callable[[], object]:
    """Return a call that succeeds."""
    return tarry.retry(on=ConnectionError, downstream=downstream)(lambda: None)


def fail_twice(downstream: Downstream) -> Callable[[], object]:
    """Return a call with two attempts that fail."""

    @tarry.retry(on=ConnectionError, downstream=downstream, attempts=2, fallback=None)
    def fail() -> None:
        raise ConnectionError

    return fail


def run_blocks(downstream: Downstream) -> Callable[[], object]:
    """Return a call whose attempt is a `with` block."""
    attempts = tarry.attempts(on=ConnectionError, downstream=downstream)

    def run() -> None:
        for attempt in attempts:
            with attempt:
                pass

    return run


LIMITERS: dict[str, Callable[[], dict[str, Any]]] = {
    "max_in_flight": lambda: {"max_in_flight": 2},
    "two limiters": lambda: {
        "max_in_flight": 2,
        "limiter": tarry.AIMD(initial=2, min_limit=2, max_limit=2),
    },
    "AdaptiveLimit": lambda: {"limiter": tarry.AdaptiveLimit(max_in_flight=2)},
}


@pytest.mark.parametrize("limiter", LIMITERS)
@pytest.mark.parametrize("make_call", [succeed, fail_twice, run_blocks])
def test_interrupt_at_any_point(
    make_call: Callable[[Downstream], Callable[[], object]], limiter: str
) -> None:
    """An exception of a signal handler leaves all slots free, wherever it is raised."""
    leaks: list[int] = []
    point, is_reached = 1, True
    with no_wait():
        while is_reached:
            downstream = Downstream("payments", **LIMITERS[limiter]())
            call = make_call(downstream)
            with suppress(KeyboardInterrupt), interrupt_at_point(point) as passed:
                call()
            is_reached = passed[0] >= point
            if admitted_calls(downstream) != 2:
                leaks.append(point)
            point += 1
    assert point > 20
    assert [] == leaks


def admitted_calls(downstream: Downstream) -> int:
    """Return how many calls the downstream admits at a time, after finalizers have run."""
    gc.collect()

    @tarry.retry(on=ConnectionError, downstream=downstream, attempts=1)
    def call_again(number: int) -> int:
        try:
            return call_again(number + 1)
        except tarry.LimitReached:
            return number

    return call_again(1)


def test_interrupt_at_any_point_of_a_hedged_call() -> None:
    """An exception of a signal handler leaves all slots free, also those of hedged calls."""
    leaks: list[int] = []
    point, is_reached = 1, True
    while is_reached:
        downstream = Downstream("payments", max_in_flight=2)
        with suppress(KeyboardInterrupt), interrupt_at_point(point) as passed:
            tarry.hedge_sync(bool, after=30, downstream=downstream)
        is_reached = passed[0] >= point
        if admitted_calls(downstream) != 2:
            leaks.append(point)
        point += 1
    assert [] == leaks
