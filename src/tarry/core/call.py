"""The state machine of one call: when an attempt starts, how long to wait, when the call ends.

A driver is the code that makes the attempts and sleeps between them. It calls `start` for the first
attempt and again after each wait, and reports the end of an attempt with `record_success`,
`record_failure` or `cancel_attempt`. It carries out what `start` and `record_failure` return: an
`Attempt`, or a verdict (`Wait` or `Stop`).

A `DurableCall` is a call of the retry service. Its state is stored, so that the call outlives the
process. When the downstream (breaker, retry budget and limiters of one dependency) rejects an
attempt, a `Call` ends, because its caller is waiting. A `DurableCall` is *deferred*: it tries to
start the same attempt later, and uses up neither an attempt nor a token of the retry budget. The
retry of a `DurableCall` may be due much later, so the downstream is checked just before each
attempt and not after a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tarry.core.decide import decide
from tarry.core.outcome import SUCCESS, TRANSIENT, Outcome
from tarry.core.verdict import Attempt, DelayedPermit, Progress, Reason, Step, Stop, Wait

if TYPE_CHECKING:
    from tarry.core.downstream import Downstream
    from tarry.core.policy import Policy

_MAX_STEPS = 256
"""The decision record (`Call.steps`) is cleared every 256 attempts, to save memory."""

_MIN_DELAY_STEP_S, _MAX_DELAY_STEP_S = 0.02, 0.5  # see `Call.next_delay_step`
_CLOCK_ERROR_S = 1e-6  # rounding errors of times in epoch seconds

DownstreamStatus: TypeAlias = tuple[str | None, float | None]
"""The state of the breaker and the balance of the retry budget; None for one that is not set."""

NO_STATUS: DownstreamStatus = (None, None)
_StepNode: TypeAlias = "tuple[_StepNode | None, int, Outcome, str, Wait | Stop, DownstreamStatus]"
"""A step of the decision record, as a node of a linked list. Its first item is the previous step.

