"""Ends of calls: rejections, reference cycles, invalid hints, long calls."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tarry
from tarry import Downstream, Hint, Kind, Outcome, Policy, Reason
from tarry.testing import VirtualClock, captured_events, no_wait
from tests.runtime.drivers import (
    DRIVERS,
    OK,
    ClassifiedError,
    Dependency,
    Driver,
    classify,
    failing_step,
)

# --- rejections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "async"])
def test_total_budget_that_ends_before_the_first_attempt(clock: VirtualClock, form: str) -> None:
    """A call whose total budget ends before its first attempt is rejected with DeadlineExceeded."""
    attempts = tarry.attempts(on=OSError, policy=Policy(total_budget=1), name="op")

    async def main() -> None:
        iterator = aiter(attempts)
        clock.advance(1)
        await anext(iterator)

    with pytest.raises(tarry.DeadlineExceeded, match=r"^op: ") as caught:
        if form == "plain":
            iterator = iter(attempts)
            clock.advance(1)
            next(iterator)
        else:
            clock.run(main)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.TOTAL_BUDGET, 0) == (record.reason, record.attempts)


class Slow:
    """A limiter that delays attempts by a minute."""

    def acquire(self, now: float) -> float | None:
        """Delay the attempt."""
        return 60.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Ignore the attempt."""

    def on_recovery(self, now: float) -> None:
        """Ignore the attempt."""


def opened() -> Downstream:
    """Return a downstream whose breaker is open."""
    downstream = Downstream("payments", breaker=tarry.Breaker())
    downstream.force("open")
    return downstream


def full() -> Downstream:
    """Return a downstream whose only in-flight slot is used."""
    downstream = Downstream("payments", max_in_flight=1)
    downstream.admit(0.0)
    return downstream


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"downstream": opened}, tarry.BreakerOpen, Reason.BREAKER_OPEN),
        ({"downstream": full}, tarry.LimitReached, Reason.LIMIT),
        ({"downstream": Slow, "deadline": 5}, tarry.LimitReached, Reason.LIMIT),
        (
            {"downstream": Slow, "policy": Policy(total_budget=5)},
            tarry.LimitReached,
            Reason.LIMIT,
        ),
        ({"late": True}, tarry.DeadlineExceeded, Reason.DEADLINE),
    ],
    ids=["breaker", "limit", "line and deadline", "line and budget", "deadline"],
)
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_every_rejection_has_its_class(
    clock: VirtualClock,
    driver: Driver,
    options: dict[str, Any],
    kind: type[tarry.Rejected],
    reason: Reason,
) -> None:
    """A call that is rejected before its first attempt raises the error class of its reason."""
    options = dict(options)
    make = options.pop("downstream", None)
    if make is not None:
        options["downstream"] = Downstream("slow", limiter=Slow()) if make is Slow else make()
    seconds = -1.0 if options.pop("late", False) else 1_000.0
    dependency = Dependency(clock, OK)

    with pytest.raises(tarry.Rejected) as caught, tarry.deadline(seconds):
        driver.run(clock, dependency, **options)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (kind, reason, []) == (type(caught.value), record.reason, dependency.starts)


# --- references -----------------------------------------------------------------------------------


@pytest.fixture
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plainly(**options: Any) -> None:
    """A decorated function."""
    tarry.retry(**options)(lambda: None)()


def by_call(**options: Any) -> None:
    """`tarry.call`."""
    tarry.call(lambda: None, **options)


def by_coroutine(**options: Any) -> None:
    """A coroutine without an event loop, so that nothing else refers to its error."""

    async def nothing() -> None:
        """Do nothing."""

    coroutine = tarry.acall(nothing, **options)
    coroutine.send(None)


def by_block(**options: Any) -> None:
    """Blocks."""
    for attempt in tarry.attempts(**options):
        with attempt:
            pass


def by_hedge(**options: Any) -> None:
    """A hedged call."""
    tarry.hedge_sync(lambda: None, after=1, **options)


def is_error_alive(run: Callable[..., None], **options: Any) -> bool:
    """Return whether the error of a call is still alive after it was handled."""
    error: weakref.ref[Exception] | None = None
    try:
        run(on=OSError, **options)
    except tarry.TarryError as raised:
        error = weakref.ref(raised)
    assert error is not None
    return error() is not None


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("run", [plainly, by_call, by_coroutine, by_block, by_hedge])
def test_open_breaker_leaves_no_cycle(run: Callable[..., None]) -> None:
    """A rejection is freed after it was handled, without the garbage collector."""
    assert not is_error_alive(run, downstream=opened())


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("run", [plainly, by_call, by_coroutine])
def test_result_not_accepted_leaves_no_cycle(run: Callable[..., None], attempts: int) -> None:
    """The error for a result that was not accepted is freed after it was handled."""
    with no_wait():
        assert not is_error_alive(run, until=lambda result: result is not None, attempts=attempts)


# --- hints that are none --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.TRANSIENT, Kind.THROTTLED])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("said", [float("nan"), "5", -1, float("inf"), b"", object()])
def test_invalid_hint_is_ignored(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, said: Any, exact: bool, kind: Kind
) -> None:
    """A hint of the user's classifier that is not a duration is ignored, also in the log."""
    delays = []
    for hint in (None, Hint(said, exact=exact)):
        dependency = Dependency(clock, failing_step(kind, hint=hint), OK)
        with captured_events() as events, caplog.at_level(logging.DEBUG, "tarry"):
            assert "done" == tarry.call(dependency.call, on=classify)
        delays += [event.delay for event in events if isinstance(event, tarry.WillWait)]

    assert delays[0] == delays[1] > 0
    assert [] == [line for line in caplog.messages if "raised" in line]


@pytest.mark.parametrize("said", [float("nan"), "5", -1])
def test_overload_with_an_invalid_hint(clock: VirtualClock, said: Any) -> None:
    """`retry_after` is None if a server forbids a retry and its hint is not a duration."""
    dependency = Dependency(clock, failing_step(Kind.OVERLOADED, hint=Hint(said)))

    with pytest.raises(ClassifiedError) as caught:
        tarry.call(dependency.call, on=classify)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.OVERLOADED, None) == (record.reason, record.retry_after)


# --- long calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [255, 256, 257, 512, 2_000])
def test_long_call_keeps_few_steps(clock: VirtualClock, attempts: int) -> None:
    """A call of many attempts keeps at most 256 steps and the sum of all waits."""
    waits: list[float] = []

    def fail() -> None:
        raise OSError

    remove = tarry.listen(
        lambda event: waits.append(event.delay) if isinstance(event, tarry.WillWait) else None
    )
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - it has no message
            tarry.call(fail, on=OSError, attempts=attempts)
    finally:
        remove()

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (attempts, attempts - 1) == (record.attempts, len(waits))
    assert pytest.approx(sum(waits)) == record.waited
    assert 1 <= len(record.steps) <= 256
    numbers = [step.attempt for step in record.steps]
    assert list(range(attempts - len(numbers) + 1, attempts + 1)) == numbers
