"""One call as every driver runs it: the core's `Call` with clock, dice, lock, events and marks.

    run.begin_attempt()           begin an attempt, or raise
    run.survives(error)   True: wait and begin again; False: raise the error
    run.accepts(result)   True: return the result; False: wait and begin again
    run.discard_error()          the result that was not accepted is gone
    run.abort()            the call is left early: give back what it holds
    run.wait(), await_()  the wait between two attempts

Drivers differ only in how they call the function and which wait they use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tarry.core.call import Call
from tarry.core.decide import decide
from tarry.core.durations import format_duration
from tarry.core.outcome import TRANSIENT, Kind
from tarry.core.verdict import CallRecord, Reason, Stop, Wait, is_final
from tarry.errors import (
    AttemptTimeout,
    BlockingWait,
    BreakerOpen,
    Cancelled,
    DeadlineExceeded,
    LimitReached,
    Rejected,
    ResultNotAccepted,
)
from tarry.runtime import deadlines, event_loops
from tarry.runtime.clocks import system
from tarry.runtime.error_record import add_note, attach_record, has_record_since
from tarry.runtime.events import LOG_WARNING, bus

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Self

    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy
    from tarry.core.verdict import Attempt
    from tarry.runtime.config import RetryConfig

FirstFailure: TypeAlias = "tuple[Outcome, str, Wait]"
"""What a first failure came to: its outcome, its name and the verdict."""

_REJECTIONS: dict[Reason, type[Rejected]] = {
    Reason.BREAKER_OPEN: BreakerOpen,
    Reason.LIMIT: LimitReached,
    Reason.DEADLINE: DeadlineExceeded,
    Reason.TOTAL_BUDGET: DeadlineExceeded,
}


class RunningCall(Call):
    """The live state of one call. It is a `Call` and not beside one: a failure makes one object."""

    __slots__ = ("_clocked", "_error", "_serial", "_wait", "_watched", "config")

    _block = False
    """Whether the attempts are blocks of the user's, not calls of ours."""
    _wait: Wait

    def __init__(
        self, config: RetryConfig, started: float | None, deadline: float | None, serial: int
    ) -> None:
        cap = system.max_attempts
        policy = config.policy if cap is None else _capped(config.policy, cap)
        Call.__init__(self, policy, config.downstream, started or 0.0, deadline)
        self.config: RetryConfig = config
        self._clocked = started is not None
        self._serial = serial
        self._error: Exception | None = None
        self._watched = False

    @classmethod
    def new(cls, config: RetryConfig) -> Self:
        """Prepare a call."""
        now = system.now()
        if config.deadline is None:
            deadline = deadlines.current()
        else:
            deadline = deadlines.earliest(now + config.deadline)
        return cls(config, now, deadline, 0)

    @classmethod
    def after_first_attempt(
        cls, config: RetryConfig, started: float, serial: int, permit: int
    ) -> Self:
        """Go on after a first attempt that was made without a run."""
        run = cls(config, started, None, serial)
        run.adopt_first_attempt(permit)
        return run

    def begin_attempt(self) -> Attempt:
        """Begin the next attempt, or raise: a rejection at first, the last error later."""
        command = self.start(system.now() if self._clocked else 0.0)
        error, self._error = self._error, None  # its traceback holds us: leave no cycle behind
        if isinstance(command, Stop):
            if error is None:
                name = None if self.downstream is None else self.downstream.name
                last = self.steps[-1].detail if self.attempts else ""
                error = rejection_error(command, self.config.operation, name, last)
            self._give_up(command, error)
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: leave no cycle behind
        self._serial = bus.serial
        if bus.listeners or self._watched:
            _emit().emit_started(self.config.operation, self)
        return command

    def should_retry(self, error: Exception, outcome: Outcome | None = None) -> bool:
        """Say whether the call goes on after this error; classify it where that is not done."""
        try:
            return self._decide(error, outcome)
        except BaseException:  # of the user's predicate, dice, jitter or budget
            self.abort()
            raise

    def _decide(self, error: Exception, outcome: Outcome | None) -> bool:
        config = self.config
        if outcome is None:
            classify = config.classify_error
            outcome = classify(error, self._serial)
        now = system.now() if self._clocked else 0.0
        u = (config.draw or system.draw)()
        verdict = self.record_failure(outcome, now, u, type(error).__name__)
        log_enabled = bus.log_enabled
        if bus.listeners or log_enabled(LOG_WARNING):
            if not self._watched and not bus.listeners:  # it began before there was trouble
                _emit().emit_started(config.operation, self)
            self._watched = True
            _emit().emit_failed(config.operation, self, outcome, verdict, error)
        if isinstance(verdict, Stop):
            self._give_up(verdict, error)
            return False
        self._wait = verdict
        self._error = error
        return True

    def accepts(self, result: object) -> bool:
        """Say whether the call is over with this result."""
        classify_result = self.config.classify_result
        if classify_result is not None:
            outcome = classify_result(result)
            if outcome.kind is Kind.PERMANENT:
                self._answered(outcome)
                return True
            if outcome.kind is not Kind.SUCCESS:
                return self._refuses(result, outcome, outcome.detail)
        until = self.config.until
        if until is not None and not until(result):
            return self._refuses(result, TRANSIENT, "no result that `until` accepts")
        if self.downstream is not None:
            self.record_success(system.now(), (self.config.draw or system.draw)())
        if bus.listeners or self._watched:
            _emit().emit_succeeded(self.config.operation, self)
        return True

    def _answered(self, outcome: Outcome) -> None:
        """End with an answer that is no success, and that no attempt would change: a 404."""
        verdict = self.record_failure(outcome, system.now(), (self.config.draw or system.draw)())
        if isinstance(verdict, Stop) and (bus.listeners or self._watched):
            _emit().emit_failed(self.config.operation, self, outcome, verdict, None)
            _emit().emit_gave_up(self.config.operation, self, verdict, None)

    def _refuses(self, result: object, outcome: Outcome, why: str) -> bool:
        """Treat a result as a failure: False to go on, or raise it wrapped in an error."""
        error = ResultNotAccepted(f"{self.config.operation}: {why}", result)
        if self.should_retry(error, outcome):
            return False
        try:
            raise error
        finally:
            del error

    def discard_error(self) -> None:
        """The last result is gone: if no attempt follows, the call ends with a rejection."""
        self._error = None

    def abort(self) -> None:
        """Give back what the call still holds; drivers do so whenever they are left early."""
        if self.downstream is not None:
            self.cancel_attempt(system.now())

    def timeout_error(self, timeout: float) -> Exception:
        """Return the error for an attempt that was cut off after so many seconds."""
        operation, number = self.config.operation, self.attempts
        limit = self.policy.attempt_timeout
        if limit is None or timeout < limit:  # what was left before the deadline
            return DeadlineExceeded(f"{operation}: the deadline passed during attempt {number}")
        return AttemptTimeout(
            f"{operation}: attempt {number} took longer than {format_duration(limit)}"
        )

    def wait(self, hold: float | None = None) -> None:
        """Block until the next attempt is due, or one that has begun may go (`hold` seconds)."""
        delay = self._wait.delay if hold is None else hold
        began = system.now() if self._watched else None
        try:
            blocking_wait(self.config, delay, self._error)
        except BaseException:
            self._error = None
            if hold is None and self.downstream is not None:
                self.refund_retry(system.now())
            raise
        if began is not None and hold is None:
            self._awake(began)

    async def async_wait(self, hold: float | None = None) -> None:
        """Do what `wait` does, on the event loop."""
        delay = self._wait.delay if hold is None else hold
        began = system.now() if self._watched else None
        try:
            if delay > 0:
                await system.async_sleep(delay)
        except BaseException:
            self._error = None
            if hold is None and self.downstream is not None:
                self.refund_retry(system.now())
            raise
        if began is not None and hold is None:
            self._awake(began)

    def _give_up(self, stop: Stop, error: Exception) -> None:
        name = None if self.downstream is None else self.downstream.name
        record = CallRecord(
            self.config.operation,
            name,
            self.attempts,
            self.waited,
            stop.reason,
            stop.retry_after,
            self.steps,
        )
        if not has_record_since(error, self._serial):  # else the inner record says more
            final = is_final(stop, self.attempts, self.policy.max_attempts)
            attach_record(error, record, final=final, block=self._block)
        add_note(error, record)
        if self._watched or bus.is_observed():
            _emit().emit_gave_up(self.config.operation, self, stop, error)

    def _awake(self, began: float) -> None:
        slept = system.now() - began
        _emit().emit_waited(self.config.operation, self, self._wait, slept, self._error)


