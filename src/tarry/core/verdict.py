"""The commands that the core returns to its drivers: `Attempt`, `Wait` and `Stop`.

A driver is the code that makes the attempts and sleeps between them. `Wait` and `Stop` are
verdicts: `decide` returns one of them after a failed attempt. `Call.start` returns `Attempt` or
`Stop`. `CallRecord` describes a call that has ended.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.text import format_duration
from tarry.core.values import ImmutableValue

if TYPE_CHECKING:
    from tarry.core.hints import Hint
    from tarry.core.outcome import Kind


class Reason(StrEnum):
    """Why a call ended without success. The value is used as a metric label.

    OVERLOADED: the server forbids a retry, for example in an overload. LIMIT: a limiter (of the
    concurrency or the rate) rejected the attempt. TOTAL_BUDGET: the time for the call is over.
    BUDGET_EMPTY: the retry budget, which limits the number of retries, does not allow another one.
    STOPPED: the user's stop function ended the call. RETRIES_OFF: `tarry.set_active(False)`.
    """

    PERMANENT = "permanent"
    OVERLOADED = "overloaded"
    NOT_REPEATABLE = "not-repeatable"
    RETRIED_BELOW = "retried-below"
    ATTEMPTS = "attempts"
    BREAKER_OPEN = "breaker-open"
    BUDGET_EMPTY = "budget-empty"
    LIMIT = "limit"
    HINT_TOO_LONG = "hint-too-long"
    TOTAL_BUDGET = "total-budget"
    DEADLINE = "deadline"
    STOPPED = "stopped"
    RETRIES_OFF = "retries-off"

    @property
    def description(self) -> str:
        """The reason as a clause for messages, such as "no attempts left"."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Reason.PERMANENT: "the error is not retryable",
    Reason.OVERLOADED: "the server said not to retry",
    Reason.NOT_REPEATABLE: "the operation is not repeatable",
    Reason.RETRIED_BELOW: "a layer below has already retried this error",
    Reason.ATTEMPTS: "no attempts left",
    Reason.BREAKER_OPEN: "the circuit breaker is open",
    Reason.BUDGET_EMPTY: "the retry budget is empty",
    Reason.LIMIT: "the local limit for this dependency is reached",
    Reason.HINT_TOO_LONG: "the server asked for a longer wait than max_hint allows",
    Reason.TOTAL_BUDGET: "the total budget leaves no time for another attempt",
    Reason.DEADLINE: "the deadline leaves no time for another attempt",
    Reason.STOPPED: "the stop function ended the call",
    Reason.RETRIES_OFF: "retries are turned off",
}


class Wait(NamedTuple):
    """Command to wait `delay` seconds, then start the next attempt."""

    delay: float
    ceiling: float = 0.0
    """The delay before jitter. A server's hint or decorrelated jitter can make `delay` longer."""
    hint: Hint | None = None


class Stop(NamedTuple):
    """Command to end the call without another attempt."""

    reason: Reason
    retry_after: float | None = None
    """Seconds after which a new call can succeed; None when that is not known."""
    hint: Hint | None = None


def forbids_outer_retry(stop: Stop, attempts: int, max_attempts: int) -> bool:
    """Return whether an outer retry loop must not retry a call that made `attempts` attempts.

    False only after an attempt, if the policy allows only one attempt or the last error is
    permanent: then the outer loop's policy decides. Any other call was rejected before its first
    attempt, has been retried or must not be retried.
    """
    return not attempts or (max_attempts > 1 and stop.reason is not Reason.PERMANENT)


class Attempt(ImmutableValue):
    """Command to run the operation now, or after `delay` seconds when a rate limiter delays it.

    `timeout` is the time for this attempt in seconds; None means no timeout.
    """

    __slots__ = __match_args__ = _fields = ("number", "timeout", "delay")

    number: int
    timeout: float | None
    delay: float

    def __init__(self, number: int, timeout: float | None = None, delay: float = 0.0) -> None:
        self._set_fields(number, timeout, delay)


class DelayedPermit(NamedTuple):
    """A permit for an attempt that must first wait `delay` seconds."""

    permit: int
    """The number by which the breaker identifies the attempt; 0 without a breaker."""
    delay: float
    token: int | None = None
    """The number of the token that the attempt waits for; None if `delay` never changes."""
    max_delay: float = 0.0
    """The longest that `delay` can become if the rate falls. Only set with a token."""


class Progress(NamedTuple):
    """The state of a call that is stored, so that another process can resume the call."""

    attempts: int = 0
    """Number of attempts started."""
    started: float = 0.0
    """The time at which the call started; a stored state has epoch seconds."""
    previous_delay: float | None = None
    """The last wait in seconds; None before the first wait, and after an exact hint."""
    backoff_offset: int = 0
    """The value of `attempts` when an exact hint last restarted the backoff; 0 if none did.

    An exact hint (gRPC pushback) sets the next delay exactly; later delays are as in a new call.
    """


class CallState(ImmutableValue):
    """The state of a call after a failed attempt: the argument of a stop function.

    attempts: number of attempts made.
    elapsed: seconds since the call started.
    delay: seconds before the next attempt, if the call continues.
    error: the error of the last attempt; `ResultNotAccepted` for a result that `until` rejected.
    """

    __slots__ = __match_args__ = _fields = ("operation", "attempts", "elapsed", "delay", "error")

    operation: str
    attempts: int
    elapsed: float
    delay: float
    error: Exception

    def __init__(
        self, operation: str, attempts: int, elapsed: float, delay: float, error: Exception
    ) -> None:
        self._set_fields(operation, attempts, elapsed, delay, error)


class Step(NamedTuple):
    """One entry of a call's decision record: a failed attempt and the verdict after it."""

    attempt: int
    kind: Kind
    detail: str
    verdict: Wait | Stop
    breaker: str | None
    """The state of the breaker at the time of the verdict; None without a breaker."""
    balance: float | None
    """The balance of the retry budget at the time of the verdict; None without a budget."""


class CallRecord(NamedTuple):
    """The decision record of a call that has ended."""

    operation: str
    downstream: str | None
    attempts: int
    waited: float
    """The sum of the delays between attempts, in seconds."""
    reason: Reason | None
    """Why the call ended without success; None if it succeeded."""
    retry_after: float | None
    """Seconds after which a new call can succeed; None when that is not known."""
    steps: tuple[Step, ...]

    def summary(self) -> str:
        """Return a clause with the attempts, the waiting time and the reason why the call ended."""
        attempts = f"{self.attempts} attempt{'' if self.attempts == 1 else 's'}"
        waits = f" and {format_duration(self.waited)} of waiting" if self.waited else ""
        if self.reason is None:
            return f"succeeded after {attempts}{waits}"
        summary = f"gave up after {attempts}{waits}: {self.reason.description}"
        if self.retry_after is None:
            return summary
        return f"{summary}; retry after {format_duration(self.retry_after)}"
