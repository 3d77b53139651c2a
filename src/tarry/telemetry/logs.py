"""The built-in listener: writes events to the standard library's logger "tarry".

Every log record has the event's fields in `record.tarry`, a dict, so that a JSON formatter need not
parse the message. This module builds the messages; levels and fields are in `event_fields`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tarry.core.checks import duration_or_none
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
from tarry.core.text import format_duration
from tarry.errors import ResultNotAccepted
from tarry.telemetry.event_fields import event_fields, log_level

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.events import Event
    from tarry.core.hints import Hint

MAX_ERROR_TEXT_LENGTH = 200

logger: logging.Logger = logging.getLogger("tarry")


enabled: Callable[[int], bool] = logger.isEnabledFor


def log(event: Event) -> None:
    """Log one event."""
    level = log_level(event)
    if level is not None and logger.isEnabledFor(level):
        logger.log(level, "%s", _message(event), extra={"tarry": event_fields(event)})


def _message(event: Event) -> str:
    match event:
        case Waited():
            slept, delay = format_duration(event.slept), format_duration(event.delay)
            return f"{event.operation}: slept {slept} (delay {delay})"
        case WillWait():
            return (
                f"{event.operation}: {_failure(event)}; "
                f"retry {event.retry} of {event.max_retries} in {format_duration(event.delay)} "
                f"(ceiling {format_duration(event.ceiling)}{_hint_text(event.hint)})"
            )
        case GaveUp():
            plural = "" if event.attempts == 1 else "s"
            after = event.retry_after
            return (
                f"{event.operation}: gave up after {event.attempts} attempt{plural}: "
                f"{event.reason.description}"
                + ("" if after is None else f"; retry after {format_duration(after)}")
                + f" ({_failure(event)})"
            )
        case Succeeded():
            return f"{event.operation}: succeeded on attempt {event.attempts}"
        case BreakerMoved():
            return f"{event.downstream}: breaker {event.before.value} -> {event.after.value}"
        case BudgetEmpty():
            return f"{event.downstream}: the retry budget is empty"
        case AttemptStarted():
            return f"{event.operation}: attempt {event.attempt} starts"
        case AttemptFailed():
            return f"{event.operation}: attempt {event.attempt} failed ({event.kind.value})"
        case HedgeFired():
            return f"{event.operation}: copy {event.attempt} sent"
        case HedgeWon():
            return f"{event.operation}: copy {event.attempt} won"
        case _:
            return f"{event.operation}: {type(event).__name__}"


def _hint_text(hint: Hint | None) -> str:
    """Describe the delay that the server requested. The actual delay may be longer."""
    if hint is None:
        return ""
    delay = duration_or_none(hint.delay)
    request = "a retry" if delay is None else format_duration(delay)
    return f", the server asked for {request} ({hint.source})"


def _failure(event: WillWait | GaveUp) -> str:
    """Describe the failure on one short line, even if the error's text is long or unprintable."""
    error = event.error
    if error is None:
        return event.detail or "result not accepted"
    try:
        text = " ".join(str(_error_text(error)).split())
    except Exception:  # raised by the user's __str__
        text = "(cannot be shown)"
    text = "".join(c if c.isprintable() else "?" for c in text)
    text = text.removeprefix(f"{event.operation}: ")[:MAX_ERROR_TEXT_LENGTH]
    if isinstance(error, ResultNotAccepted) and text:
        return text
    return (event.detail or type(error).__name__) + (f": {text}" if text else "")


def _error_text(error: Any) -> object:
    """Return the text of an error. For gRPC errors, whose text is very long, return the details."""
    is_grpc_error = callable(getattr(error, "code", None)) and callable(
        getattr(error, "details", None)
    )
    return error.details() if is_grpc_error else error
