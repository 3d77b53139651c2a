"""Rejected calls, reference cycles, invalid hints and calls with many attempts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tarry
from tarry import Downstream, Outcome, Policy, Reason
from tarry.testing import VirtualClock, no_wait
from tests.runtime.drivers import (
    DRIVERS,
    OK,
    Dependency,
    Driver,
)

# --- rejections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sync", "async"])
def test_call_is_rejected_after_its_total_budget(clock: VirtualClock, form: str) -> None:
    """A call whose total budget ends before its first attempt is rejected with DeadlineExceeded."""
    attempts = tarry.attempts(on=OSError, policy=Policy(total_budget=1), name="op")

    async def main() -> None:
        iterator = aiter(attempts)
        clock.advance(1)
        await anext(iterator)

    with pytest.raises(tarry.DeadlineExceeded, match=r"^op: ") as caught:
        if form == "sync":
            iterator = iter(attempts)
            clock.advance(1)
            next(iterator)
        else:
            clock.run(main)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.TOTAL_BUDGET, 0) == (record.reason, record.attempts)


class SlowLimiter:
    """A limiter that delays attempts by a minute."""

    def acquire(self, now: float) -> float | None:
        """Delay the attempt."""
        return 60.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Do nothing."""

    def on_recovery(self, now: float) -> None:
        """Do nothing."""


def open_downstream() -> Downstream:
    """Return a downstream whose breaker is open."""
    downstream = Downstream("payments", breaker=tarry.Breaker())
    downstream.force("open")
    return downstream


def full_downstream() -> Downstream:
    """Return a downstream whose only in-flight slot is used."""
    downstream = Downstream("payments", max_in_flight=1)
    downstream.admit(0.0)
    return downstream


@pytest.mark.parametrize(
    ("options", "error_type", "reason"),
    [
        ({"downstream": open_downstream}, tarry.BreakerOpen, Reason.BREAKER_OPEN),
        ({"downstream": full_downstream}, tarry.LimitReached, Reason.LIMIT),
        ({"downstream": SlowLimiter, "deadline": 5}, tarry.LimitReached, Reason.LIMIT),
        (
            {"downstream": SlowLimiter, "policy": Policy(total_budget=5)},
            tarry.LimitReached,
            Reason.LIMIT,
        ),
        ({"expired": True}, tarry.DeadlineExceeded, Reason.DEADLINE),
    ],
    ids=["breaker", "limit", "rate limit and deadline", "rate limit and budget", "deadline"],
)
@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_rejection_has_the_error_class_of_its_reason(
    clock: VirtualClock,
    driver: Driver,
    options: dict[str, Any],
    error_type: type[tarry.Rejected],
    reason: Reason,
) -> None:
    """A call that is rejected before its first attempt raises the error class of its reason."""
    options = dict(options)
    make_downstream = options.pop("downstream", None)
    if make_downstream is not None:
        options["downstream"] = (
            Downstream("slow", limiter=SlowLimiter())
            if make_downstream is SlowLimiter
            else make_downstream()
        )
    seconds = -1.0 if options.pop("expired", False) else 1_000.0
    dependency = Dependency(clock, OK)

    with pytest.raises(tarry.Rejected) as caught, tarry.deadline(seconds):
        driver.run(clock, dependency, **options)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (error_type, reason, []) == (type(caught.value), record.reason, dependency.starts)


# --- reference cycles -----------------------------------------------------------------------------


@pytest.fixture
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def call_decorated(**options: Any) -> None:
    """Call a decorated function."""
    tarry.retry(**options)(lambda: None)()


def use_call(**options: Any) -> None:
    """Use `tarry.call`."""
    tarry.call(lambda: None, **options)


def await_acall(**options: Any) -> None:
    """Run `tarry.acall` without an event loop, which could keep a reference to the error."""

    async def do_nothing() -> None:
        """Do nothing."""

    coroutine = tarry.acall(do_nothing, **options)
    coroutine.send(None)


def run_block(**options: Any) -> None:
    """Run an attempt block."""
    for attempt in tarry.attempts(**options):
        with attempt:
            pass


def call_hedged(**options: Any) -> None:
    """Make a hedged call."""
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
@pytest.mark.parametrize("run", [call_decorated, use_call, await_acall, run_block, call_hedged])
def test_open_breaker_leaves_no_cycle(run: Callable[..., None]) -> None:
    """A rejection is freed after it was handled, without the garbage collector."""
    assert not is_error_alive(run, downstream=open_downstream())


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("run", [call_decorated, use_call, await_acall])
def test_result_not_accepted_leaves_no_cycle(run: Callable[..., None], attempts: int) -> None:
    """The error for a result that was not accepted is freed after it was handled."""
    with no_wait():
        assert not is_error_alive(run, until=lambda result: result is not None, attempts=attempts)


# --- many attempts --------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [255, 256, 257, 512, 2_000])
def test_number_of_recorded_steps_is_limited(clock: VirtualClock, attempts: int) -> None:
    """The record of a call has its last steps, at most 256, and the sum of all waits."""
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
