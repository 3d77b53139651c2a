"""The state of a call that a driver runs: the core's `Call` with clock, random numbers and events.

A driver is the loop that makes the attempts of a call. It calls `begin_attempt`, makes the attempt,
and passes its error to `try_continue` or its result to `try_finish`. If the call continues, the
driver calls `wait` or `async_wait` and begins the next attempt. If a limiter admits an attempt only
after a delay, `begin_attempt` returns that delay, and the driver sleeps before the attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tarry import errors
from tarry.core.call import Call
from tarry.core.decide import decide
from tarry.core.outcome import TRANSIENT, Kind
from tarry.core.text import format_duration
from tarry.core.verdict import CallRecord, Reason, Stop, Wait, forbids_outer_retry
from tarry.runtime import clocks, deadlines
from tarry.runtime.clocks import environment
from tarry.runtime.error_record import attach_record_and_note
from tarry.runtime.events import LOG_WARNING, bus

if TYPE_CHECKING:
    from typing import Self

    from tarry.core.hints import Hint
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import Attempt
    from tarry.runtime.config import RetryConfig

FirstFailure: TypeAlias = "tuple[Outcome, str, Wait]"
"""The outcome of a failed first attempt, the type name of its error, and the wait that follows."""

_REJECTION_CLASSES: dict[Reason, type[errors.Rejected]] = {
    Reason.BREAKER_OPEN: errors.BreakerOpen,
    Reason.LIMIT: errors.LimitReached,
    Reason.DEADLINE: errors.DeadlineExceeded,
    Reason.TOTAL_BUDGET: errors.DeadlineExceeded,
}


class RunningCall(Call):
    """The state of one call while a driver runs it.

    It is a subclass of `Call`, so that a failure allocates one object instead of two.
    """

    __slots__ = ("_emits_events", "_error", "_record_count", "_uses_clock", "_wait", "config")

    _is_block = False
    """Whether the attempts are `with` blocks, not calls of a function."""
    _wait: Wait

    def __init__(
        self, config: RetryConfig, started: float | None, deadline: float | None, record_count: int
    ) -> None:
        """Prepare a call; `started` is None if the call has no time limit and needs no clock."""
        policy, limit = config.policy, environment.max_attempts
        if limit is not None and policy.max_attempts > limit:
            policy = policy.replace(max_attempts=limit)
        Call.__init__(self, policy, config.downstream, started or 0.0, deadline)
        self.config: RetryConfig = config
        self._uses_clock = started is not None
        self._record_count = record_count
        """The newest error record's number when the attempt began; see `error_record`."""
        self._error: Exception | None = None
        """The error of the last attempt, while the call waits for the next one."""
        self._emits_events = False
        """True after the event of a failed attempt: all later events are then emitted too."""

    @classmethod
    def new(cls, config: RetryConfig) -> Self:
        """Return a new call that starts now."""
        now = environment.now()
        if config.deadline is None:
            deadline = deadlines.current()
        else:
            deadline = deadlines.cap_at_deadline(now + config.deadline)
        return cls(config, now, deadline, 0)

    @classmethod
    def after_first_attempt(
        cls, config: RetryConfig, started: float, record_count: int, permit: int
    ) -> Self:
        """Return a call whose first attempt, with this permit, was made without a `RunningCall`."""
        running = cls(config, started, None, record_count)
        running.adopt_first_attempt(permit)
        return running

    def begin_attempt(self) -> Attempt:
        """Begin the next attempt; if it is rejected, raise the last error or a `Rejected`."""
        command = self.start(environment.now() if self._uses_clock else 0.0)
        # The error's traceback refers to this object: break the reference cycle.
        error, self._error = self._error, None
        if isinstance(command, Stop):
            if error is None:
                name, last_failure = self._downstream_name, self._last_detail
                error = rejection_error(command, self.config.operation, name, last_failure)
            self._record_give_up(command, error)
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the reference cycle
        self._record_count = bus.record_count
        if bus.listeners or self._emits_events:
            self._emit_started()
        return command

    def try_continue(self, error: Exception, outcome: Outcome | None = None) -> bool:
        """Record a failed attempt; return whether another follows. By default classify `error`."""
        config = self.config
        try:
            if outcome is None:
                classify = config.classify_error  # calling the slot is slower: see `Environment`
                outcome = classify(error, self._record_count)
            now = environment.now() if self._uses_clock else 0.0
            random_number = (config.draw_random or environment.draw_random)()
            verdict = self.record_failure(outcome, now, random_number, type(error).__name__)
            log_enabled = bus.log_enabled
            if bus.listeners or log_enabled(LOG_WARNING):
                # Without listeners, the start of the attempt was not emitted: emit it for the log.
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

    def try_finish(self, result: object) -> bool:
        """Record the result of an attempt; return whether the call ends with this result.

        A permanent failure, such as a 404, also ends the call with its result. Raises
        `ResultNotAccepted` if the result is a failure and no attempt follows.
        """
        classify_result = self.config.classify_result
        if classify_result is not None:
            outcome = classify_result(result)
            if outcome.kind is Kind.PERMANENT:
                random_number = (self.config.draw_random or environment.draw_random)()
                verdict = self.record_failure(outcome, environment.now(), random_number)
                if isinstance(verdict, Stop) and (bus.listeners or self._emits_events):
                    self._emit_failed(outcome, verdict, None)
                    emit_gave_up(self._call_record(verdict), verdict.hint, None, self._last_detail)
                return True
            if outcome.kind is not Kind.SUCCESS:
                return self._reject_result(result, outcome, outcome.detail)
        until = self.config.until
        if until is not None and not until(result):
            return self._reject_result(result, TRANSIENT, "`until` did not accept the result")
        if self.downstream is not None:
            random_number = (self.config.draw_random or environment.draw_random)()
            self.record_success(environment.now(), random_number)
        if bus.listeners or self._emits_events:
            import tarry.core.events as event

            operation, name = self.config.operation, self._downstream_name
            bus.emit(event.Succeeded(operation, name, self.attempts))
        return True

    def _reject_result(self, result: object, outcome: Outcome, problem: str) -> bool:
        """Record a result as a failure; raise `ResultNotAccepted`, or return False for a retry."""
        error = errors.ResultNotAccepted(f"{self.config.operation}: {problem}", result)
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
        """Release the permit of a running attempt. Drivers call this before they raise."""
        if self.downstream is not None:
            self.cancel_attempt(environment.now())

    def timeout_error(self, timeout: float) -> Exception:
        """Return the error for an attempt that was stopped after `timeout` seconds."""
        operation, number, limit = self.config.operation, self.attempts, self.policy.attempt_timeout
        if limit is None or timeout < limit:  # the deadline was earlier than the attempt timeout
            return errors.DeadlineExceeded(
                f"{operation}: the deadline passed during attempt {number}"
            )
        msg = f"{operation}: attempt {number} took longer than {format_duration(limit)}"
        return errors.AttemptTimeout(msg)

    def wait(self) -> None:
        """Block until the next attempt is due."""
        wait_started = environment.now() if self._emits_events else None
        try:
            blocking_wait(self.config, self._wait.delay, self._error)
        except BaseException:
            self._abandon_wait()
            raise
        if wait_started is not None:
            self._emit_waited(wait_started)

    async def async_wait(self) -> None:
        """Like `wait`, but sleep on the event loop instead of blocking."""
        wait_started = environment.now() if self._emits_events else None
        try:
            if self._wait.delay > 0:
                await environment.async_sleep(self._wait.delay)
        except BaseException:
            self._abandon_wait()
            raise
        if wait_started is not None:
            self._emit_waited(wait_started)

    def _abandon_wait(self) -> None:
        self._error = None
        if self.downstream is not None:
            self.refund_retry(environment.now())

    def _record_give_up(self, stop: Stop, error: Exception) -> None:
        record = self._call_record(stop)
        attach_record_and_note(
            error,
            record,
            self._record_count,
            no_outer_retry=forbids_outer_retry(stop, self.attempts, self.policy.max_attempts),
            check_traceback=not self._is_block,  # the error of a block passes no driver function
        )
        if self._emits_events or bus.is_observed():
            if stop.reason is Reason.BUDGET_EMPTY:
                import tarry.core.events as event

                bus.emit(event.BudgetEmpty(record.operation, record.downstream))
            detail = "" if isinstance(error, errors.Rejected) else self._last_detail
            emit_gave_up(record, stop.hint, error, detail or type(error).__name__)

    def _call_record(self, stop: Stop) -> CallRecord:
        call_fields = self.config.operation, self._downstream_name, self.attempts
        return CallRecord(*call_fields, self.waited, stop.reason, stop.retry_after, self.steps)

    @property
    def _downstream_name(self) -> str | None:
        return None if self.downstream is None else self.downstream.name

    @property
    def _last_detail(self) -> str:
        """A description of the last failed attempt; "" if no attempt has failed."""
        steps = self.steps
        return steps[-1].detail if steps else ""

    # `tarry.core.events` is imported where it is used, so that programs without failures and
    # listeners do not load it. `from tarry.core import events` would take 1.0 us longer.

    def _emit_started(self) -> None:
        import tarry.core.events as event

        operation, limit = self.config.operation, self.policy.max_attempts
        bus.emit(event.AttemptStarted(operation, self._downstream_name, self.attempts, limit))

    def _emit_failed(self, outcome: Outcome, verdict: Wait | Stop, error: Exception | None) -> None:
        """Emit that an attempt failed and, if a retry follows, that the call will wait."""
        import tarry.core.events as event

        name, number, limit = self._downstream_name, self.attempts, self.policy.max_attempts
        operation, kind, detail = self.config.operation, outcome.kind, outcome.detail
        detail = detail or type(error).__name__
        bus.emit(event.AttemptFailed(operation, name, number, limit, kind, error, detail=detail))
        if isinstance(verdict, Wait):
            ceiling, delay, hint = verdict.ceiling, verdict.delay, verdict.hint
            retry_fields = operation, name, number, limit - 1
            bus.emit(event.WillWait(*retry_fields, ceiling, delay, hint, error, detail=detail))

    def _emit_waited(self, wait_started: float) -> None:
        import tarry.core.events as event

        slept = environment.now() - wait_started
        call_fields = self.config.operation, self._downstream_name, self.attempts
        max_retries, error, wait = self.policy.max_attempts - 1, self._error, self._wait
        wait_fields = wait.ceiling, wait.delay, wait.hint
        detail = self._last_detail
        bus.emit(event.Waited(*call_fields, max_retries, *wait_fields, error, slept, detail=detail))


