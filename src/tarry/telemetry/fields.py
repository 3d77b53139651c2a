"""What a log says of an event, whatever writes it: a level, a name that stays, and fields.

Waits are warnings; what went well in the end is information; the rest is for debugging.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tarry.core.events import (
    AttemptFailed,
    AttemptStarted,
    BreakerMoved,
    BudgetEmpty,
    GaveUp,
    HedgeFired,
    HedgeWon,
    Succeeded,
    Waited,
    WaitEvent,
    WillWait,
)
from tarry.core.verdict import Reason

if TYPE_CHECKING:
    from tarry.core.events import Event

NAMES: dict[type[Event], str] = {
    AttemptStarted: "tarry.attempt_started",
    AttemptFailed: "tarry.attempt_failed",
    WillWait: "tarry.will_wait",
    Waited: "tarry.waited",
    Succeeded: "tarry.succeeded",
    GaveUp: "tarry.gave_up",
    BudgetEmpty: "tarry.budget_empty",
    BreakerMoved: "tarry.breaker_moved",
    HedgeFired: "tarry.hedge_fired",
    HedgeWon: "tarry.hedge_won",
}
"""What people search and alert for: it stays when a class is renamed."""


def level_of(event: Event) -> int | None:
    """Return the level of an event; None: it is not worth a line."""
    match event:
        case WillWait() | BreakerMoved():
            return logging.WARNING
        case GaveUp():
            # An error that was never to be retried is the caller's business, not ours; and while
            # a breaker is open, that it opened has been said.
            passed_on = event.reason in (Reason.PERMANENT, Reason.RETRIED_BELOW)
            quiet = not event.attempts or (passed_on and event.attempts == 1)
            return logging.DEBUG if quiet else logging.WARNING
        case Succeeded():
            return logging.INFO if event.attempts > 1 else None
        case _:
            return logging.DEBUG


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of an event as plain values."""
    match event:
        case Waited():
            return _wait_fields(event) | {"slept": event.slept}
        case WillWait():
            return _wait_fields(event)
        case GaveUp():
            return {
                "operation": event.operation,
                "downstream": event.downstream,
                "attempts": event.attempts,
                "reason": event.reason.value,
                "waited": event.waited,
                "retry_after": event.retry_after,
                "hint": None if event.hint is None else event.hint._asdict(),
                "error": _type_name(event.error),
            }
        case Succeeded():
            return {"operation": event.operation, "attempts": event.attempts}
        case BreakerMoved():
            return {
                "downstream": event.downstream,
                "before": event.before.value,
                "after": event.after.value,
            }
        case AttemptFailed():
            return {
                "operation": event.operation,
                "attempt": event.attempt,
                "kind": event.kind.value,
                "error": _type_name(event.error),
            }
        case AttemptStarted() | HedgeFired() | HedgeWon():
            return {"operation": event.operation, "attempt": event.attempt}
        case _:
            return {"operation": event.operation, "downstream": event.downstream}


def _wait_fields(event: WaitEvent) -> dict[str, Any]:
    return {
        "operation": event.operation,
        "downstream": event.downstream,
        "retry": event.retry,
        "max_retries": event.max_retries,
        "ceiling": event.ceiling,
        "delay": event.delay,
        "error": _type_name(event.error),
        "hint": None if event.hint is None else event.hint._asdict(),
    }


def _type_name(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__
