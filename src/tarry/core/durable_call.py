"""A call of the retry service, whose state is stored so that it outlives the process.

The difference to `Call`: when the downstream rejects an attempt, a `Call` ends, because its caller
is waiting. A `DurableCall` is *deferred*: the same attempt is tried again later, and neither an
attempt nor a token of the retry budget is used up. Therefore breaker, limits and retry budget are
checked before each attempt and not after a failure.
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
    """Start no attempt now; try again after `delay` seconds.

    A delay of None means that the time is not known: try again when the downstream's state changes.
    """

    reason: Reason
    delay: float | None = None


class DurableCall(Call):
    """The state of one durable call. It is resumed from a stored `Progress` for each attempt."""

    __slots__ = ()

    def start_or_defer(
        self, now: float, last_outcome: Outcome = TRANSIENT
    ) -> Attempt | Defer | Stop:
        """Start the next attempt or defer it. End the call when no attempts or no time are left.

        `last_outcome` is the outcome of the previous attempt; the price of a retry depends on it.
        """
        downstream, policy = self.downstream, self.policy
        if self.attempts >= policy.max_attempts:  # the last worker died, or the policy changed
            return Stop(Reason.ATTEMPTS)
        if policy.total_budget is not None:
            expected = 0.0 if downstream is None else downstream.expected_duration()
            if now + expected >= self.started + policy.total_budget:
                return Stop(Reason.TOTAL_BUDGET)
        if downstream is not None:
            permit = downstream.admit(now)
            if not isinstance(permit, int):
                return _defer(downstream, permit, now)
            if self.attempts:
                paid = downstream.withdraw(last_outcome, now)
                if paid is None:
                    downstream.release(permit, 0.0, now)
                    return Defer(Reason.BUDGET_EMPTY)
                self._paid = paid
            self._permit, self._attempt_started = permit, now
        number = self.attempts + 1
        self.attempts: int = number
        commands = policy.attempt_commands
        if number < len(commands):
            return commands[number]
        return Attempt(number, policy.attempt_timeout)

    def record_failure(
        self, outcome: Outcome, now: float, u: float, detail: str = ""
    ) -> Wait | Stop:
        """Record that the attempt failed, and return whether and when the next attempt is due."""
        downstream = self.downstream
        status = NO_STATUS
        gate = None
        if downstream is not None:
            self._record(downstream, outcome, now, u)
            status = downstream.status(now)
            gate = _LatencyOnly(downstream)
        verdict = decide(self.policy, self, outcome, now, u, gate)
        self._log_step(outcome, detail, verdict, status)
        return verdict

    @property
    def last_status(self) -> DownstreamStatus:
        """The breaker's state and the retry budget's balance at the time of the last verdict."""
        return NO_STATUS if self._log is None else self._log[-1]


def _defer(downstream: Downstream, rejection: DelayedPermit | Stop, now: float) -> Defer:
    """Return the `Defer` for a rejected or delayed attempt, and release the delayed permit."""
    if isinstance(rejection, Stop):
        return Defer(rejection.reason, rejection.retry_after)
    downstream.release(rejection.permit, 0.0, now)
    return Defer(Reason.LIMIT, rejection.delay)


class _LatencyOnly:
    """A `RetryGate` that knows the latency but rejects no retry.

    `start_or_defer` asks the downstream when the retry is due.
    """

    __slots__ = ("expected_duration",)

    def __init__(self, downstream: Downstream) -> None:
        self.expected_duration = downstream.expected_duration

    def check_retry(self, outcome: Outcome, now: float) -> None:
        """Return None: the retry is not rejected."""
