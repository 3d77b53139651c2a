"""Standard logging: the listener that comes with the package, under the logger "tarry".

Every record carries its fields as attributes (`record.tarry`, a dict), so that a JSON formatter
needs no parsing. Here are the words for people; levels and fields are in `fields`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tarry.core.checks import duration_or_none
from tarry.core.durations import format_duration
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
from tarry.errors import ResultNotAccepted
from tarry.telemetry.event_fields import event_fields, log_level

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.events import Event
    from tarry.core.hints import Hint

logger: logging.Logger = logging.getLogger("tarry")


enabled: Callable[[int], bool] = logger.isEnabledFor


def log(event: Event) -> None:
    """Write one event."""
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
                f"(ceiling {format_duration(event.ceiling)}{_asked(event.hint)})"
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


def _asked(hint: Hint | None) -> str:
    """Return what the server asked for: the wait may be longer, by our own delay."""
    if hint is None:
        return ""
    delay = duration_or_none(hint.delay)
    wish = "a retry" if delay is None else format_duration(delay)
    return f", the server asked for {wish} ({hint.source})"


def _failure(event: WillWait | GaveUp) -> str:
    """Return what went wrong on one short line: it may hold anything, also line breaks."""
    error = event.error
    if error is None:
        return event.detail or "result not accepted"
    try:
        text = " ".join(str(_words(error)).split())
    except Exception:  # of the user's
        text = "(cannot be shown)"
    text = "".join(c if c.isprintable() else "?" for c in text)
    text = text.removeprefix(f"{event.operation}: ")[:_LONGEST]
    if isinstance(error, ResultNotAccepted) and text:
        return text
    return (event.detail or type(error).__name__) + (f": {text}" if text else "")


def _words(error: Any) -> object:
    """Return what an error says; that of a gRPC call has it apart, and is a page as a text."""
    is_grpc = callable(getattr(error, "code", None)) and callable(getattr(error, "details", None))
    return error.details() if is_grpc else error


_LONGEST = 200