Adding a step creates only this tuple. `Call.steps` builds the `Step` objects when they are read,
because most calls never read their record.
"""


class Call:
    """The state of one call. All times are of one clock; a `random_number` is from [0, 1)."""

    __slots__ = (
        "_attempt_id", "_attempt_started", "_cleared_delay", "_latest_start", "_max_delay",
        "_newest_step", "_paid", "_permit", "_suspect", "_token", "attempts", "backoff_offset",
        "deadline", "downstream", "policy", "previous_delay", "started",
    )  # fmt: skip

    # Set for an attempt that a rate limiter delays:
    _token: int | None
    _max_delay: float  # seconds that the driver may still sleep
    _latest_start: float

    def __init__(
        self,
        policy: Policy,
        downstream: Downstream | None = None,
        started: float = 0.0,
        deadline: float | None = None,
        attempts: int = 0,
        previous_delay: float | None = None,
        backoff_offset: int = 0,
    ) -> None:
        self.policy: Policy = policy
        self.downstream: Downstream | None = downstream
        self.started: float = started
        self.deadline: float | None = deadline
        self.attempts: int = attempts
        """Number of attempts started."""
        self.previous_delay: float | None = previous_delay
        """The last wait in seconds; None before the first wait, and after an exact hint."""
        self.backoff_offset: int = backoff_offset
        """The value of `attempts` when an exact hint last restarted the backoff; 0 if none did."""
        self._newest_step: _StepNode | None = None
        self._cleared_delay = 0.0  # the sum of the delays of steps that were cleared
        if downstream is not None:  # without a downstream these attributes are not needed
            self._permit: int | None = None
            self._attempt_id = 0  # set before an attempt takes slots of limiters
            self._token = None
            self._attempt_started = started
            self._paid = 0.0  # what the retry budget charged for the attempt
            self._suspect = False  # whether the limiters ignore the outcome

    @property
    def progress(self) -> Progress:
        """The part of the state that is stored, so that another process can resume the call."""
        return Progress(self.attempts, self.started, self.previous_delay, self.backoff_offset)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The decision record: a step for each failed attempt since the record was last cleared."""
        steps: list[Step] = []
        node = self._newest_step
        while node is not None:
            node, attempt, outcome, detail, verdict, status = node
            steps.append(Step(attempt, outcome.kind, outcome.detail or detail, verdict, *status))
        return tuple(reversed(steps))

    @property
    def waited(self) -> float:
        """The sum of the delays of all `Wait` verdicts so far, in seconds."""
        delays = (step.verdict.delay for step in self.steps if isinstance(step.verdict, Wait))
        return sum(delays, self._cleared_delay)

    def resume(self, progress: Progress) -> None:
        """Continue a call that was stored as `progress`, perhaps by another process."""
        self.attempts, self.started, self.previous_delay, self.backoff_offset = progress

    def start(self, now: float) -> Attempt | Stop:
        """Start the next attempt; return `Stop` if no time is left or the downstream rejects it."""
        deadline, total_budget = self.deadline, self.policy.total_budget
        if deadline is not None and now >= deadline:
            return self._refund_and_stop(Stop(Reason.DEADLINE), now)
        if total_budget is not None and now >= self.started + total_budget:
            return self._refund_and_stop(Stop(Reason.TOTAL_BUDGET), now)
        delay = 0.0
        downstream = self.downstream
        if downstream is not None:
            if downstream.has_limiters:
                self._attempt_id = downstream.new_attempt_id()
            admission = downstream.admit(now, self._attempt_id)
            if isinstance(admission, Stop):
                return self._refund_and_stop(admission, now)
            if isinstance(admission, DelayedPermit):
                self._permit, delay, self._token, max_delay = admission
                self._set_delay_limits(now, delay, max_delay)
                if (deadline is not None and now + delay >= deadline) or (
                    total_budget is not None and now + delay >= self.started + total_budget
                ):
                    downstream.release(
                        admission.permit, 0.0, now, admission.token, self._attempt_id
                    )
                    self._permit = None
                    return self._refund_and_stop(Stop(Reason.LIMIT, delay), now)
            else:
                self._permit, self._token = admission, None
            self._attempt_started = now + delay
        self.attempts = number = self.attempts + 1
        policy = self.policy
        # The policy has built the `Attempt` objects of the first attempts, by number, in advance.
        if deadline is None and not delay and number < len(policy.attempt_commands):
            return policy.attempt_commands[number]
        return Attempt(number, self._attempt_timeout(now + delay), delay)

    def next_delay_step(self, now: float) -> float:
        """Return how long to sleep before calling this again; 0: send the delayed attempt now.

        While an attempt waits for a token of an `AdaptiveRate`, the rate may rise or fall. The rate
        at most doubles in half a second. So the driver sleeps half of the remaining delay, but at
        most half a second, and checks again.
        """
        token, downstream = self._token, self.downstream
        if token is None or downstream is None:  # the delay never changes: sleep once
            step, self._max_delay = self._max_delay, 0.0
            return step
        # `_max_delay` also ends the wait if tests replace the sleep by one that takes no time.
        left = min(downstream.remaining_wait(token, now), self._latest_start - now, self._max_delay)
        self._attempt_started = now + max(0.0, left)
        if left < _CLOCK_ERROR_S:
            return 0.0
        step = left if left < _MIN_DELAY_STEP_S else min(left / 2, _MAX_DELAY_STEP_S)
        self._max_delay -= step
        return step

    def delayed_attempt(self) -> Attempt:
        """Return the attempt that was delayed and is sent now."""
        return Attempt(self.attempts, self._attempt_timeout(self._attempt_started))

    def _set_delay_limits(self, now: float, delay: float, max_delay: float) -> None:
        """Limit the delay of an attempt, so that it can still finish before the call must end."""
        self._max_delay = max(delay, max_delay)
        latest_start = now + self._max_delay
        end_limits = [] if self.deadline is None else [self.deadline]
        if self.policy.total_budget is not None:
            end_limits.append(self.started + self.policy.total_budget)
        if end_limits and self.downstream is not None:
            latest_start = min(latest_start, min(end_limits) - self.downstream.expected_duration())
        self._latest_start = max(latest_start, now + delay)

    def _attempt_timeout(self, attempt_started: float) -> float | None:
        """Return the seconds that an attempt may take, also with respect to the deadline."""
        timeout = self.policy.attempt_timeout
        if self.deadline is None:
            return timeout
        time_left = self.deadline - attempt_started
        return time_left if timeout is None else min(timeout, time_left)

    def adopt_first_attempt(self, permit: int) -> None:
        """Take over a first attempt that the driver started without a `Call`, under `permit`.

        Most first attempts succeed, so drivers create a `Call` only when the first attempt fails.
        """
        self.attempts = 1
        self._permit = permit

    def adopt_first_failure(self, outcome: Outcome, detail: str, verdict: Wait) -> None:
        """Take over from a driver that handled the first failure itself and started attempt 2."""
        self.attempts = 1
        self._append_step(outcome, detail, verdict, NO_STATUS)
        self.attempts = 2

    def record_failure(
        self, outcome: Outcome, now: float, random_number: float, detail: str = ""
    ) -> Wait | Stop:
        """Record that the attempt failed, and return whether and when the next attempt starts.

        `detail` is used in the decision record when the outcome has no detail of its own.
        """
        downstream = self.downstream
        if downstream is not None:
            self._record(downstream, outcome, now, random_number)
        verdict = decide(self.policy, self, outcome, now, random_number, downstream, self.deadline)
        status = NO_STATUS
        if downstream is not None:
            status = downstream.status(now)
            if isinstance(verdict, Wait):
                paid = downstream.withdraw(outcome, now)
                if paid is None:  # another call took the last tokens after decide() checked them
                    verdict = Stop(Reason.BUDGET_EMPTY)
                else:
                    self._paid = paid
        self._append_step(outcome, detail, verdict, status)
        return verdict

    def replace_verdict_with_stop(
        self, reason: Reason, outcome: Outcome, detail: str, now: float
    ) -> Stop:
        """Replace the verdict that `record_failure` returned: end the call for this reason.

        The retry that `record_failure` may have charged is refunded.
        """
        newest = self._newest_step
        previous, status = (None, NO_STATUS) if newest is None else (newest[0], newest[-1])
        stop = Stop(reason)
        self._newest_step = (previous, self.attempts, outcome, detail, stop, status)
        return self._refund_and_stop(stop, now)

    def record_success(self, now: float, random_number: float) -> None:
        """Record that the attempt succeeded."""
        if self.downstream is not None:
            self._record(self.downstream, SUCCESS, now, random_number)

    def cancel_attempt(self, now: float) -> None:
        """Release the permit of an attempt without a result; count no success or failure.

        Has no effect when no attempt is running, so the driver can call it more than once.
        """
        permit = self.take_permit()
        if self.downstream is not None and permit is not None:
            duration = now - self._attempt_started
            self.downstream.release(permit, duration, now, self._token, self._attempt_id)
            if now < self._attempt_started:  # the attempt was still waiting for the rate limiter
                self.refund_retry(now)

    def forget_attempt(self) -> None:
        """Release the slots of an attempt that was interrupted while it took or released them."""
        if self.downstream is not None and self._attempt_id:
            self.downstream.forget_attempt(self._attempt_id)
            self._attempt_id = 0

    def take_permit(self) -> int | None:
        """Remove and return the permit of the running attempt, or None. The caller releases it."""
        permit = None if self.downstream is None else self._permit
        if permit is not None:
            self._permit = None
        return permit

    def refund_retry(self, now: float) -> None:
        """Refund what the retry budget charged for an attempt that will not be made."""
        if self.downstream is not None:
            self.downstream.refund(self._paid, now)
            self._paid = 0.0

    def _record(
        self, downstream: Downstream, outcome: Outcome, now: float, random_number: float
    ) -> None:
        permit, paid = self._permit, self._paid
        if permit is not None:
            self._permit, self._paid = None, 0.0
            downstream.record(
                permit,
                outcome,
                now - self._attempt_started,
                now,
                random_number,
                paid,
                suspect=self._suspect,
                is_retry=self.attempts > 1,
                attempt_id=self._attempt_id,
            )
            self._attempt_id = 0

    def _append_step(
        self, outcome: Outcome, detail: str, verdict: Wait | Stop, status: DownstreamStatus
    ) -> None:
        if not self.attempts % _MAX_STEPS:
            self._cleared_delay, self._newest_step = self.waited, None
        self._newest_step = (self._newest_step, self.attempts, outcome, detail, verdict, status)
        if isinstance(verdict, Wait):
            hint = outcome.hint
            if hint is None or not hint.exact:
                self.previous_delay = verdict.delay
            else:  # an exact hint (gRPC pushback) makes backoff start over
                self.previous_delay, self.backoff_offset = None, self.attempts

    def _refund_and_stop(self, stop: Stop, now: float) -> Stop:
        self.refund_retry(now)
        return stop


