"""The words between the core and its drivers: what to do next, and why.

`decide` answers with `Wait` or `Stop`; a call adds `Attempt`. All are values, told apart by type.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.explain import format_duration
from tarry.core.value import Value

if TYPE_CHECKING:
    from tarry.core.hints import Hint
    from tarry.core.outcome import Kind


class Reason(StrEnum):
    """Why a call ended without success. The value is the metric label, `words` is for people."""

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
        """The reason as part of a sentence."""
        return _WORDS[self]


_WORDS = {
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
    """Wait `delay` seconds, then ask for the next attempt."""

    delay: float
    ceiling: float = 0.0
    """The bound that jitter drew below."""
    hint: Hint | None = None


class Stop(NamedTuple):
    """Make no further attempt."""

    reason: Reason
    retry_after: float | None = None
    """Seconds after which another call makes sense, when that is known."""
    hint: Hint | None = None


def is_final(stop: Stop, attempts: int, max_attempts: int) -> bool:
    """Say whether layers above shall pass the error on that ended a call, and not retry it.

    They shall where it was retried or not let through; where a second attempt would have done harm
    (it is unsafe, the server asked not to be asked, time or budget are used up); not where it was
    tried once and no more.
    """
    return not attempts or (max_attempts > 1 and stop.reason is not Reason.PERMANENT)


class Attempt(Value):
    """Run the operation now, or after `delay` seconds when a rate limit asks for that."""

    __slots__ = __match_args__ = _fields = ("number", "timeout", "delay")

    number: int
    timeout: float | None
    delay: float

    def __init__(self, number: int, timeout: float | None = None, delay: float = 0.0) -> None:
        self._set(number=number, timeout=timeout, delay=delay)


class DelayedPermit(NamedTuple):
    """A permit whose attempt starts only after `delay` seconds."""

    permit: int
    delay: float


class Progress(NamedTuple):
    """How far a call has come: plain data that another process can go on from."""

    attempts: int = 0
    started: float = 0.0
    previous_delay: float | None = None
    backoff_offset: int = 0
    """The attempt from which backoff counts anew, after a server named an exact delay."""


class Step(NamedTuple):
    """One line of a call's decision record."""

    attempt: int
    kind: Kind
    detail: str
    verdict: Wait | Stop
    breaker: str | None
    balance: float | None
    """What was left in the retry budget when the verdict was reached."""


class CallRecord(NamedTuple):
    """How a call went: attempts, waits, balances, reasons."""

    operation: str
    downstream: str | None
    attempts: int
    waited: float
    reason: Reason
    retry_after: float | None
    steps: tuple[Step, ...]

    def summary(self) -> str:
        """Say it in words: how many attempts were made and why they ended."""
        plural = "" if self.attempts == 1 else "s"
        waits = f" and {format_duration(self.waited)} of waiting" if self.waited else ""
        after = (
            "" if self.retry_after is None else f"; retry after {format_duration(self.retry_after)}"
        )
        why = f"{self.reason.description}{after}"
        return f"gave up after {self.attempts} attempt{plural}{waits}: {why}"
