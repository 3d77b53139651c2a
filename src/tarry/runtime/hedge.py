"""Hedged calls: if the first copy of a call takes too long, another copy starts in parallel.

A copy is one execution of the called function. The first result that is accepted ends the call.
`RunningHedgedCall` adds a clock, random numbers and events to the core's `HedgedCall`, in which a
copy is an attempt. `drive` and `drive_async` run the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tarry import errors
from tarry.core.checks import check_instance, reject_unknown_arguments
from tarry.core.events import Event, HedgeFired, HedgeWon, Succeeded
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.outcome import SUCCESS, Kind
from tarry.core.verdict import CallRecord, Reason, Stop
from tarry.runtime import config, functions, scopes
from tarry.runtime.call import (
    fallback_result,
    fallback_result_async,
    gave_up_event,
    rejection_error,
)
from tarry.runtime.classifier import Classifier
from tarry.runtime.downstream import Downstream
from tarry.runtime.effects import effects
from tarry.runtime.error_record import attach_record_and_note
from tarry.runtime.events import bus, stamp
from tarry.runtime.forks import PerProcess
from tarry.runtime.parallel import TaskCopies, ThreadCopies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Never

    from tarry.core.checks import Seconds
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import Attempt
    from tarry.runtime.options import On
    from tarry.runtime.parallel import FinishedCopy

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def hedge(
    fn: Callable[[*Ts], Awaitable[T]],
    /,
    *args: *Ts,
    kwargs: Mapping[str, Any] | None = None,
    after: Seconds | str | None = None,
    max_extra_load: float | None = None,
    max_attempts: int = 2,
    on: On | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    fallback: T | Callable[[Exception], T | Awaitable[T]] = config.NO_FALLBACK,
    policy: None = None,
    **unknown: Never,
) -> T:
    """Await a coroutine function; start another copy of the call when it takes too long.

    kwargs: keyword arguments for the function.
    after: when another copy starts: after these seconds, or after a percentile such as "p95" of the
        latest successful copies' durations. A percentile is used only after 100 such copies.
    max_extra_load: the maximum number of additional copies as a share of the calls. With 0.05,
        there are at most 5 additional copies for 100 calls, and `after` is "p95" by default.
    max_attempts: the maximum number of copies, including the first (default 2).
    on: errors after which the next copy starts at once; any other error ends the call.
    downstream: measures the latency of the dependency. By default each function has its own.
    fallback: what a call that is given up returns, as in `retry`: a value, or a function that takes
        the error. An error that `on` does not match is still raised.
    policy: must be None, because a call is either retried or hedged.
    """
    _reject_unknown("hedge", unknown)
    hedging = Hedging(after=after, max_extra_load=max_extra_load, max_attempts=max_attempts)
    functions.check_not_async_generator("fallback", fallback)
    call = _new_call("hedge", fn, kwargs, hedging, on, downstream, name, policy)
    # A plain function may still return an awaitable, as a lambda does.
    is_coroutine_function = functions.flags_of(fn) & functions.COROUTINE
    checked_fn: Callable[..., Awaitable[T]]
    checked_fn = fn if is_coroutine_function else functions.check_awaitable(fn, "hedge_sync")
    keyword_arguments = kwargs or {}

    async def run_copy(number: int) -> T:
        _set_attempt_number(number)
        return await checked_fn(*args, **keyword_arguments)

    try:
        return await drive_async(call, run_copy)
    except Exception as error:
        if fallback is config.NO_FALLBACK or not call.has_given_up:
            raise
        result: T = await fallback_result_async(fallback, error)
        return result


def hedge_sync(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    kwargs: Mapping[str, Any] | None = None,
    after: Seconds | str | None = None,
    max_extra_load: float | None = None,
    max_attempts: int = 2,
    on: On | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    fallback: T | Callable[[Exception], T] = config.NO_FALLBACK,
    policy: None = None,
    **unknown: Never,
) -> T:
    """Call a plain function in a thread; start another copy when it takes too long.

    Takes the arguments of `hedge`. A copy that still runs when another copy has returned its result
    cannot be cancelled. Its thread continues, and its result is discarded.
    """
    _reject_unknown("hedge_sync", unknown)
    hedging = Hedging(after=after, max_extra_load=max_extra_load, max_attempts=max_attempts)
    functions.check_not_async("fallback", fallback)
    call = _new_call("hedge_sync", fn, kwargs, hedging, on, downstream, name, policy)
    untyped_fn: Callable[..., T] = fn
    keyword_arguments = kwargs or {}

    def run_copy(number: int) -> T:
        _set_attempt_number(number)
        return untyped_fn(*args, **keyword_arguments)

    try:
        return drive(call, run_copy)
    except Exception as error:
        if fallback is config.NO_FALLBACK or not call.has_given_up:
            raise
        result: T = fallback_result(fallback, error)
        return result


# `policy` is there only to be rejected with its own message.
_OPTIONS = tuple(name for name in hedge.__kwdefaults__ or () if name != "policy")
_OTHER_NAMES = {"attempts": "max_attempts", "delay": "after"}


def _reject_unknown(api_name: str, unknown: Mapping[str, Any]) -> None:
    """Raise if `hedge` or `hedge_sync` got arguments that it does not have."""
    hint = " (arguments of the function go into kwargs=)"
    reject_unknown_arguments(f"tarry.{api_name}", unknown, _OPTIONS, _OTHER_NAMES, hint=hint)


def _set_attempt_number(number: int) -> None:
    """Set the number of a copy in its context, which ends with the copy."""
    if number > 1 or scopes.current_scope.get() is not None:
        scopes.enter(None, number)


def _new_call(
    api_name: str,
    fn: Callable[..., Any],
    kwargs: Mapping[str, Any] | None,
    hedging: Hedging,
    on: On | None,
    downstream: Downstream | None,
    name: str | None,
    policy: None,
) -> RunningHedgedCall:
    """Check the arguments of the public function `api_name`, and return a new call."""
    if policy is not None:
        raise errors.ConfigurationError(config.RETRY_AND_HEDGE_MESSAGE)
    functions.check_callable(api_name, fn)
    check_instance("kwargs", kwargs, Mapping, "a dict")
    if api_name == "hedge_sync" and functions.flags_of(fn) & functions.COROUTINE:
        msg = f"{functions.name_of(fn)} is a coroutine function: use `await tarry.hedge(...)`"
        raise errors.ConfigurationTypeError(msg)
    functions.check_not_async("on", on)
    check_instance("downstream", downstream, Downstream, 'a tarry.Downstream("name")')
    classify_error = Classifier(on).classify_error
    name = name or functions.operation_of(fn)
    call = RunningHedgedCall(name, hedging, classify_error, downstream or _downstream_of(fn))
    if downstream is None:
        call.downstream_name = None  # the user has not created the default downstream
    return call


def drive(
    call: RunningHedgedCall,
    fn: Callable[[int], T],
    release_connection: Callable[[Any], bool] | None = None,
) -> T:
    """Run copies of a function in threads until one of them returns a result that is accepted.

    `fn` takes the number of the copy. `release_connection` is called with each response that is not
    accepted. It releases the connection, and returns whether the response can still be read.
    """
    copies: ThreadCopies[T] = ThreadCopies(fn, release_connection)
    try:
        first = call.begin_first_copy()
        copies.start(first.number, first.delay)
        while True:
            finished = copies.next_finished(call.seconds_to_wait())
            if finished is None:
                next_copy = call.on_timeout()
            else:
                next_copy = call.on_finished(finished)
                if call.has_final_result:
                    return finished.result()
                if (
                    release_connection
                    and finished.has_result
                    and not release_connection(finished.result())
                ):
                    call.discard_error()
            if next_copy is not None and not _try_start(copies, next_copy):
                call.record_not_started(next_copy.number)
    except BaseException:
        call.abort()
        raise
    finally:
        copies.close()


def _try_start(copies: ThreadCopies[T], copy: Attempt) -> bool:
    """Start a copy; return False if there are too many threads, in tarry or in the process."""
    try:
        copies.start(copy.number, copy.delay)
    except (errors.LimitReached, RuntimeError):
        return False
    return True


async def drive_async(
    call: RunningHedgedCall,
    fn: Callable[[int], Awaitable[T]],
    release_connection: Callable[[Any], Awaitable[bool]] | None = None,
) -> T:
    """Like `drive`, but run copies of a coroutine function in tasks of the running event loop."""
    try:
        first = call.begin_first_copy()
        copies: TaskCopies[T] = TaskCopies(fn, release_connection)
        async with copies:
            copies.start(first.number, first.delay)
            while True:
                finished = await copies.next_finished(call.seconds_to_wait())
                if finished is None:
                    next_copy = call.on_timeout()
                else:
                    next_copy = call.on_finished(finished)
                    if call.has_final_result:
                        return finished.result()
                    if release_connection and finished.has_result:
                        can_be_read = await release_connection(finished.result())
                        if not can_be_read:
                            call.discard_error()
                if next_copy is not None:
                    copies.start(next_copy.number, next_copy.delay)
    except BaseException:
        call.abort()
        raise


_downstreams: WeakKeyDictionary[Any, Downstream] = WeakKeyDictionary()
"""The default downstream of each hedged function, with the durations of its earlier copies."""
_downstreams_lock = PerProcess(threading.RLock)


def _downstream_of(fn: Callable[..., Any]) -> Downstream:
    """Return the default downstream of a function; a method has one for all instances."""
    function = getattr(fn, "__func__", fn)
    with _downstreams_lock.value:
        try:
            return _downstreams.get(function) or _downstreams.setdefault(
                function, Downstream(functions.name_of(fn))
            )
        except TypeError:  # `fn` cannot be weakly referenced: no durations are kept between calls
            return Downstream(functions.name_of(fn))


class RunningHedgedCall:
    """The state of a hedged call; `operation` is its name in events, errors and logs."""

    def __init__(
        self,
        operation: str,
        hedging: Hedging,
        classify_error: Callable[[Exception, int], Outcome],
        downstream: Downstream,
        classify_result: Callable[[Any], Outcome] | None = None,
    ) -> None:
        self._operation = operation
        self._downstream = downstream
        self.downstream_name: str | None = downstream.name
        """The name in events and records."""
        self._call = HedgedCall(hedging, downstream)
        self._classify_error = classify_error
        self._classify_result = classify_result
        self._deadline = scopes.current_deadline()
        self._last_record_number = bus.last_record_number
        """The number of the newest error record when the call began: see `error_record`."""
        self._error: Exception | None = None
        """The error of the copy that failed last, while the call continues."""
        self._detail = ""
        """A description of the last failure, for events; "" if no copy has failed."""
        self._call_id = ""
        """The id of the call in events; "" until an event is emitted."""
        self.has_final_result: bool = False
        """Whether the call has ended with the result of the copy that finished last."""
        self.has_given_up: bool = False
        """Whether the call has ended with an error that is not permanent."""

    def begin_first_copy(self) -> Attempt:
        """Return the first copy, which must now start; raise if the call is rejected."""
        command = self._call.start(self._now_before_deadline())
        if isinstance(command, Stop):
            self._raise_final_error(command)
        return command

    def seconds_to_wait(self) -> float | None:
        """Return the seconds until the next copy is due or the deadline passes; None if neither."""
        moments = [m for m in (self._call.next_hedge_at, self._deadline) if m is not None]
        return max(0.0, min(moments) - effects.now()) if moments else None

    def on_timeout(self) -> Attempt | None:
        """Return the next copy to start, if one is due and allowed; raise if the call must end."""
        now = self._now_before_deadline()
        if self._call.next_hedge_at is None or now < self._call.next_hedge_at:
            return None
        command = self._call.hedge(now)
        if isinstance(command, Stop):
            # The last copy failed, and its server requested a delay before the next copy. The delay
            # is over, but no further copy is allowed, and no other copy is running.
            self._raise_final_error(command)
        self._emit_hedge_fired(command)
        return command

    def on_finished(self, finished: FinishedCopy[Any]) -> Attempt | None:
        """Record a copy that has finished; return a copy that must start now, or None.

        Sets `has_final_result` if the result of the copy ends the call. Raises the copy's error if
        the error ends the call. Otherwise the call continues, perhaps with copies that still run.
        """
        outcome = None
        try:
            result = finished.result()
            if self._classify_result is not None:
                outcome = self._classify_result(result)
                if outcome.kind not in (Kind.SUCCESS, Kind.PERMANENT):
                    raise errors.ResultNotAccepted(f"{self._operation}: {outcome.detail}", result)
        except Exception as error:
            if outcome is None:
                outcome = self._classify_error(error, self._last_record_number)
            self._detail = outcome.detail
            now, random_number = effects.now(), effects.draw_random()
            command = self._call.record_failure(finished.number, outcome, now, random_number)
            self._downstream.keep_last_error(error, outcome)
            if isinstance(command, Stop):
                self._record_give_up(command, error)
                raise
            self._error = error
            self._emit_hedge_fired(command)
            return command
        self.record_final_result(finished.number, outcome or SUCCESS)
        self.has_final_result = True
        return None

    def record_final_result(self, number: int, outcome: Outcome) -> None:
        """Record that the result of this copy ends the call: a success or a permanent failure."""
        self._error = None  # its traceback refers to self: break the reference cycle
        is_success = outcome.kind is Kind.SUCCESS
        if is_success:
            self._call.record_success(number, effects.now(), effects.draw_random())
        else:
            self._call.cancel(effects.now())  # such as a 404: not the dependency's failure
        stop = None if is_success else Stop(Reason.PERMANENT)
        self._append_to_recordings(stop)
        # Without listeners, the log needs no event if the first copy returned the result.
        if bus.listeners or (number > 1 and bus.is_observed()):
            if number > 1:
                self._emit(HedgeWon(self._operation, self.downstream_name, number))
            if stop is None:
                self._emit(Succeeded(self._operation, self.downstream_name, self._call.attempts))
            else:
                self._emit(gave_up_event(self._call_record(stop), stop, None, outcome.detail))

    def record_not_started(self, number: int) -> None:
        """Record that no thread could be started for a copy; raise if no other copy runs."""
        if not self._call.record_unsent(number, effects.now()):
            self._raise_final_error(Stop(Reason.LIMIT))

    def discard_error(self) -> None:
        """Drop the last `ResultNotAccepted`, because its response can no longer be read."""
        self._error = None

    def abort(self) -> None:
        """Release the permits of the copies that still run."""
        try:
            self._call.cancel(effects.now())
        finally:
            self._call.forget_attempts()

    def _raise_final_error(self, stop: Stop) -> Never:
        """Raise the error of the copy that failed last; a `Rejected` if no copy has failed."""
        error, self._error = self._error, None
        if error is None:
            error = rejection_error(stop, self._operation, self._downstream, self._detail)
        self._record_give_up(stop, error)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: break the reference cycle

    def _emit_hedge_fired(self, copy: Attempt | None) -> None:
        if copy is not None and bus.is_observed():
            self._emit(HedgeFired(self._operation, self.downstream_name, copy.number))

    def _now_before_deadline(self) -> float:
        """Return the current time; raise if the deadline has passed."""
        now = effects.now()
        if self._deadline is not None and now >= self._deadline:
            error = errors.DeadlineExceeded(f"{self._operation}: the deadline has passed")
            self._record_give_up(Stop(Reason.DEADLINE), error)
            raise error
        return now

    def _append_to_recordings(self, stop: Stop | None) -> None:
        """Add the record of this call, which has ended, to the blocks that record their calls."""
        for records in scopes.recordings():
            records.append(self._call_record(stop))

    def _record_give_up(self, stop: Stop, error: Exception) -> None:
        self.has_given_up = stop.reason is not Reason.PERMANENT
        call_record = self._call_record(stop)
        self._append_to_recordings(stop)
        # If there was only one copy, its error was not hedged: an outer retry loop may retry it.
        no_outer_retry = call_record.attempts != 1
        attach_record_and_note(
            error, call_record, self._last_record_number, no_outer_retry=no_outer_retry
        )
        if bus.is_observed():
            detail = "" if isinstance(error, errors.Rejected) else self._detail
            detail = detail or type(error).__name__
            self._emit(gave_up_event(call_record, stop, error, detail))

    def _emit(self, event: Event) -> None:
        self._call_id = self._call_id or bus.new_call_id()
        bus.emit(stamp(event, self._call_id))

    def _call_record(self, stop: Stop | None) -> CallRecord:
        """Return the record of this call; `stop` is None if it has succeeded."""
        name, attempts = self.downstream_name, self._call.attempts
        reason, retry_after, _ = stop or (None, None, None)
        return CallRecord(self._operation, name, attempts, 0.0, reason, retry_after, ())