class RunningBlock(RunningCall):
    """A call whose attempts are blocks."""

    __slots__ = ()

    _block = True

    def __del__(self) -> None:
        """Leave what a block holds that was never left."""
        self.release_permit_in_finalizer()

    def release_permit_in_finalizer(self) -> None:
        """Leave the permit for the next to find, from a finalizer.

        It may run while the lock is held, by this very thread: it may not wait for it.
        """
        shared, permit = self.config.downstream, self.take_permit()
        if shared is not None and permit is not None:
            shared.abandoned_permits.append(permit)


def decide_after_first_failure(
    config: RetryConfig, error: Exception, serial: int
) -> RunningCall | FirstFailure | None:
    """Judge the first failure of a plain call: go on with the run, wait unheard, or (None) raise.

    Most calls succeed at their second attempt. Where nobody listens, no state is made for them
    before that.
    """
    log_enabled = bus.log_enabled
    outcome = None
    if not bus.listeners and system.max_attempts is None and not log_enabled(LOG_WARNING):
        classify = config.classify_error
        outcome = classify(error, serial)
        first = config.first
        if first is None:
            config.first = first = RunningCall(config, None, None, 0)
            first.attempts = 1
        verdict = decide(config.policy, first, outcome, 0.0, (config.draw or system.draw)())
        if isinstance(verdict, Wait):
            return outcome, type(error).__name__, verdict
    run = RunningCall(config, None, None, serial)
    run.attempts = 1
    return run if run.should_retry(error, outcome) else None


