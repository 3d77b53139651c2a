"""What happens to a call, as values for listeners: logs, metrics, traces, tests."""

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
    """The base of every event."""

    operation: str
    """The name of what is called: the function's, or the one given by the user."""
    downstream: str | None
    """The name of the dependency, where one was given."""


@dataclass(frozen=True, slots=True)
class AttemptStarted(Event):
    """An attempt is about to run."""

    attempt: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class AttemptFailed(Event):
    """An attempt failed, or gave a result that `until` does not accept."""

    attempt: int
    max_attempts: int
    kind: Kind
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """What the record says of the failure: a status, a code, or the error's type."""


@dataclass(frozen=True, slots=True)
class WaitEvent(Event):
    """The base of the two events around a wait."""

    retry: int
    max_retries: int
    ceiling: float
    """The bound of the delay before jitter."""
    delay: float
    """The delay after jitter and the server's hint."""
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """What the record says of the failure: a status, a code, or the error's type."""


@dataclass(frozen=True, slots=True)
class WillWait(WaitEvent):
    """The call waits before retry number `retry`."""


@dataclass(frozen=True, slots=True)
class Waited(WaitEvent):
    """The wait is over."""

    slept: float
    """The seconds that it really took."""


@dataclass(frozen=True, slots=True)
class Succeeded(Event):
    """The call is over and gave a result."""

    attempts: int


@dataclass(frozen=True, slots=True)
class GaveUp(Event):
    """The call is over without a result; `attempts` is 0 when it was not let through at all."""

    attempts: int
    reason: Reason
    waited: float
    """The seconds of waiting between the attempts, in all."""
    retry_after: float | None
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """What the record says of the failure: a status, a code, or the error's type."""


@dataclass(frozen=True, slots=True)
class BudgetEmpty(Event):
    """A retry was not made because the retry budget is empty."""


@dataclass(frozen=True, slots=True)
class BreakerMoved(Event):
    """The breaker of a dependency changed its state."""

    before: BreakerState
    after: BreakerState


@dataclass(frozen=True, slots=True)
class HedgeFired(Event):
    """Another copy of a hedged call was sent."""

    attempt: int


@dataclass(frozen=True, slots=True)
class HedgeWon(Event):
    """A copy other than the first gave the answer."""

    attempt: int
