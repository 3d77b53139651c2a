"""Standard logging: the listener that comes with the package, under the logger "tarry".

Every record carries its fields as attributes (`record.tarry`, a dict), so that a JSON formatter
needs no parsing. Waits are warnings; what went well in the end is information.
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
from tarry.core.explain import duration
from tarry.core.verdict import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.events import Event

logger: logging.Logger = logging.getLogger("tarry")


enabled: Callable[[int], bool] = logger.isEnabledFor


def log(event: Event) -> None:
    """Write one event."""
    match event:
        case Waited():
            fields = _wait_fields(event) | {"slept": event.slept}
            slept, delay = duration(event.slept), duration(event.delay)
            _write(logging.DEBUG, fields, f"{event.operation}: slept {slept} (delay {delay})")
        case WillWait():
            hint = f", the server asked for it ({event.hint.source})" if event.hint else ""
            _write(
                logging.WARNING,
                _wait_fields(event),
                f"{event.operation}: {_error(event.error)}; "
                f"retry {event.retry} of {event.max_retries} in {duration(event.delay)} "
                f"(ceiling {duration(event.ceiling)}{hint})",
            )
        case GaveUp():
            fields = {
                "operation": event.operation,
                "downstream": event.downstream,
                "attempts": event.attempts,
                "reason": event.reason.value,
                "waited": event.waited,
                "retry_after": event.retry_after,
                "hint": None if event.hint is None else event.hint._asdict(),
                "error": _type_name(event.error),
            }
            plural = "" if event.attempts == 1 else "s"
            # An error that was never to be retried is the caller's business, not ours; and while
            # a breaker is open, that it opened has been said.
            passed_on = event.reason in (Reason.PERMANENT, Reason.RETRIED_BELOW)
            quiet = not event.attempts or (passed_on and event.attempts == 1)
            after = event.retry_after
            _write(
                logging.DEBUG if quiet else logging.WARNING,
                fields,
                f"{event.operation}: gave up after {event.attempts} attempt{plural}: "
                f"{event.reason.words}"
                + ("" if after is None else f"; retry after {duration(after)}")
                + f" ({_error(event.error)})",
            )
        case Succeeded() if event.attempts > 1:
            fields = {"operation": event.operation, "attempts": event.attempts}
            message = f"{event.operation}: succeeded on attempt {event.attempts}"
            _write(logging.INFO, fields, message)
        case BreakerMoved():
            fields = {
                "downstream": event.downstream,
                "before": event.before.value,
                "after": event.after.value,
            }
            message = f"{event.downstream}: breaker {event.before.value} -> {event.after.value}"
            _write(logging.WARNING, fields, message)
        case BudgetEmpty():
            fields = {"operation": event.operation, "downstream": event.downstream}
            _write(logging.DEBUG, fields, f"{event.downstream}: the retry budget is empty")
        case AttemptStarted():
            fields = {"operation": event.operation, "attempt": event.attempt}
            _write(logging.DEBUG, fields, f"{event.operation}: attempt {event.attempt} starts")
        case AttemptFailed():
            fields = {
                "operation": event.operation,
                "attempt": event.attempt,
                "kind": event.kind.value,
                "error": _type_name(event.error),
            }
            message = f"{event.operation}: attempt {event.attempt} failed ({event.kind.value})"
            _write(logging.DEBUG, fields, message)
        case HedgeFired() | HedgeWon():
            fields = {"operation": event.operation, "attempt": event.attempt}
            verb = "sent" if isinstance(event, HedgeFired) else "won"
            _write(logging.DEBUG, fields, f"{event.operation}: copy {event.attempt} {verb}")
        case _:
            return


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


def _write(level: int, fields: dict[str, Any], message: str) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, "%s", message, extra={"tarry": fields})


def _type_name(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


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