class RunningBlock(RunningCall):
    """A call whose attempts are `with` blocks."""

    __slots__ = ()

    _is_block = True

    def __del__(self) -> None:
        """Release the permit of an attempt whose `with` block was entered and never left."""
        self.release_permit_in_finalizer()

    def release_permit_in_finalizer(self) -> None:
        """Put the permit into `abandoned_permits`; the downstream's next `admit` releases it.

        A finalizer must not acquire the downstream's lock: its thread may already hold the lock.
        """
        downstream, permit = self.config.downstream, self.take_permit()
        if downstream is not None and permit is not None:
            downstream.abandoned_permits.append(permit)


def decide_after_first_failure(
    config: RetryConfig, error: Exception, record_count: int
) -> RunningCall | FirstFailure | None:
    """Decide whether a call without a downstream continues after its first attempt has failed.

    Returns a `RunningCall` or a `FirstFailure` if the driver must wait and retry, and None if it
    must raise the error. Most of these calls succeed at the second attempt. If neither a listener
    nor the log needs events, a `RunningCall` is therefore created only after two failed attempts.
    """
    log_enabled = bus.log_enabled
    outcome = None
    if not bus.listeners and environment.max_attempts is None and not log_enabled(LOG_WARNING):
        classify = config.classify_error
        outcome = classify(error, record_count)
        # All calls share one object: they are equal after one attempt, and `decide` only reads it.
        call = config.state_after_one_attempt
        if call is None:
            config.state_after_one_attempt = call = RunningCall(config, None, None, 0)
            call.attempts = 1
        random_number = (config.draw_random or environment.draw_random)()
        verdict = decide(config.policy, call, outcome, 0.0, random_number)
        if isinstance(verdict, Wait):
            return outcome, type(error).__name__, verdict
    running = RunningCall(config, None, None, record_count)
    running.attempts = 1
    return running if running.try_continue(error, outcome) else None


