"""The state of a running call: the core's `Call` with a clock, random numbers and events.

A driver is the loop that makes the attempts of a call. It calls `begin_attempt`, makes the attempt,
and passes the attempt's error to `try_continue` or its result to `try_finish`. If the call
continues, the driver calls `wait` or `async_wait` and begins the next attempt. If a limiter delays
an attempt, `begin_attempt` returns the delay, and the driver calls `wait_for_limiter` or
`async_wait_for_limiter` before it makes the attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tarry import errors
from tarry.core.call import Call
from tarry.core.decide import decide
from tarry.core.outcome import Kind
from tarry.core.policy import UNLIMITED_ATTEMPTS
from tarry.core.text import format_duration
from tarry.core.verdict import (
    CallRecord,
    CallState,
    Progress,
    Reason,
    Stop,
    Wait,
    forbids_outer_retry,
)
from tarry.runtime import event_loops, scopes
from tarry.runtime.classifier import TIMEOUT
from tarry.runtime.effects import effects
from tarry.runtime.error_record import (
    RECORD_ATTRIBUTE,
    attach_record_and_note,
    has_record_since,
)
from tarry.runtime.events import (
    LOG_WARNING,
    E,
    bus,
    call_on_retry,
    call_on_retry_async,
    stamp,
)
from tarry.runtime.functions import reject_awaitable
from tarry.runtime.process_settings import process_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Self

    from tarry.core.events import Event, GaveUp, WillWait
    from tarry.core.hints import Hint
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import Attempt
    from tarry.runtime.config import RetryConfig
    from tarry.runtime.downstream import Downstream

FirstFailure: TypeAlias = "tuple[Outcome, str, Wait]"
"""The outcome of a failed first attempt, the name of its error's type, and the wait after it."""

# To read a member of an enum takes 0.28 us in Python 3.11, a constant 0.01 us.
_SUCCESS, _PERMANENT = Kind.SUCCESS, Kind.PERMANENT

_AFTER_ONE_ATTEMPT = Progress(attempts=1)
"""The state of any call without a downstream after its first attempt."""

_REJECTION_CLASSES: dict[Reason, type[errors.Rejected]] = {
    Reason.BREAKER_OPEN: errors.BreakerOpen,
    Reason.LIMIT: errors.LimitReached,
    Reason.DEADLINE: errors.DeadlineExceeded,
    Reason.TOTAL_BUDGET: errors.DeadlineExceeded,
}

_get_scope = scopes.current_scope.get


