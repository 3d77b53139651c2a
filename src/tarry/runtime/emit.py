"""Build and emit the events of a call.

Imported only when an event must be emitted, so that other programs do not load
`tarry.core.events`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.events import (
    AttemptFailed,
    AttemptStarted,
    BudgetEmpty,
    GaveUp,
    Succeeded,
    Waited,
    WillWait,
)
from tarry.core.verdict import Reason, Wait
from tarry.errors import Rejected
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from tarry.core.call import Call
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import Stop


def emit_started(operation: str, call: Call) -> None:
    """Emit that an attempt starts."""
    attempt, max_attempts = call.attempts, call.policy.max_attempts
    bus.emit(AttemptStarted(operation, _downstream_name(call), attempt, max_attempts))


def emit_failed(
    operation: str, call: Call, outcome: Outcome, verdict: Wait | Stop, error: Exception | None
) -> None:
    """Emit that an attempt failed, and that the call will wait if a retry follows."""
    name = _downstream_name(call)
    attempt, max_attempts = call.attempts, call.policy.max_attempts
    detail = outcome.detail or type(error).__name__
    bus.emit(
        AttemptFailed(operation, name, attempt, max_attempts, outcome.kind, error, detail=detail)
    )
    if isinstance(verdict, Wait):
        bus.emit(
            WillWait(
                operation,
                name,
                attempt,
                max_attempts - 1,
                verdict.ceiling,
                verdict.delay,
                verdict.hint,
                error,
                detail=detail,
            )
        )


def emit_waited(
    operation: str, call: Call, wait: Wait, slept: float, error: Exception | None
) -> None:
    """Emit that a wait is over."""
    attempt, max_attempts = call.attempts, call.policy.max_attempts
    bus.emit(
        Waited(
            operation,
            _downstream_name(call),
            attempt,
            max_attempts - 1,
            wait.ceiling,
            wait.delay,
            wait.hint,
            error,
            slept,
            detail=call.steps[-1].detail,
        )
    )


def emit_succeeded(operation: str, call: Call) -> None:
    """Emit that the call succeeded."""
    bus.emit(Succeeded(operation, _downstream_name(call), call.attempts))


def emit_gave_up(operation: str, call: Call, stop: Stop, error: Exception | None) -> None:
    """Emit that the call ends without an accepted result."""
    name = _downstream_name(call)
    if stop.reason is Reason.BUDGET_EMPTY:
        bus.emit(BudgetEmpty(operation, name))
    bus.emit(
        GaveUp(
            operation,
            name,
            call.attempts,
            stop.reason,
            call.waited,
            stop.retry_after,
            stop.hint,
            error,
            detail=_detail(call, error),
        )
    )


def _detail(call: Call, error: Exception | None) -> str:
    """Return the detail of the last attempt, or the name of the error's type for a rejection."""
    steps = call.steps
    rejected = isinstance(error, Rejected) or not steps
    return type(error).__name__ if rejected else steps[-1].detail


def _downstream_name(call: Call) -> str | None:
    return None if call.downstream is None else call.downstream.name
