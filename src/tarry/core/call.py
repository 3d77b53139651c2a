"""One call through its policy and its downstream, in the order of the design.

A driver asks `start` for the first attempt and for the next one after each wait, runs it, and
reports how it ended. It obeys what it gets; it decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tarry.core.decide import decide
from tarry.core.outcome import SUCCESS
from tarry.core.verdict import Attempt, DelayedPermit, Progress, Reason, Step, Stop, Wait

if TYPE_CHECKING:
    from tarry.core.downstream import Downstream
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy

_MOST_STEPS = 256
"""A call of a million attempts does not keep a million steps: after so many it begins anew."""

DownstreamStatus: TypeAlias = tuple[str | None, float | None]
"""The breaker's state and the budget's balance."""

NO_STATUS: DownstreamStatus = (None, None)
_Log: TypeAlias = "tuple[_Log | None, int, Outcome, str, Wait | Stop, DownstreamStatus]"


class Call:
    """The state of one call. `deadline` lies on the same base as every `now`."""

    __slots__ = (
        "_begun",
        "_forgotten",
        "_log",
        "_paid",
        "_permit",
        "attempts",
        "backoff_offset",
        "deadline",
        "downstream",
        "policy",
        "previous_delay",
        "started",
    )

    def __init__(
        self,
        policy: Policy,
        downstream: Downstream | None = None,
        started: float = 0.0,
        deadline: float | None = None,
    ) -> None:
        self.policy: Policy = policy
        self.downstream: Downstream | None = downstream
        self.started: float = started
        self.deadline: float | None = deadline
        self.attempts: int = 0
        """Attempts begun."""
        self.previous_delay: float | None = None
        self.backoff_offset: int = 0
        self._log: _Log | None = None
        self._forgotten = 0.0
        if downstream is not None:
            self._permit: int | None = None
            self._begun = started
            self._paid = 0.0

    @property
    def progress(self) -> Progress:
        """How far the call has come, as plain data to store."""
        return Progress(self.attempts, self.started, self.previous_delay, self.backoff_offset)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The decision record: one step for each attempt that failed, up to the last 256."""
        steps: list[Step] = []
        log = self._log
        while log is not None:
            log, attempt, outcome, detail, verdict, standing = log
            said = outcome.detail or detail
            steps.append(Step(attempt, outcome.kind, said, verdict, *standing))
        return tuple(reversed(steps))

    @property
    def waited(self) -> float:
        """Seconds of waiting that were ordered so far."""
        waits = (step.verdict.delay for step in self.steps if isinstance(step.verdict, Wait))
        return sum(waits, self._forgotten)

    def resume(self, progress: Progress) -> None:
        """Go on from where another process left off."""
        self.attempts, self.started, self.previous_delay, self.backoff_offset = progress

    def start(self, now: float) -> Attempt | Stop:
        """Begin the next attempt, or end the call because its dependency or its time says no."""
        deadline, budget = self.deadline, self.policy.total_budget
        if deadline is not None and now >= deadline:
            return self._refused(Stop(Reason.DEADLINE), now)
        if budget is not None and now >= self.started + budget:
            return self._refused(Stop(Reason.TOTAL_BUDGET), now)
        delay = 0.0
        downstream = self.downstream
        if downstream is not None:
            answer = downstream.admit(now)
            if isinstance(answer, Stop):
                return self._refused(answer, now)
            if isinstance(answer, DelayedPermit):
                self._permit, delay = answer
                if (deadline is not None and now + delay >= deadline) or (
                    budget is not None and now + delay >= self.started + budget
                ):
                    downstream.release(answer.permit, 0.0, now)
                    self._permit = None
                    return self._refused(Stop(Reason.LIMIT, delay), now)
            else:
                self._permit = answer
            self._begun = now + delay
        self.attempts = number = self.attempts + 1
        policy = self.policy
        if deadline is None and not delay and number < len(policy.attempt_commands):
            return policy.attempt_commands[number]
        timeout = policy.attempt_timeout
        if deadline is not None:
            left = deadline - now - delay
            timeout = left if timeout is None else min(timeout, left)
        return Attempt(number, timeout, delay)

    def adopt_first_attempt(self, permit: int) -> None:
        """Take over the first attempt, which a driver began with a permit of its own."""
        self.attempts = 1
        self._permit = permit

    def record_failure(
        self, outcome: Outcome, now: float, u: float, detail: str = ""
    ) -> Wait | Stop:
        """Learn that the attempt failed; answer what to do.

        `detail` is what the record says of it, where the outcome says nothing.
        """
        downstream = self.downstream
        if downstream is not None:
            self._record(downstream, outcome, now, u)
        verdict = decide(self.policy, self, outcome, now, u, downstream, self.deadline)
        standing = NO_STATUS
        if downstream is not None:
            standing = downstream.status(now)
            if isinstance(verdict, Wait):
                paid = downstream.withdraw(outcome, now)
                if paid is None:
                    verdict = Stop(Reason.BUDGET_EMPTY)
                else:
                    self._paid = paid
        self._note(outcome, detail, verdict, standing)
        return verdict

    def adopt_first_failure(self, outcome: Outcome, detail: str, verdict: Wait) -> None:
        """Go on where a driver has judged the first failure and begun the second attempt."""
        self.attempts = 1
        self._note(outcome, detail, verdict, NO_STATUS)
        self.attempts = 2

    def _note(
        self, outcome: Outcome, detail: str, verdict: Wait | Stop, standing: DownstreamStatus
    ) -> None:
        if not self.attempts % _MOST_STEPS:
            self._forgotten, self._log = self.waited, None
        self._log = (self._log, self.attempts, outcome, detail, verdict, standing)
        if isinstance(verdict, Wait):
            hint = outcome.hint
            if hint is None or not hint.exact:
                self.previous_delay = verdict.delay
            else:
                self.previous_delay, self.backoff_offset = None, self.attempts

    def record_success(self, now: float, u: float) -> None:
        """Learn that the attempt succeeded: the call is over."""
        if self.downstream is not None:
            self._record(self.downstream, SUCCESS, now, u)

    def cancel_attempt(self, now: float) -> None:
        """Learn that the attempt came to no result: nothing is counted.

        May be said more than once, and of a call that has no attempt running.
        """
        permit = self.take_permit()
        if self.downstream is not None and permit is not None:
            self.downstream.release(permit, now - self._begun, now)
            if now < self._begun:  # it was still waiting for its turn
                self.refund_retry(now)

    def take_permit(self) -> int | None:
        """Hand the permit of the running attempt over to somebody who will give it back."""
        permit = None if self.downstream is None else self._permit
        if permit is not None:
            self._permit = None
        return permit

    def refund_retry(self, now: float) -> None:
        """Learn that the call ended while it waited: what the next attempt had cost comes back."""
        if self.downstream is not None:
            self.downstream.deposit(self._paid, now)
            self._paid = 0.0

    def _record(self, downstream: Downstream, outcome: Outcome, now: float, u: float) -> None:
        permit, paid = self._permit, self._paid
        if permit is not None:
            self._permit, self._paid = None, 0.0
            downstream.record(permit, outcome, now - self._begun, now, u, paid)

    def _refused(self, stop: Stop, now: float) -> Stop:
        self.refund_retry(now)
        return stop
