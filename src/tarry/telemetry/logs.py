"""The log level, stable name and fields of each event, and the built-in log listener.

The built-in listener writes to the standard library's logger "tarry". Every log record has the
event's fields in `record.tarry`, a dict, so that a JSON formatter need not parse the message.
Waits, most failed calls (see `log_level`) and state changes of breakers are warnings. Successes
after retries are INFO, successes of the first attempt are not logged, other events are DEBUG.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from tarry.core import events
from tarry.core.hints import Hint
from tarry.core.text import format_duration
from tarry.core.verdict import Reason
from tarry.errors import ResultNotAccepted

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ERROR_TEXT_LENGTH = 200

logger: logging.Logger = logging.getLogger("tarry")

is_enabled: Callable[[int], bool] = logger.isEnabledFor
"""Returns whether the logger logs at a level."""

EVENT_NAMES: dict[type[events.Event], str] = {
    events.AttemptStarted: "tarry.attempt_started",
    events.AttemptFailed: "tarry.attempt_failed",
    events.WillWait: "tarry.will_wait",
    events.Waited: "tarry.waited",
    events.Succeeded: "tarry.succeeded",
    events.GaveUp: "tarry.gave_up",
    events.BudgetEmpty: "tarry.budget_empty",
    events.BreakerStateChanged: "tarry.breaker_state_changed",
    events.HedgeFired: "tarry.hedge_fired",
    events.HedgeWon: "tarry.hedge_won",
}
"""Names for searches and alerts. They stay the same when an event class is renamed."""


def log(event: events.Event, logger: logging.Logger = logger) -> None:
    """Log one event."""
    level = log_level(event)
    if level is not None:
        log_to(logger, level, event)


def log_to(target: logging.Logger, level: int, event: events.Event) -> None:
    """Log one event to a logger."""
    if target.isEnabledFor(level):
        target.log(level, "%s", _message(event), extra={"tarry": event_fields(event)})


_MESSAGE_TEMPLATES: dict[type[events.Event], str] = {
    events.Succeeded: "{event.operation}: succeeded on attempt {event.attempts}",
    events.BreakerStateChanged: "{event.downstream}: breaker {event.before} -> {event.after}",
    events.BudgetEmpty: "{event.downstream}: the retry budget is empty",
    events.AttemptStarted: "{event.operation}: attempt {event.attempt} starts",
    events.AttemptFailed: "{event.operation}: attempt {event.attempt} failed ({event.kind.value})",
    events.HedgeFired: "{event.operation}: hedge started (attempt {event.attempt})",
    events.HedgeWon: "{event.operation}: hedge won (attempt {event.attempt})",
}


def _message(event: events.Event) -> str:
    match event:
        case events.Waited():
            slept, delay = format_duration(event.slept), format_duration(event.delay)
            return f"{event.operation}: slept {slept} (delay {delay})"
        case events.WillWait():
            limit = "" if event.max_retries is None else f" of {event.max_retries}"
            return (
                f"{event.operation}: {_failure_text(event)}; "
                f"retry {event.retry}{limit} in {format_duration(event.delay)} "
                f"(ceiling {format_duration(event.ceiling)}{_hint_text(event.hint)})"
            )
        case events.GaveUp():
            plural = "" if event.attempts == 1 else "s"
            retry_after = event.retry_after
            return (
                f"{event.operation}: gave up after {event.attempts} attempt{plural}: "
                f"{event.reason.description}"
                + ("" if retry_after is None else f"; retry after {format_duration(retry_after)}")
                + f" ({_failure_text(event)})"
            )
        case _:
            return _MESSAGE_TEMPLATES[type(event)].format(event=event)


def _hint_text(hint: Hint | None) -> str:
    """Describe the hint: the wait or the retry that the server asked for."""
    if hint is None:
        return ""
    requested = "a retry" if hint.delay is None else format_duration(hint.delay)
    return f", the server asked for {requested} ({hint.source})"


def _failure_text(event: events.WillWait | events.GaveUp) -> str:
    """Describe the failure on one short line, even if the error's text is long or unprintable."""
    error = event.error
    if error is None:
        return event.detail or "result not accepted"
    try:
        # The text of a gRPC error is very long: use its details.
        code, details = getattr(error, "code", None), getattr(error, "details", None)
        text = str(details() if callable(code) and callable(details) else error)
    except Exception:  # raised by the user's __str__
        text = "(cannot be shown)"
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    text = text.removeprefix(f"{event.operation}: ")[:MAX_ERROR_TEXT_LENGTH]
    if isinstance(error, ResultNotAccepted) and text:
        return text
    return (event.detail or type(error).__name__) + (f": {text}" if text else "")


def log_level(event: events.Event) -> int | None:
    """Return the log level of an event, or None if the event is not logged."""
    match event:
        case events.WillWait() | events.BreakerStateChanged():
            return logging.WARNING
        case events.GaveUp():
            # The program itself logs an error that is not retried. A call that was rejected before
            # its first attempt needs no warning: the opening of the breaker was logged as one.
            is_not_retried = event.reason in (Reason.PERMANENT, Reason.RETRIED_BELOW)
            needs_no_warning = not event.attempts or (is_not_retried and event.attempts == 1)
            return logging.DEBUG if needs_no_warning else logging.WARNING
        case events.Succeeded():
            return logging.INFO if event.attempts > 1 else None
        case _:
            return logging.DEBUG


def event_fields(event: events.Event) -> dict[str, Any]:
    """Return the fields of an event as simple values: an error as its type, a hint as a dict.

    The time is left out, because each log record has its own.
    """
    fields = events.fields_of(event).items()
    return {name: _simple_value(value) for name, value in fields if name != "time"}


def _simple_value(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Hint):
        return value._asdict()  # pyright: ignore[reportPrivateUsage] - same package
    return type(value).__name__ if isinstance(value, BaseException) else value