class Defer(NamedTuple):
    """Command to start no attempt now, and to try again after `delay` seconds.

    A delay of None means that the time is not known: try again when the downstream's state changes.
    """

    reason: Reason
    delay: float | None = None


class DurableCall(Call):
    """The state of one call of the retry service, resumed from a `Progress` for each attempt."""

    __slots__ = ()

    def start_or_defer(
        self, now: float, last_outcome: Outcome = TRANSIENT, *, suspect: bool = False
    ) -> Attempt | Defer | Stop:
        """Start the next attempt or defer it. Return `Stop` when no attempts or no time is left.

        `last_outcome` is the outcome of the previous attempt; the cost of a retry depends on it.
        With `suspect`, the limiters ignore the outcome of the attempt, see `Downstream.record`.
        """
        self._suspect = suspect
        downstream, policy = self.downstream, self.policy
        # No attempt is left here if the worker of the last attempt died before it recorded the
        # result, or if `max_attempts` was lowered after the last attempt.
        number = self.attempts + 1
        if number > policy.max_attempts:
            return Stop(Reason.ATTEMPTS)
        if policy.total_budget is not None:
            duration = 0.0 if downstream is None else downstream.expected_duration()
            if now + duration >= self.started + policy.total_budget:
                return Stop(Reason.TOTAL_BUDGET)
        if downstream is not None:
            admission = downstream.admit(now)
            if not isinstance(admission, int):
                return _defer(downstream, admission, now)
            if number > 1:
                paid = downstream.withdraw(last_outcome, now)
                if paid is None:
                    downstream.release(admission, 0.0, now)
                    return Defer(Reason.BUDGET_EMPTY)
                self._paid = paid
            self._permit, self._attempt_started = admission, now
        self.attempts: int = number
        if number < len(policy.attempt_commands):
            return policy.attempt_commands[number]
        return Attempt(number, policy.attempt_timeout)

    def record_failure(
        self, outcome: Outcome, now: float, random_number: float, detail: str = ""
    ) -> Wait | Stop:
        """Record that the attempt failed, and return whether and when the next attempt is due."""
        downstream = self.downstream
        status = NO_STATUS
        now_plus_duration = now
        if downstream is not None:
            self._record(downstream, outcome, now, random_number)
            status = downstream.status(now)
            if self.policy.total_budget is not None:
                now_plus_duration += downstream.expected_duration()
        # `decide` does not get the downstream, because `start_or_defer` checks it when the retry is
        # due. So the expected duration of the retry, which `decide` would add, is added here.
        verdict = decide(self.policy, self, outcome, now_plus_duration, random_number)
        self._append_step(outcome, detail, verdict, status)
        return verdict

    @property
    def last_status(self) -> DownstreamStatus:
        """The breaker's state and the retry budget's balance at the time of the last verdict."""
        return NO_STATUS if self._newest_step is None else self._newest_step[-1]