class RunningCall(Call):
    """The state of one call while a driver runs it.

    It is a subclass of `Call`, so that a failure allocates one object instead of two.
    """

    __slots__ = (
        "_call_id", "_emits_events", "_error", "_last_record_number", "_stop_reason", "_uses_clock",
        "_wait", "config",
    )  # fmt: skip

    _checks_traceback = True
    """Whether the final error must have passed a driver function: see `error_record`."""
    _wait: Wait  # set by `try_continue`, if another attempt follows
    _stop_reason: Reason  # set by `_record_give_up`, if the call ends with an error

    def __init__(
        self, config: RetryConfig, started: float | None, deadline: float | None, record_number: int
    ) -> None:
        """Prepare a call; `started` is None if the call has no time limit and needs no clock."""
        policy, test_limit = config.policy, process_settings.max_attempts
        if test_limit is not None and policy.max_attempts > test_limit:
            policy = policy.replace(max_attempts=test_limit)
        Call.__init__(self, policy, config.downstream, started or 0.0, deadline)
        self.config: RetryConfig = config
        self._uses_clock = started is not None
        self._last_record_number = record_number
        """The number of the newest error record when the attempt began: see `error_record`."""
        self._error: Exception | None = None
        """The error of the last attempt, while the call waits for the next one."""
        self._emits_events = False
        """Whether events are emitted even without listeners, for the log. Set by a failure."""
        self._call_id = ""
        """The id of the call in events; "" until an event is emitted."""

    @classmethod
    def new(cls, config: RetryConfig) -> Self:
        """Return a new call that starts now."""
        now = effects.now()
        if config.deadline is None:
            deadline = scopes.current_deadline()
        else:
            deadline = scopes.cap_at_deadline(now + config.deadline)
        return cls(config, now, deadline, 0)

    @classmethod
    def after_first_attempt(
        cls, config: RetryConfig, started: float, last_record_number: int, permit: int
    ) -> Self:
        """Return a call whose first attempt, with this permit, was made without a `RunningCall`."""
        running = cls(config, started, None, last_record_number)
        running.adopt_first_attempt(permit)
        return running

    @classmethod
    def after_first_failure(
        cls, config: RetryConfig, first_failure: FirstFailure, last_record_number: int
    ) -> Self:
        """Return a call whose first two attempts were made without a `RunningCall`.

        `last_record_number` is that of the second attempt.
        """
        running = cls(config, None, None, last_record_number)
        running.adopt_first_failure(*first_failure)
        return running

    def begin_attempt(self) -> Attempt:
        """Begin the next attempt; if it is rejected, raise the last error or a `Rejected`."""
        command = self.start(effects.now() if self._uses_clock else 0.0)
        # The error's traceback refers to this object: break the reference cycle.
        error, self._error = self._error, None
        if isinstance(command, Stop):
            if error is None:
                config = self.config
                error = rejection_error(
                    command, config.operation, config.downstream, self._last_detail
                )
            self._record_give_up(command, error)
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the reference cycle
        self._last_record_number = bus.last_record_number
        if bus.listeners or self._emits_events:
            if self.downstream is None:  # otherwise `start` has set it
                self._attempt_started = effects.now()
            self._emit_started()
        return command

    def try_continue(self, error: Exception, outcome: Outcome | None = None) -> bool:
        """Record a failed attempt; return whether another follows. By default classify `error`."""
        config = self.config
        try:
            if outcome is None:
                classify = config.classify_error  # a direct call is slower: see `Effects`
                outcome = classify(error, self._last_record_number)
            now = effects.now() if self._uses_clock else 0.0
            random_number = (config.draw_random or effects.draw_random)()
            detail = type(error).__name__
            counted_outcome = outcome
            if outcome.kind is _PERMANENT and _is_own_timeout(error):
                # The predicate `on` decides only about the retry. For the breaker, the budget and
                # the limiters, an attempt that timed out is a failure of the dependency. Release
                # the permit with TIMEOUT now; `record_failure` then finds none, and does not count
                # again.
                counted_outcome = TIMEOUT
                if self.downstream is not None:
                    self._record(self.downstream, counted_outcome, now, random_number)
            verdict = self.record_failure(outcome, now, random_number, detail)
            if isinstance(verdict, Stop):
                if verdict.reason is Reason.ATTEMPTS and self._are_retries_off:
                    verdict = self.replace_verdict_with_stop(
                        Reason.RETRIES_OFF, outcome, detail, now
                    )
            elif config.stop is not None and self._is_stopped(config.stop, verdict, error, now):
                verdict = self.replace_verdict_with_stop(Reason.STOPPED, outcome, detail, now)
            if config.downstream is not None:
                config.downstream.keep_last_error(error, counted_outcome)
            is_log_enabled = bus.is_log_enabled
            if bus.listeners or is_log_enabled(LOG_WARNING):
                # Without listeners, `begin_attempt` emitted no event: emit it now, for the log.
                if not self._emits_events and not bus.listeners:
                    self._emit_started()
                self._emits_events = True
                self._emit_failed(outcome, verdict, error)
            if isinstance(verdict, Stop):
                self._record_give_up(verdict, error)
                return False
        except BaseException:  # raised by the user's predicate, random source, jitter or budget
            self.abort()
            raise
        self._wait, self._error = verdict, error
        return True

    @property
    def _are_retries_off(self) -> bool:
        """Whether `tarry.set_active(False)`, and not the policy, limits the call to one attempt."""
        is_limited = self.policy.max_attempts == 1 and self.policy is not self.config.policy
        return is_limited and not process_settings.is_active

    def _is_stopped(
        self, stop: Callable[[CallState], bool], wait: Wait, error: Exception, now: float
    ) -> bool:
        """Return whether the user's stop function ends the call instead of a retry."""
        elapsed = now - self.started
        try:
            state = CallState(self.config.operation, self.attempts, elapsed, wait.delay, error)
            is_stopped = stop(state)
            reject_awaitable("stop", is_stopped, "returned an awaitable, but must return a bool")
        except BaseException:
            self.refund_retry(now)
            raise
        return is_stopped

    def try_finish(self, result: object, outcome: Outcome | None = None) -> bool:
        """Record the result of an attempt; return True if the call ends with it, False for a retry.

        `outcome` is that of `result`; if it is None, `result` is classified here. A permanent
        failure, such as a 404, also ends the call with its result. If the result is another failure
        and no attempt follows, `ResultNotAccepted` is raised.
        """
        classify_result = self.config.classify_result
        if classify_result is not None:
            outcome = classify_result(result)
        if outcome is not None:
            if outcome.kind is _PERMANENT:
                random_number = (self.config.draw_random or effects.draw_random)()
                verdict = self.record_failure(outcome, effects.now(), random_number)
                if isinstance(verdict, Stop):
                    self._append_to_recordings(verdict)
                    if bus.listeners or self._emits_events:
                        self._emit_failed(outcome, verdict, None)
                        call_record = self._call_record(verdict)
                        self._emit(gave_up_event(call_record, verdict, None, self._last_detail))
                return True
            if outcome.kind is not _SUCCESS:
                return self._reject_result(result, outcome)
        if self.downstream is not None:
            random_number = (self.config.draw_random or effects.draw_random)()
            self.record_success(effects.now(), random_number)
        if _get_scope() is not None:  # without a scope, no block records its calls
            self._append_to_recordings(None)
        if bus.listeners or self._emits_events:
            import tarry.core.events as event

            call_fields = self.config.operation, self._downstream_name, self.attempts
            self._emit(event.Succeeded(*call_fields, duration=self._attempt_duration()))
        return True

    async def classify_error_async(self, error: Exception) -> Outcome | None:
        """Return the outcome of an error, if `on` is a coroutine function; otherwise None."""
        classify = self.config.classify_error_async
        return None if classify is None else await classify(error, self._last_record_number)

    def _reject_result(self, result: object, outcome: Outcome) -> bool:
        """Record a result as a failure; raise `ResultNotAccepted`, or return False for a retry."""
        problem = outcome.detail or "`until` did not accept the result"
        error = errors.ResultNotAccepted(f"{self.config.operation}: {problem}", result)
        # An inner adapter has retried already, if it has put its record on this response since the
        # attempt began.
        if getattr(result, RECORD_ATTRIBUTE, None) is not None and has_record_since(
            error, self._last_record_number
        ):
            outcome = outcome.replace(retried_below=True)
        if self.try_continue(error, outcome):
            return False
        try:
            raise error
        finally:
            del error

    def discard_error(self) -> None:
        """Drop the last `ResultNotAccepted`, because its response can no longer be read."""
        self._error = None

    def abort(self) -> None:
        """Release the permit that the downstream gave the running attempt, before a raise."""
        if self.downstream is not None:
            try:
                self.cancel_attempt(effects.now())
            finally:
                self.forget_attempt()

    def timeout_error(self, timeout: float) -> Exception:
        """Return the error for an attempt that was stopped after `timeout` seconds."""
        prefix, attempt_timeout = f"{self.config.operation}: ", self.policy.attempt_timeout
        if attempt_timeout is None or timeout < attempt_timeout:  # the deadline was earlier
            msg = f"{prefix}the deadline passed during attempt {self.attempts}"
            return errors.DeadlineExceeded(msg)
        limit = format_duration(attempt_timeout)
        return errors.AttemptTimeout(f"{prefix}attempt {self.attempts} took longer than {limit}")

    def wait_for_limiter(self, attempt: Attempt) -> Attempt:
        """Block until an attempt that a rate limiter delays can be sent; return it."""
        while step := self.next_delay_step(effects.now()):
            blocking_wait(self.config, step, None)
        return attempt if attempt.timeout is None else self.delayed_attempt()

    async def async_wait_for_limiter(self, attempt: Attempt) -> Attempt:
        """Like `wait_for_limiter`, but sleep on the event loop instead of blocking."""
        while step := self.next_delay_step(effects.now()):
            await effects.async_sleep(step)
        return attempt if attempt.timeout is None else self.delayed_attempt()

    def wait(self) -> None:
        """Block until the next attempt is due."""
        wait_started = effects.now() if self._emits_events else None
        try:
            if self.config.on_retry is not None:
                call_on_retry(self.config.on_retry, self._will_wait_event())
            blocking_wait(self.config, self._wait.delay, self._error)
        except BaseException as error:
            if error is self._error:  # the wait would block an event loop
                self._stop_reason = Reason.RETRIES_OFF  # so that a fallback is returned
            self._abandon_wait()
            raise
        if wait_started is not None:
            self._emit_waited(wait_started)

    async def async_wait(self) -> None:
        """Like `wait`, but sleep on the event loop instead of blocking."""
        wait_started = effects.now() if self._emits_events else None
        try:
            if self.config.on_retry is not None:
                await call_on_retry_async(self.config.on_retry, self._will_wait_event())
            if self._wait.delay > 0:
                await effects.async_sleep(self._wait.delay)
        except BaseException:
            self._abandon_wait()
            raise
        if wait_started is not None:
            self._emit_waited(wait_started)

    def _abandon_wait(self) -> None:
        """Refund the cost of the retry that will not be made."""
        self._error = None
        if self.downstream is not None:
            self.refund_retry(effects.now())

    def _append_to_recordings(self, stop: Stop | None) -> None:
        """Add the record of this call, which has ended, to the blocks that record their calls."""
        if self.config.downstream is None or self.config.downstream.listener is None:
            for records in scopes.recordings():
                records.append(self._call_record(stop))

    @property
    def has_given_up(self) -> bool:
        """Whether the call has ended with an error that is not permanent: see `fallback_result`."""
        return getattr(self, "_stop_reason", Reason.PERMANENT) is not Reason.PERMANENT

    def _record_give_up(self, stop: Stop, error: Exception) -> None:
        self._stop_reason = stop.reason
        call_record = self._call_record(stop)
        if _get_scope() is not None:
            self._append_to_recordings(stop)
        attach_record_and_note(
            error,
            call_record,
            self._last_record_number,
            no_outer_retry=forbids_outer_retry(stop, self.attempts, self.policy.max_attempts),
            check_traceback=self._checks_traceback,
        )
        if self._emits_events or bus.is_observed():
            if stop.reason is Reason.BUDGET_EMPTY:
                import tarry.core.events as event

                self._emit(event.BudgetEmpty(call_record.operation, call_record.downstream))
            detail = "" if isinstance(error, errors.Rejected) else self._last_detail
            detail = detail or type(error).__name__
            self._emit(gave_up_event(call_record, stop, error, detail))

    def _call_record(self, stop: Stop | None) -> CallRecord:
        """Return the record of this call; `stop` is None if it has succeeded."""
        call_fields = self.config.operation, self._downstream_name, self.attempts
        reason, retry_after, _ = stop or (None, None, None)
        return CallRecord(*call_fields, self.waited, reason, retry_after, self.steps)

    @property
    def _downstream_name(self) -> str | None:
        return None if self.downstream is None else self.downstream.name

    @property
    def _max_attempts(self) -> int | None:
        """The maximum number of attempts for events; None if it is not limited."""
        limit = self.policy.max_attempts
        return None if limit == UNLIMITED_ATTEMPTS else limit

    @property
    def _last_detail(self) -> str:
        """A description of the last failed attempt; "" if no attempt has failed."""
        steps = self.steps
        return steps[-1].detail if steps else ""

    # `tarry.core.events` is imported where it is used, so that programs without failures and
    # listeners do not load it. `from tarry.core import events` would take 1.0 us longer.

    def _stamp(self, event: E) -> E:
        """Set the fields that all events of calls have: the id of the call and the time."""
        self._call_id = self._call_id or bus.new_call_id()
        return stamp(event, self._call_id)

    def _attempt_duration(self) -> float | None:
        """Return how long the attempt took; None if its start was not measured."""
        started: float | None = getattr(self, "_attempt_started", None)
        return None if started is None else max(0.0, effects.now() - started)

    def _emit(self, event: Event, *, is_logged: bool = True) -> None:
        """Pass an event to the downstream's listener, or else to the log and all listeners."""
        self._stamp(event)
        downstream = self.config.downstream
        if downstream is None or downstream.listener is None:
            bus.emit(event, is_logged=is_logged)
        else:
            downstream.listener(event)

    def _emit_started(self) -> None:
        import tarry.core.events as event

        operation, limit = self.config.operation, self._max_attempts
        self._emit(event.AttemptStarted(operation, self._downstream_name, self.attempts, limit))

    def _emit_failed(self, outcome: Outcome, verdict: Wait | Stop, error: Exception | None) -> None:
        """Emit that an attempt failed and, if a retry follows, that the call will wait."""
        import tarry.core.events as event

        name, number, limit = self._downstream_name, self.attempts, self._max_attempts
        operation, kind, detail = self.config.operation, outcome.kind, outcome.detail
        detail = detail or type(error).__name__
        attempt_fields = operation, name, number, limit, kind, error
        duration = self._attempt_duration()
        delay = verdict.delay if isinstance(verdict, Wait) else None
        self._emit(
            event.AttemptFailed(*attempt_fields, detail=detail, duration=duration, delay=delay)
        )
        if isinstance(verdict, Wait):
            ceiling, delay, hint = verdict.ceiling, verdict.delay, verdict.hint
            retry_fields = operation, name, number, None if limit is None else limit - 1
            will_wait = event.WillWait(*retry_fields, ceiling, delay, hint, error, detail=detail)
            self._emit(will_wait, is_logged=not self.config.logs_retries)

    def _will_wait_event(self) -> WillWait:
        import tarry.core.events as event

        return self._stamp(event.WillWait(*self._wait_fields, detail=self._last_detail))

    def _emit_waited(self, wait_started: float) -> None:
        import tarry.core.events as event

        slept = effects.now() - wait_started
        self._emit(event.Waited(*self._wait_fields, slept, detail=self._last_detail))

    @property
    def _wait_fields(
        self,
    ) -> tuple[str, str | None, int, int | None, float, float, Hint | None, Exception | None]:
        """The fields that the events before and after the current wait have in common."""
        call_fields = self.config.operation, self._downstream_name, self.attempts
        wait, limit = self._wait, self._max_attempts
        max_retries = None if limit is None else limit - 1
        return *call_fields, max_retries, wait.ceiling, wait.delay, wait.hint, self._error


