"""One call that outlives its process: what a service asks before and after each attempt.

It differs from `Call` in one thing. Where a dependency says no, a call in a program fails, for
somebody waits for it; a durable one is *deferred*: it is asked for again later, and nothing is
charged. So breaker, limits and retry budget are asked before an attempt, and never after one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tarry.core.call import NO_STATUS, Call
from tarry.core.decide import decide
from tarry.core.outcome import TRANSIENT
from tarry.core.verdict import Attempt, Reason, Stop, Wait

if TYPE_CHECKING:
    from tarry.core.call import DownstreamStatus
    from tarry.core.downstream import Downstream
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import DelayedPermit


class Defer(NamedTuple):
    """Make no attempt now; ask again after `delay` seconds, or when something has changed."""

    reason: Reason
    delay: float | None = None


class DurableCall(Call):
    """The state of one call, resumed from its stored `Progress` for each attempt."""

    __slots__ = ()

    def start_or_defer(self, now: float, last: Outcome = TRANSIENT) -> Attempt | Defer | Stop:
        """Begin the next attempt, or put it off, or end the call: attempts or time are used up.

        `last` is what the attempt before came to; it sets the price of a retry.
        """
        downstream, policy = self.downstream, self.policy
        if self.attempts >= policy.max_attempts:  # one was lost, or the policy has changed
            return Stop(Reason.ATTEMPTS)
        if policy.total_budget is not None:
            expected = 0.0 if downstream is None else downstream.expected_duration()
            if now + expected >= self.started + policy.total_budget:
                return Stop(Reason.TOTAL_BUDGET)
        if downstream is not None:
            permit = downstream.admit(now)
            if not isinstance(permit, int):
                return _deferred(downstream, permit, now)
            if self.attempts:
                paid = downstream.withdraw(last, now)
                if paid is None:
                    downstream.release(permit, 0.0, now)
                    return Defer(Reason.BUDGET_EMPTY)
                self._paid = paid
            self._permit, self._begun = permit, now
        number = self.attempts + 1
        self.attempts: int = number
        known = policy.attempt_commands
        return known[number] if number < len(known) else Attempt(number, policy.attempt_timeout)

    def record_failure(
        self, outcome: Outcome, now: float, u: float, detail: str = ""
    ) -> Wait | Stop:
        """Learn that the attempt failed; answer what to do."""
        downstream = self.downstream
        standing = NO_STATUS
        if downstream is not None:
            self._record(downstream, outcome, now, u)
            standing = downstream.status(now)
        verdict = decide(
            self.policy, self, outcome, now, u, None if downstream is None else _Patient(downstream)
        )
        self._note(outcome, detail, verdict, standing)
        return verdict

    @property
    def last_status(self) -> DownstreamStatus:
        """What the last verdict went by."""
        return NO_STATUS if self._log is None else self._log[-1]


def _deferred(downstream: Downstream, answer: DelayedPermit | Stop, now: float) -> Defer:
    """Return what is said to an attempt that is not let through now."""
    if isinstance(answer, Stop):
        return Defer(answer.reason, answer.retry_after)
    downstream.release(answer.permit, 0.0, now)
    return Defer(Reason.LIMIT, answer.delay)


class _Patient:
    """A downstream that refuses nothing yet: it is asked again before the attempt."""

    __slots__ = ("expected_duration",)

    def __init__(self, downstream: Downstream) -> None:
        self.expected_duration = downstream.expected_duration

    def check_retry(self, outcome: Outcome, now: float) -> None:
        """Let every retry wait for its turn."""