def blocking_wait(config: RetryConfig, delay: float, error: Exception | None) -> None:
    """Sleep; raise, from `error`, if that would block an event loop or the call is cancelled."""
    if delay > 0:
        if clocks.in_event_loop():
            raise errors.BlockingWait(
                f"{config.operation}: a wait of {format_duration(delay)} would block the running "
                "event loop; retry a coroutine function (a block: `async for`), or use a thread"
            ) from error
        sleep = environment.blocking_sleep
        sleep(delay, config.cancel)
    if config.cancel is not None and config.cancel.cancelled:
        msg = f"{config.operation}: cancelled while waiting for the next attempt"
        raise errors.Cancelled(msg) from error


def emit_gave_up(
    record: CallRecord, hint: Hint | None, error: Exception | None, detail: str
) -> None:
    """Emit that a call was given up; `error` is None if it returns a permanent failure."""
    import tarry.core.events as event

    operation, downstream, attempts, waited, reason, retry_after, _steps = record
    call_fields = operation, downstream, attempts
    bus.emit(event.GaveUp(*call_fields, reason, waited, retry_after, hint, error, detail=detail))


def rejection_error(
    stop: Stop, operation: str, downstream: str | None, last_failure: str = ""
) -> errors.Rejected:
    """Return the error for a rejected call; `last_failure` describes its last attempt, if any."""
    after = "" if stop.retry_after is None else f"; retry after {format_duration(stop.retry_after)}"
    last_failure_text = f"; the last attempt failed with {last_failure}" if last_failure else ""
    msg = f"{downstream or operation}: {stop.reason.description}{after}{last_failure_text}"
    error_class = _REJECTION_CLASSES.get(stop.reason, errors.Rejected)
    return error_class(msg, downstream=downstream, retry_after=stop.retry_after)
