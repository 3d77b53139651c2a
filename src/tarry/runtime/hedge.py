"""Hedged calls: another copy when the first takes too long; the first answer wins."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tarry.core.events import GaveUp, HedgeFired, HedgeWon, Succeeded
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.outcome import SUCCESS, Kind
from tarry.core.verdict import CallRecord, Reason, Stop
from tarry.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DeadlineExceeded,
    LimitReached,
    Rejected,
    ResultNotAccepted,
)
from tarry.runtime import deadlines, event_loops
from tarry.runtime.call import rejection_error
from tarry.runtime.callables import COROUTINE, check_callable, flags_of, name_of
from tarry.runtime.classify import Classifier
from tarry.runtime.clocks import system
from tarry.runtime.config import RETRY_AND_HEDGE_MESSAGE, check_instance
from tarry.runtime.downstream import Downstream
from tarry.runtime.error_record import add_note, attach_record, has_record_since
from tarry.runtime.events import bus
from tarry.runtime.parallel import ThreadCopies, parallel_copies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Never

    from tarry.core.outcome import Outcome
    from tarry.core.verdict import Attempt
    from tarry.runtime.classify import On
    from tarry.runtime.parallel import FinishedCopy, ParallelCopies

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def hedge(
    fn: Callable[[*Ts], Awaitable[T]],
    /,
    *args: *Ts,
    after: float | str | None = None,
    max_extra_load: float | None = None,
    max_attempts: int = 2,
    on: On | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    policy: None = None,
) -> T:
    """Await a coroutine function, and send another copy when it takes too long.

    after: seconds, or a live percentile such as "p95", which needs 100 calls to be known.
    max_extra_load: 0.05 hedges at p95 and never adds more than 5 % to the calls.
    max_attempts: copies in all, the first included (2).
    on: errors after which the next copy goes at once; any other error is the answer.
    downstream: the dependency; without one, latency is kept per function.
    """
    if policy is not None:
        raise ConfigurationError(RETRY_AND_HEDGE_MESSAGE)
    check_callable("hedge", fn)
    hedging = Hedging(after=after, max_extra_load=max_extra_load, max_attempts=max_attempts)
    run = _run(fn, name, hedging, on, downstream)
    return await drive_async(run, lambda _number: fn(*args))


def hedge_sync(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    after: float | str | None = None,
    max_extra_load: float | None = None,
    max_attempts: int = 2,
    on: On | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    policy: None = None,
) -> T:
    """Call a plain function in a thread, and send another copy when it takes too long.

    Takes the arguments of `hedge`. A loser cannot be cancelled: its thread runs on, and what it
    comes to is thrown away.
    """
    if policy is not None:
        raise ConfigurationError(RETRY_AND_HEDGE_MESSAGE)
    check_callable("hedge_sync", fn)
    hedging = Hedging(after=after, max_extra_load=max_extra_load, max_attempts=max_attempts)
    if flags_of(fn) & COROUTINE:
        msg = f"{name_of(fn)} is a coroutine function: use `await tarry.hedge(...)`"
        raise ConfigurationTypeError(msg)
    run = _run(fn, name, hedging, on, downstream)
    return drive(run, lambda _number: fn(*args))


def _run(
    fn: Callable[..., Any],
    name: str | None,
    hedging: Hedging,
    on: On | None,
    downstream: Downstream | None,
) -> RunningHedgedCall:
    check_instance("downstream", downstream, Downstream, 'a tarry.Downstream("name")')
    classify = Classifier(on).classify_error
    shared = downstream or _downstream_of(fn)
    return RunningHedgedCall(name or name_of(fn), hedging, classify, shared)


def drive(
    run: RunningHedgedCall, fn: Callable[[int], T], release: Callable[[Any], bool] | None = None
) -> T:
    """Call a function of the copy's number in threads, until one has the answer.

    `release` lets go of the result of a copy that lost, and says whether it is still of use.
    """
    running: ThreadCopies[T] = ThreadCopies(fn, release)
    try:
        first = run.begin_attempt()
        running.start(first.number, first.delay)
        while True:
            ended = running.next(run.seconds_to_wait())
            if ended is None:
                another = run.on_timeout()
            else:
                try:
                    result = run.check_result(ended.result())
                except Exception as error:
                    lost = run.record_failure(ended.number, error)
                    if isinstance(lost, Stop):
                        raise
                    another = lost
                    if (
                        release is not None
                        and isinstance(error, ResultNotAccepted)
                        and not release(error.result)
                    ):
                        run.discard_error()
                else:
                    run.record_success(ended.number)
                    return result
            if another is not None and not _sent(running, another):
                run.record_unsent(another.number)
    except BaseException:
        run.abort()
        raise
    finally:
        running.leave()


def _sent(running: ThreadCopies[T], attempt: Attempt) -> bool:
    try:
        running.start(attempt.number, attempt.delay)
    except (LimitReached, RuntimeError):  # no thread to be had: no hedge, but no failure either
        return False
    return True


async def drive_async(
    run: RunningHedgedCall,
    fn: Callable[[int], Awaitable[T]],
    release: Callable[[Any], Awaitable[bool]] | None = None,
) -> T:
    """Do what `drive` does, in tasks of whichever loop runs."""
    try:
        first = run.begin_attempt()
        tasks: ParallelCopies[T] = parallel_copies(fn, release)
        async with tasks as running:
            running.start(first.number, first.delay)
            while True:
                ended = await _next(running, run.seconds_to_wait())
                if ended is None:
                    another = run.on_timeout()
                else:
                    try:
                        result = run.check_result(ended.result())
                    except Exception as error:
                        lost = run.record_failure(ended.number, error)
                        if isinstance(lost, Stop):
                            raise
                        another = lost
                        if (
                            release is not None
                            and isinstance(error, ResultNotAccepted)
                            and not await release(error.result)
                        ):
                            run.discard_error()
                    else:
                        run.record_success(ended.number)
                        return result
                if another is not None:
                    running.start(another.number, another.delay)
    except BaseException:
        run.abort()
        raise


async def _next(running: ParallelCopies[T], timeout: float | None) -> FinishedCopy[T] | None:
    if timeout is None:
        return await running.next()
    with event_loops.timeout(timeout):
        return await running.next()
    return None  # the time was up first


_known: WeakKeyDictionary[Any, Downstream] = WeakKeyDictionary()
_locks = [threading.RLock()]


def _after_fork() -> None:
    _locks[0] = threading.RLock()  # whoever held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _downstream_of(fn: Callable[..., Any]) -> Downstream:
    """Return the function's own downstream: where its latency is kept between calls."""
    key = getattr(fn, "__func__", fn)
    with _locks[0]:
        try:
            found = _known.get(key)
            if found is None:
                found = _known[key] = Downstream(name_of(fn))
        except TypeError:  # cannot be referred to weakly: begins anew each time
            found = Downstream(name_of(fn))
    return found


