"""The commands that the core returns to its drivers: `Attempt`, `Wait` and `Stop`.

A driver is the code that makes the attempts and sleeps between them. `decide` returns a verdict
after a failed attempt: `Wait` or `Stop`. `Call` also returns `Attempt` when an attempt may start.
`CallRecord` describes a call that ended without a result.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import ImmutableValue
from tarry.core.text import format_duration

if TYPE_CHECKING:
    from tarry.core.hints import Hint
    from tarry.core.outcome import Kind


class Reason(StrEnum):
    """Why a call ended without success. The value is used as a metric label."""

    PERMANENT = "permanent"
    OVERLOADED = "overloaded"
    UNSAFE = "unsafe"
    RETRIED_BELOW = "retried-below"
    ATTEMPTS = "attempts"
    BREAKER_OPEN = "breaker-open"
    BUDGET_EMPTY = "budget-empty"
    LIMIT = "limit"
    HINT_TOO_LONG = "hint-too-long"
    TOTAL_BUDGET = "total-budget"
    DEADLINE = "deadline"

    @property
    def description(self) -> str:
        """The reason as a clause for messages, such as "no attempts left"."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Reason.PERMANENT: "the error is not retryable",
    Reason.OVERLOADED: "the server said not to retry",
    Reason.UNSAFE: "the operation is not repeatable",
    Reason.RETRIED_BELOW: "a layer below has already retried this error",
    Reason.ATTEMPTS: "no attempts left",
    Reason.BREAKER_OPEN: "the circuit breaker is open",
    Reason.BUDGET_EMPTY: "the retry budget is empty",
    Reason.LIMIT: "the local limit for this dependency is reached",
    Reason.HINT_TOO_LONG: "the server asked for a longer wait than max_hint allows",
    Reason.TOTAL_BUDGET: "the total budget leaves no time for another attempt",
    Reason.DEADLINE: "the deadline leaves no time for another attempt",
}


class Wait(NamedTuple):
    """Command to wait `delay` seconds, then start the next attempt."""

    delay: float
    ceiling: float = 0.0
    """Upper bound of the delay in seconds, before jitter and before the server's hint."""
    hint: Hint | None = None


class Stop(NamedTuple):
    """Command to make no further attempt."""

    reason: Reason
    retry_after: float | None = None
    """Seconds after which a new call can succeed, when that is known."""
    hint: Hint | None = None


def is_final(stop: Stop, attempts: int, max_attempts: int) -> bool:
    """Return whether an outer retry loop must pass on the error of this call without a retry.

    `attempts` is the number of attempts that the call made. A rejected call (no attempts) is final.
    Otherwise the result is False when the call's policy has one attempt, or when the last error is
    permanent, even after retries: the outer loop applies its own policy. It is True in all
    other cases: the call was retried, or must not be (unsafe, forbidden by the server, no time).
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
    """A permit (a number from the breaker) for an attempt that must first wait `delay` seconds."""

    permit: int
    delay: float


class Progress(NamedTuple):
    """The state of a call as plain data, from which another process can resume the call."""

    attempts: int = 0
    started: float = 0.0
    previous_delay: float | None = None
    """Seconds of the last wait; None before the first wait and after an exact hint."""
    backoff_offset: int = 0
    """Number of attempts made when backoff last started over (after an exact hint), else 0."""


class Step(NamedTuple):
    """One entry of a call's decision record: a failed attempt and the verdict about it."""

    attempt: int
    kind: Kind
    detail: str
    verdict: Wait | Stop
    breaker: str | None
    """The state of the breaker at the time of the verdict; None without a breaker."""
    balance: float | None
    """The balance of the retry budget at the time of the verdict; None without a budget."""


class CallRecord(NamedTuple):
    """The decision record of a call that ended without a result."""

    operation: str
    downstream: str | None
    attempts: int
    waited: float
    """The sum of the delays between attempts, in seconds."""
    reason: Reason
    retry_after: float | None
    """Seconds after which a new call can succeed, when that is known."""
    steps: tuple[Step, ...]

    def summary(self) -> str:
        """Return a clause with the number of attempts and the reason why the call ended."""
        attempts = f"{self.attempts} attempt{'' if self.attempts == 1 else 's'}"
        waits = f" and {format_duration(self.waited)} of waiting" if self.waited else ""
        summary = f"gave up after {attempts}{waits}: {self.reason.description}"
        if self.retry_after is None:
            return summary
        return f"{summary}; retry after {format_duration(self.retry_after)}"