class RunningBlockCall(RunningCall):
    """A call whose attempts are `with` blocks, not functions that a driver calls."""

    __slots__ = ()

    _checks_traceback = False  # the error of a `with` block passes no driver function

    def __del__(self) -> None:
        """Release the permit of an attempt whose `with` block was entered but never left."""
        self.release_permit_in_finalizer()

    def release_permit_in_finalizer(self) -> None:
        """Put the attempt's permit into `abandoned_permits`; the next `admit` will release it.

        A finalizer must not acquire the downstream's lock: its thread may already hold the lock.
        """
        try:
            downstream, permit = self.config.downstream, self.take_permit()
        except AttributeError:  # `__init__` was interrupted
            return
        if downstream is not None and (permit is not None or self._attempt_id):
            downstream.abandoned_permits.append((permit, self._attempt_id))


def decide_after_first_failure(
    config: RetryConfig, error: Exception, last_record_number: int
) -> RunningCall | FirstFailure | None:
    """Decide whether a call without a downstream continues after its first attempt has failed.

    Returns None if the driver must raise the error, else a `RunningCall` or a `FirstFailure`. Most
    calls succeed at the second attempt. If no listener, log or `on_retry` needs events, a
    `RunningCall` is therefore created only after two failed attempts: a call with one failure takes
    1.7 us, with a `RunningCall` it would take 2.9 us (a hand-written loop: 0.6 us).
    """
    is_log_enabled = bus.is_log_enabled
    outcome = None
    if (
        not bus.listeners
        and config.on_retry is None
        and process_settings.max_attempts is None
        and not is_log_enabled(LOG_WARNING)
    ):
        classify = config.classify_error
        outcome = classify(error, last_record_number)
        random_number = (config.draw_random or effects.draw_random)()
        verdict = decide(config.policy, _AFTER_ONE_ATTEMPT, outcome, 0.0, random_number)
        if isinstance(verdict, Wait):
            return outcome, type(error).__name__, verdict
    running = RunningCall(config, None, None, last_record_number)
    running.attempts = 1
    return running if running.try_continue(error, outcome) else None


