"""The log level, stable name and fields of each event, shared by all log listeners.

Waits, failed calls and state changes of breakers are warnings. Successes after retries are logged
at level INFO, and all other events at level DEBUG.
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
"""Names for searches and alerts. They do not change when an event class is renamed."""


def log_level(event: Event) -> int | None:
    """Return the log level of an event, or None if it is not logged."""
    match event:
        case WillWait() | BreakerMoved():
            return logging.WARNING
        case GaveUp():
            # An error that is never retried is logged by the caller. If a breaker rejects a call,
            # the opening of the breaker has been logged as a warning before.
            is_not_retried = event.reason in (Reason.PERMANENT, Reason.RETRIED_BELOW)
            is_expected = not event.attempts or (is_not_retried and event.attempts == 1)
            return logging.DEBUG if is_expected else logging.WARNING
        case Succeeded():
            return logging.INFO if event.attempts > 1 else None
        case _:
            return logging.DEBUG


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event as simple values: an error as its type, a hint as a dict."""
    return {field.name: _simplify(getattr(event, field.name)) for field in fields(event)}


def _simplify(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case Hint():
            return value._asdict()
        case BaseException():
            return type(value).__name__
        case _:
            return value
