"""Standard logging: the listener that comes with the package, under the logger "tarry".

Every record carries its fields as attributes (`record.tarry`, a dict), so that a JSON formatter
needs no parsing. Here are the words for people; levels and fields are in `fields`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

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
from tarry.core.explain import duration
from tarry.telemetry.fields import fields_of, level_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.events import Event

logger: logging.Logger = logging.getLogger("tarry")


enabled: Callable[[int], bool] = logger.isEnabledFor


def log(event: Event) -> None:
    """Write one event."""
    level = level_of(event)
    if level is not None and logger.isEnabledFor(level):
        logger.log(level, "%s", _message(event), extra={"tarry": fields_of(event)})


def _message(event: Event) -> str:
    match event:
        case Waited():
            slept, delay = duration(event.slept), duration(event.delay)
            return f"{event.operation}: slept {slept} (delay {delay})"
        case WillWait():
            hint = f", the server asked for it ({event.hint.source})" if event.hint else ""
            return (
                f"{event.operation}: {_error(event.error)}; "
                f"retry {event.retry} of {event.max_retries} in {duration(event.delay)} "
                f"(ceiling {duration(event.ceiling)}{hint})"
            )
        case GaveUp():
            plural = "" if event.attempts == 1 else "s"
            after = event.retry_after
            return (
                f"{event.operation}: gave up after {event.attempts} attempt{plural}: "
                f"{event.reason.words}"
                + ("" if after is None else f"; retry after {duration(after)}")
                + f" ({_error(event.error)})"
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


def _error(error: BaseException | None) -> str:
    """Return an error on one short line: it may hold anything, also line breaks and secrets."""
    if error is None:
        return "result not accepted"
    try:
        text = " ".join(str(error).split())
    except Exception:  # a __str__ of the user's
        text = "(cannot be shown)"
    text = "".join(c if c.isprintable() else "?" for c in text)
    return type(error).__name__ + (f": {text[:_LONGEST]}" if text else "")


_LONGEST = 200