def _is_own_timeout(error: Exception) -> bool:
    """Return whether the timeout of this call, and not of an inner call, ended the attempt."""
    return isinstance(error, errors.AttemptTimeout) and not hasattr(error, RECORD_ATTRIBUTE)


def blocking_wait(config: RetryConfig, delay: float, error: Exception | None) -> None:
    """Sleep; raise if the sleep would block an event loop, or if it is cancelled."""
    if delay > 0:
        is_allowed = config.allows_blocking
        if is_allowed is None:
            is_allowed = process_settings.allows_blocking
        if not is_allowed and event_loops.in_event_loop():
            _raise_instead_of_wait(config, delay, error)
        sleep = effects.blocking_sleep
        sleep(delay, config.cancel)
    if config.cancel is not None and config.cancel.cancelled:
        msg = f"{config.operation}: cancelled while waiting for the next attempt"
        raise errors.Cancelled(msg) from error


def _raise_instead_of_wait(config: RetryConfig, delay: float, error: Exception | None) -> Never:
    """Raise the error of the last attempt, with a note, because a wait would block an event loop.

    Raise a `BlockingWait` if no attempt has failed (the wait is that of a rate limiter), and for an
    adapter, which returns a response instead of raising an error.
    """
    wait = f"a wait of {format_duration(delay)} would block the running event loop"
    advice = (
        f'{config.blocking_wait_advice}; or let it block the loop, with blocking="allow" or, for '
        'the whole process, tarry.configure(blocking="allow")'
    )
    is_adapter = config.release_connection is not None
    if error is not None and not is_adapter:
        error.add_note(f"tarry: {config.operation} was not retried, because {wait}; {advice}")
        raise error
    failure = ""
    if isinstance(error, errors.ResultNotAccepted):
        status = str(error).removeprefix(f"{config.operation}: ")
        failure = f"the attempt failed with {status}, and "
    elif error is not None:
        # Only the type: the text of the error may contain secrets, and it is the cause.
        failure = f"the attempt failed with {type(error).__name__}, and "
    raise errors.BlockingWait(f"{config.operation}: {failure}{wait}; {advice}") from error