def blocking_wait(config: RetryConfig, delay: float, error: Exception | None) -> None:
    """Wait, unless that would freeze an event loop or a cancel token ends it."""
    if delay > 0:
        if event_loops.in_event_loop():
            msg = (
                f"{config.operation}: a wait of {format_duration(delay)} would block the running "
                "event loop; make it an async def (a block: async for), or run it in a thread"
            )
            raise BlockingWait(msg) from error
        sleep = system.sleep
        sleep(delay, config.cancel)
    if config.cancel is not None and config.cancel.cancelled:
        msg = f"{config.operation}: cancelled while waiting for the next attempt"
        raise Cancelled(msg) from error


def _emit() -> ModuleType:
    """Return the module that makes events, which loads when somebody listens."""
    from tarry.runtime import emit

    return emit


def rejection_error(stop: Stop, operation: str, downstream: str | None, last: str = "") -> Rejected:
    """Return a new error for a call that was not let through, after a `last` answer or none."""
    after = "" if stop.retry_after is None else f"; retry after {format_duration(stop.retry_after)}"
    answered = f"; the last answer was {last}" if last else ""
    msg = f"{downstream or operation}: {stop.reason.description}{after}{answered}"
    kind = _REJECTIONS.get(stop.reason, Rejected)
    return kind(msg, downstream=downstream, retry_after=stop.retry_after)


def _capped(policy: Policy, most: int) -> Policy:
    return policy if policy.max_attempts <= most else policy.replace(max_attempts=most)
