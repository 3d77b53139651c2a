"""Terminal output of the commands that talk to a service: text and tables, or JSON.

Text from outside, such as a target's response, is printed literally: rich does not interpret it
as markup, and control characters are escaped.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tarry.core.text import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.wire.tasks import AttemptLog, RetryTask

STATE_STYLES = {
    "SUCCEEDED": "green",
    "EXHAUSTED": "red",
    "CANCELLED": "dim",
    "IN_FLIGHT": "cyan",
    "PAUSED": "yellow",
    "PARKED": "red",
    "PROBING": "yellow",
}
TASK_HEADINGS = ("task", "status", "attempts", "next", "target")
DEAD_LETTER_HEADINGS = ("task", "reason", "attempts", "died", "target")

_PIPE_WIDTH = 10_000
"""Width of output that is not a terminal, in characters, so that a table row is never wrapped."""
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters (C0, DEL, C1), bidirectional marks, line separators and surrogates."""


# --- text and tables ------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Return text as one line, with control characters escaped as in Python source."""
    one_line = " ".join(text.split())
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], one_line)


def console() -> Console:
    """Return a console for standard output."""
    result = Console(markup=False, highlight=False, emoji=False)
    if not result.is_terminal:
        result.width = _PIPE_WIDTH
    return result


def print_text(text: str) -> None:
    """Print one line of text."""
    console().print(Text(printable(text)))


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, truncate: str | None = None
) -> Table:
    """Return a table. The first column is never wrapped, so that ids can be copied.

    The column with the heading `truncate` is cut at the edge of the terminal. Other columns are
    wrapped.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        if heading == truncate:
            result.add_column(heading, overflow="ellipsis", no_wrap=True)
        else:
            result.add_column(heading, overflow="fold", no_wrap=index == 0)
    for row in rows:
        result.add_row(*(format_cell(value) for value in row))
    return result


def format_cell(value: object) -> Text:
    """Return a value as printable text; states are coloured."""
    text = "" if value is None else printable(str(value))
    return Text(text, style=STATE_STYLES.get(text, ""))


# --- JSON -----------------------------------------------------------------------------------------


def to_builtins(value: object) -> Any:
    """Return a wire type as dicts, lists and scalars, with the field names of the API."""
    import msgspec

    return msgspec.to_builtins(value)


def print_json(value: object) -> None:
    """Print a JSON document; non-ASCII is escaped, because it may contain control characters."""
    sys.stdout.write(json.dumps(to_builtins(value), indent=2) + "\n")


def print_json_line(value: object) -> None:
    """Print a JSON document on one line, and flush."""
    sys.stdout.write(json.dumps(to_builtins(value)) + "\n")
    sys.stdout.flush()


# --- tasks, attempts and times --------------------------------------------------------------------


def task_row(task: RetryTask, now: float) -> tuple[object, ...]:
    """Return the cells of a task under `TASK_HEADINGS`; `now` is in epoch seconds."""
    return (
        task.task_id,
        task.status,
        task.attempt_number,
        "" if task.next_attempt_at is None else time_until(task.next_attempt_at, now),
        f"{task.method} {task.target_url}",
    )


def dead_letter_row(task: RetryTask, now: float) -> tuple[object, ...]:
    """Return the cells of a dead letter under `DEAD_LETTER_HEADINGS`; `now` as in `task_row`."""
    return (
        task.task_id,
        task.reason,
        task.attempt_number,
        None if task.finished_at is None else time_since(task.finished_at, now),
        f"{task.method} {task.target_url}",
    )


def attempt_result(attempt: AttemptLog) -> str:
    """Return the result of an attempt: a status such as 503, or an error such as timeout."""
    if attempt.response_status is not None:
        return str(attempt.response_status)
    return attempt.error_class or attempt.outcome


def decision_text(attempt: AttemptLog) -> str:
    """Return the decision after an attempt as text: when to retry, or why not; empty if done."""
    decision = attempt.decision
    if decision is None or decision.action == "done":
        return ""
    if decision.action == "stop":
        return f"stopped: {decision.reason}"
    return f"next after {format_duration((decision.delay_ms or 0.0) / 1000)}"


def time_until(epoch_ms: int, now: float) -> str:
    """Return how far a time is in the future, such as "in 3 s"; "now" if it is in the past."""
    seconds_left = epoch_ms / 1000 - now
    return f"in {format_duration(seconds_left)}" if seconds_left > 0 else "now"


def time_since(epoch_ms: int, now: float) -> str:
    """Return how far a time is in the past, such as "3 s ago"."""
    return f"{format_duration(max(0.0, now - epoch_ms / 1000))} ago"


def time_of_day(epoch_ms: int) -> str:
    """Return the local time of day with milliseconds."""
    return f"{datetime.fromtimestamp(epoch_ms / 1000).astimezone():%H:%M:%S}.{epoch_ms % 1000:03}"


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 attempt" or "2 attempts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