def fallback_result(fallback: Any, error: Exception) -> Any:
    """Return the result of a call that was given up with `error`, as `fallback` specifies.

    Not used for a permanent error: it may be a bug, which a fallback would hide.
    """
    return fallback(error) if callable(fallback) else fallback


async def fallback_result_async(fallback: Any, error: Exception) -> Any:
    """Like `fallback_result`; if the fallback returns an awaitable, await it."""
    result = fallback_result(fallback, error)
    return await result if callable(fallback) and hasattr(result, "__await__") else result


def gave_up_event(
    call_record: CallRecord, stop: Stop, error: Exception | None, detail: str
) -> GaveUp:
    """Return the event for a call that was given up; `error` is None if it returns a result."""
    import tarry.core.events as event

    call_fields = call_record.operation, call_record.downstream, call_record.attempts
    reason, retry_after, hint = stop
    waited = call_record.waited
    return event.GaveUp(*call_fields, reason, waited, retry_after, hint, error, detail=detail)


def rejection_error(
    stop: Stop, operation: str, downstream: Downstream | None, last_failure: str = ""
) -> errors.Rejected:
    """Return the error for a rejected attempt; `last_failure` is how the one before it failed."""
    name = None if downstream is None else downstream.name
    delay = "" if stop.retry_after is None else f"; retry after {format_duration(stop.retry_after)}"
    failure = f"; the last attempt failed with {last_failure}" if last_failure else ""
    msg = f"{name or operation}: {stop.reason.description}{delay}{failure}"
    error_class = _REJECTION_CLASSES.get(stop.reason, errors.Rejected)
    error = error_class(msg, downstream=name, retry_after=stop.retry_after)
    cause = None if downstream is None else downstream.last_error
    if cause is not None and stop.reason is Reason.BREAKER_OPEN:
        error.__cause__ = cause
    return error
