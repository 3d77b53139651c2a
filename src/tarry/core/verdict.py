"""The values that the core returns to its drivers: what to do next, and why.

`decide` returns a verdict, `Wait` or `Stop`. `Call` also returns `Attempt`. `CallRecord` describes
a call that ended without a result.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.durations import format_duration
from tarry.core.value import Value

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
        """The reason as part of a sentence for people."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Reason.PERMANENT: "the error is not retryable",
    Reason.OVERLOADED: "the server said not to retry",
    Reason.UNSAFE: "the operation is not safe to repeat",
    Reason.RETRIED_BELOW: "a layer below has given up on it already",
    Reason.ATTEMPTS: "no attempts left",
    Reason.BREAKER_OPEN: "the circuit breaker is open",
    Reason.BUDGET_EMPTY: "the retry budget is empty",
    Reason.LIMIT: "the limit of the dependency is reached",
    Reason.HINT_TOO_LONG: "the server asked for a longer wait than max_hint allows",
    Reason.TOTAL_BUDGET: "the total budget leaves no time for another attempt",
    Reason.DEADLINE: "the deadline leaves no time for another attempt",
}


class Wait(NamedTuple):
    """Wait `delay` seconds, then start the next attempt."""

    delay: float
    ceiling: float = 0.0
    """The bound of the delay before jitter."""
    hint: Hint | None = None


class Stop(NamedTuple):
    """Make no further attempt."""

    reason: Reason
    retry_after: float | None = None
    """Seconds after which a new call can succeed, when that is known."""
    hint: Hint | None = None


def is_final(stop: Stop, attempts: int, max_attempts: int) -> bool:
    """Return whether outer retry loops pass on the error of a call instead of retrying it.

    True when the call was retried or rejected, or when a retry was not allowed (unsafe operation,
    the server said not to retry, no time or budget left). False when its policy has one attempt,
    or the error is permanent: then the outer loop decides by its own rules.
    """
    return not attempts or (max_attempts > 1 and stop.reason is not Reason.PERMANENT)


class Attempt(Value):
    """Run the operation now, or after `delay` seconds when a rate limiter delays it."""

    __slots__ = __match_args__ = _fields = ("number", "timeout", "delay")

    number: int
    timeout: float | None
    delay: float

    def __init__(self, number: int, timeout: float | None = None, delay: float = 0.0) -> None:
        self._set(number=number, timeout=timeout, delay=delay)


class DelayedPermit(NamedTuple):
    """A permit for an attempt that starts after `delay` seconds."""

    permit: int
    delay: float


class Progress(NamedTuple):
    """The state of a call as plain data, with which another process can continue it."""

    attempts: int = 0
    started: float = 0.0
    previous_delay: float | None = None
    backoff_offset: int = 0
    """Number of attempts that backoff ignores: those before the last exact delay of a server."""


class Step(NamedTuple):
    """One line of a call's decision record."""

    attempt: int
    kind: Kind
    detail: str
    verdict: Wait | Stop
    breaker: str | None
    balance: float | None
    """The balance of the retry budget at the time of the verdict."""


class CallRecord(NamedTuple):
    """The decision record of a call that ended without a result."""

    operation: str
    downstream: str | None
    attempts: int
    waited: float
    reason: Reason
    retry_after: float | None
    steps: tuple[Step, ...]

    def summary(self) -> str:
        """Return a sentence with the number of attempts and why the call ended."""
        plural = "" if self.attempts == 1 else "s"
        waits = f" and {format_duration(self.waited)} of waiting" if self.waited else ""
        after = (
            "" if self.retry_after is None else f"; retry after {format_duration(self.retry_after)}"
        )
        why = f"{self.reason.description}{after}"
        return f"gave up after {self.attempts} attempt{plural}{waits}: {why}"
