"""Events of a call, for listeners: logs, metrics, traces and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarry.core.breaker import BreakerState
    from tarry.core.hints import Hint
    from tarry.core.outcome import Kind
    from tarry.core.verdict import Reason


@dataclass(frozen=True, slots=True)
class Event:
    """The base class of all events."""

    operation: str
    """The name that the user set for the operation, otherwise the name of the function."""
    downstream: str | None
    """The name of the downstream, or None without a downstream."""


@dataclass(frozen=True, slots=True)
class AttemptStarted(Event):
    """An attempt is about to run."""

    attempt: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class AttemptFailed(Event):
    """An attempt failed, or returned a result that `until` does not accept."""

    attempt: int
    max_attempts: int
    kind: Kind
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """A status, a code, or the type of the error."""


@dataclass(frozen=True, slots=True)
class WaitEvent(Event):
    """The base class of the events before and after a wait."""

    retry: int
    max_retries: int
    ceiling: float
    """Upper bound of the delay, before jitter."""
    delay: float
    """The delay after jitter and the server's hint."""
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """A status, a code, or the type of the error."""


@dataclass(frozen=True, slots=True)
class WillWait(WaitEvent):
    """The call waits before retry number `retry`."""


@dataclass(frozen=True, slots=True)
class Waited(WaitEvent):
    """The wait is over."""

    slept: float
    """The actual duration of the wait in seconds."""


@dataclass(frozen=True, slots=True)
class Succeeded(Event):
    """The call ended with a result."""

    attempts: int


@dataclass(frozen=True, slots=True)
class GaveUp(Event):
    """The call ended without a result; `attempts` is 0 when the first attempt was rejected."""

    attempts: int
    reason: Reason
    waited: float
    """The sum of all waits between attempts, in seconds."""
    retry_after: float | None
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """A status, a code, or the type of the error."""


@dataclass(frozen=True, slots=True)
class BudgetEmpty(Event):
    """A retry was not made because the retry budget is empty."""


@dataclass(frozen=True, slots=True)
class BreakerStateChanged(Event):
    """The breaker of a dependency changed its state."""

    before: BreakerState
    after: BreakerState


@dataclass(frozen=True, slots=True)
class HedgeFired(Event):
    """A hedge started: another attempt of the call, in parallel to the running ones."""

    attempt: int


@dataclass(frozen=True, slots=True)
class HedgeWon(Event):
    """The result of a hedged call came from an attempt other than the first."""

    attempt: int
