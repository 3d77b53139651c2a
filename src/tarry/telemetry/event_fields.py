"""What a log says of an event, whatever writes it: a level, a name that stays, and fields.

Waits are warnings; what went well in the end is information; the rest is for debugging.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from enum import Enum
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
    WillWait,
)
from tarry.core.hints import Hint
from tarry.core.verdict import Reason

if TYPE_CHECKING:
    from tarry.core.events import Event

EVENT_NAMES: dict[type[Event], str] = {
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


def log_level(event: Event) -> int | None:
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


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event as plain values: an error by its type, a hint as a dict."""
    return {field.name: _plain(getattr(event, field.name)) for field in fields(event)}


def _plain(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case Hint():
            return value._asdict()
        case BaseException():
            return type(value).__name__
        case _:
            return value
