"""Events of calls and breakers, for listeners: logs, metrics, traces and tests."""

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
    """The name that the user set, or else that of the function with its module ("orders.charge");
    "" for `BreakerStateChanged`."""
    downstream: str | None
    """The name of the downstream, or None for a call without a downstream."""
    call_id: str = field(default="", kw_only=True, compare=False)
    """Unique for each call, in all processes; "" for `BreakerStateChanged`."""
    time: float = field(default=0.0, kw_only=True, compare=False)
    """The time of the event in seconds since 1970."""


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
    """The HTTP status, the gRPC code or the name of the error's type."""
    duration: float | None = field(default=None, kw_only=True, compare=False)
    """The seconds that the attempt took; None if it was not measured, see `Succeeded`."""
    delay: float | None = field(default=None, kw_only=True, compare=False)
    """The seconds until the next attempt; None if none follows."""


@dataclass(frozen=True, slots=True)
class WaitEvent(Event):
    """The base class of the events before and after a wait."""

    retry: int
    max_retries: int
    ceiling: float
    """The delay before jitter. A server's hint or decorrelated jitter can make `delay` longer."""
    delay: float
    """The delay in seconds, with jitter and the server's hint applied."""
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """The HTTP status, the gRPC code or the name of the error's type."""


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
    duration: float | None = field(default=None, kw_only=True, compare=False)
    """The seconds that the successful attempt took; None if it was not measured.

    Hedged calls are not measured. The first attempt of a call without a downstream is measured only
    if there is a listener, because reading the clock would slow down each call.
    """


@dataclass(frozen=True, slots=True)
class GaveUp(Event):
    """The call ended without success; `attempts` is 0 if its first attempt was rejected."""

    attempts: int
    reason: Reason
    waited: float
    """The sum of all waits between attempts, in seconds."""
    retry_after: float | None
    """Seconds after which a new call can succeed; None when that is not known."""
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """The HTTP status, the gRPC code or the name of the error's type."""


@dataclass(frozen=True, slots=True)
class BudgetEmpty(Event):
    """A retry was not made because the retry budget is empty."""


@dataclass(frozen=True, slots=True)
class BreakerStateChanged(Event):
    """The state of a downstream's circuit breaker changed."""

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
