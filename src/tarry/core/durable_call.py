"""One call that outlives its process, as the retry service runs it.

It differs from `Call` in one point. When the downstream rejects an attempt, a `Call` ends, because
its caller waits for it. A `DurableCall` is *deferred* instead: it is tried again later, and nothing
is charged. So breaker, limits and retry budget are checked before an attempt, not after a failure.
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
    """Start no attempt now; try again after `delay` seconds, or when the downstream changes."""

    reason: Reason
    delay: float | None = None


class DurableCall(Call):
    """The state of one call, resumed from its stored `Progress` for each attempt."""

    __slots__ = ()

    def start_or_defer(
        self, now: float, last_outcome: Outcome = TRANSIENT
    ) -> Attempt | Defer | Stop:
        """Start the next attempt, defer it, or end the call: no attempts or no time left.

        `last_outcome` is that of the previous attempt; it sets the price of a retry.
        """
        downstream, policy = self.downstream, self.policy
        if self.attempts >= policy.max_attempts:  # an attempt was lost, or the policy has changed
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
        prepared = policy.attempt_commands
        if number < len(prepared):
            return prepared[number]
        return Attempt(number, policy.attempt_timeout)

    def record_failure(
        self, outcome: Outcome, now: float, u: float, detail: str = ""
    ) -> Wait | Stop:
        """Record that the attempt failed, and return whether and when the next one is due."""
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
        """The breaker state and budget balance at the last verdict."""
        return NO_STATUS if self._log is None else self._log[-1]


def _defer(downstream: Downstream, rejected: DelayedPermit | Stop, now: float) -> Defer:
    """Return the `Defer` for an attempt that is rejected or delayed; release a delayed permit."""
    if isinstance(rejected, Stop):
        return Defer(rejected.reason, rejected.retry_after)
    downstream.release(rejected.permit, 0.0, now)
    return Defer(Reason.LIMIT, rejected.delay)


class _LatencyOnly:
    """A `RetryGate` that rejects no retry: `start_or_defer` checks the downstream later."""

    __slots__ = ("expected_duration",)

    def __init__(self, downstream: Downstream) -> None:
        self.expected_duration = downstream.expected_duration

    def check_retry(self, outcome: Outcome, now: float) -> None:
        """Reject nothing."""