class RunningHedgedCall:
    """The live state of one hedged call."""

    __slots__ = (
        "_call",
        "_classify",
        "_classify_result",
        "_deadline",
        "_detail",
        "_downstream",
        "_error",
        "_operation",
        "_outcome",
        "_serial",
    )

    def __init__(
        self,
        operation: str,
        hedging: Hedging,
        classify: Callable[[Exception, int], Outcome],
        downstream: Downstream,
        classify_result: Callable[[Any], Outcome] | None = None,
    ) -> None:
        self._operation = operation
        self._downstream = downstream
        self._call = HedgedCall(hedging, downstream)
        self._classify = classify
        self._classify_result = classify_result
        self._outcome: Outcome | None = None
        """What the last result was judged to be."""
        self._deadline = deadlines.current()
        self._serial = bus.serial
        self._error: Exception | None = None
        self._detail = ""
        """What the last failure was, for listeners."""

    def begin_attempt(self) -> Attempt:
        """Send the first copy, or raise a rejection."""
        now = system.now()
        if self._deadline is not None and now >= self._deadline:
            raise self._too_late()
        command = self._call.start(now)
        if isinstance(command, Stop):
            self._stop(command)
        return command

    def seconds_to_wait(self) -> float | None:
        """Return the seconds until something is due, or None."""
        moments = [m for m in (self._call.next_hedge_at, self._deadline) if m is not None]
        return max(0.0, min(moments) - system.now()) if moments else None

    def on_timeout(self) -> Attempt | None:
        """Time is up: send another copy if it may go, or raise at the deadline."""
        now = system.now()
        if self._deadline is not None and now >= self._deadline:
            raise self._too_late()
        if self._call.next_hedge_at is None or now < self._call.next_hedge_at:
            return None
        command = self._call.hedge(now)
        if isinstance(command, Stop):  # a server had named a later time, and now it may not go
            self._stop(command)
        self._fired(command)
        return command

    def check_result(self, result: T) -> T:
        """Return a result that ends the call, or raise a failure wrapped in an error."""
        if self._classify_result is not None:
            self._outcome = outcome = self._classify_result(result)
            if outcome.kind not in (Kind.SUCCESS, Kind.PERMANENT):
                raise ResultNotAccepted(f"{self._operation}: {outcome.detail}", result)
        return result

    def record_success(self, number: int) -> None:
        """One copy has the answer."""
        self._error = None  # its traceback holds us: leave no cycle behind
        outcome = self._outcome or SUCCESS
        good = outcome.kind is Kind.SUCCESS
        if good:
            self._call.record_success(number, system.now(), system.draw())
        else:
            self._call.cancel(system.now())  # an answer like any other, and no sign of health
        if bus.listeners or (number > 1 and bus.is_observed()):
            if number > 1:
                bus.emit(HedgeWon(self._operation, self._downstream.name, number))
            if good:
                bus.emit(Succeeded(self._operation, self._downstream.name, self._call.attempts))
            else:
                self._tell_gave_up(Stop(Reason.PERMANENT), None, outcome.detail)

    def record_failure(self, number: int, error: Exception) -> Attempt | Stop | None:
        """One copy failed: another, more waiting, or the end."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            classify = self._classify
            outcome = classify(error, self._serial)
        self._detail = outcome.detail
        command = self._call.record_failure(number, outcome, system.now(), system.draw())
        if isinstance(command, Stop):
            self._give_up(command, error)
        else:
            self._error = error
            self._fired(command)
        return command

    def record_unsent(self, number: int) -> None:
        """There was no thread for a copy: go on without it, or raise the error of the last."""
        if not self._call.record_unsent(number, system.now()):
            self._stop(Stop(Reason.LIMIT))

    def discard_error(self) -> None:
        """The answer of the copy that failed last is gone: the call cannot end with it."""
        self._error = None

    def abort(self) -> None:
        """Forget the copies that still run."""
        self._call.cancel(system.now())

    def _stop(self, stop: Stop) -> Never:
        """End the call, in which no copy runs, with the error of the one that failed last."""
        error, self._error = self._error, None
        if error is None:
            error = rejection_error(stop, self._operation, self._downstream.name, self._detail)
        self._give_up(stop, error)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: leave no cycle behind

    def _fired(self, attempt: Attempt | None) -> None:
        if attempt is not None and bus.is_observed():
            bus.emit(HedgeFired(self._operation, self._downstream.name, attempt.number))

    def _too_late(self) -> DeadlineExceeded:
        error = DeadlineExceeded(f"{self._operation}: the deadline has passed")
        self._give_up(Stop(Reason.DEADLINE), error)
        return error

    def _give_up(self, stop: Stop, error: Exception) -> None:
        name, copies_sent = self._downstream.name, self._call.attempts
        record = CallRecord(
            self._operation, name, copies_sent, 0.0, stop.reason, stop.retry_after, ()
        )
        if not has_record_since(error, self._serial):
            attach_record(error, record, final=copies_sent != 1)
        add_note(error, record)
        if bus.is_observed():
            rejected = isinstance(error, Rejected)
            self._tell_gave_up(stop, error, (not rejected and self._detail) or type(error).__name__)

    def _tell_gave_up(self, stop: Stop, error: Exception | None, detail: str) -> None:
        bus.emit(
            GaveUp(
                self._operation,
                self._downstream.name,
                self._call.attempts,
                stop.reason,
                0.0,
                stop.retry_after,
                stop.hint,
                error,
                detail=detail,
            )
        )