class NewDurableCall(DurableCall):
    """A `DurableCall` for the first attempt of a task.

    Most first attempts succeed and need few attributes of a call. The other attributes are set only
    if the attempt fails or is cancelled. For a success, the methods of this class execute about 90
    bytecode instructions, those of `DurableCall` 160.
    """

    __slots__ = ()

    def __init__(self, policy: Policy, downstream: Downstream, started: float) -> None:
        self.policy: Policy = policy
        self.downstream: Downstream | None = downstream
        self.started: float = started
        self.attempts: int = 0
        self._permit = None

    def start_or_defer(
        self,
        now: float,
        last_outcome: Outcome = TRANSIENT,  # noqa: ARG002 - no attempt was made
        *,
        suspect: bool = False,
    ) -> Attempt | Defer | Stop:
        """Start the attempt or defer it. Return `Stop` when no time is left."""
        policy, downstream = self.policy, self.downstream
        assert downstream is not None  # noqa: S101 - set by `__init__`
        total_budget = policy.total_budget
        if (
            total_budget is not None
            and now + downstream.expected_duration() >= self.started + total_budget
        ):
            return Stop(Reason.TOTAL_BUDGET)
        admission = downstream.admit(now)
        if not isinstance(admission, int):
            return _defer(downstream, admission, now)
        self._permit, self._attempt_started, self._suspect = admission, now, suspect
        self.attempts = 1
        return policy.attempt_commands[1]

    def record_success(self, now: float, random_number: float) -> None:
        """Record that the attempt succeeded."""
        permit, downstream = self._permit, self.downstream
        if permit is not None and downstream is not None:
            self._permit = None
            duration = now - self._attempt_started
            downstream.record(permit, SUCCESS, duration, now, random_number, suspect=self._suspect)

    def record_failure(
        self, outcome: Outcome, now: float, random_number: float, detail: str = ""
    ) -> Wait | Stop:
        """Record that the attempt failed, and return whether and when the next attempt is due."""
        self._set_all_attributes()
        return super().record_failure(outcome, now, random_number, detail)

    def cancel_attempt(self, now: float) -> None:
        """Release the permit of an attempt without a result; count no success or failure."""
        if self._permit is not None:
            self._set_all_attributes()
            super().cancel_attempt(now)

    def _set_all_attributes(self) -> None:
        permit, attempt_started, suspect = self._permit, self._attempt_started, self._suspect
        super().__init__(self.policy, self.downstream, self.started, attempts=self.attempts)
        self._permit, self._attempt_started, self._suspect = permit, attempt_started, suspect


def _defer(downstream: Downstream, rejection: Stop | DelayedPermit, now: float) -> Defer:
    """Return the deferral of an attempt that the downstream rejects or delays."""
    if isinstance(rejection, Stop):
        return Defer(rejection.reason, rejection.retry_after)
    downstream.release(rejection.permit, 0.0, now, rejection.token)
    return Defer(Reason.LIMIT, rejection.delay)
