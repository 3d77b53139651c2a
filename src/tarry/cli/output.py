"""What the service tells, as tables for people and as JSON for programs.

Whatever comes from outside is text: no markup, no control characters.
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

from tarry.core.explain import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.wire.tasks import AttemptLog, RetryTask

STYLES = {
    "SUCCEEDED": "green",
    "EXHAUSTED": "red",
    "CANCELLED": "dim",
    "IN_FLIGHT": "cyan",
    "PAUSED": "yellow",
    "PARKED": "red",
    "PROBING": "yellow",
}
TASK_HEADINGS = ("task", "status", "attempts", "next", "target")
LETTER_HEADINGS = ("task", "reason", "attempts", "died", "target")

_PIPED = 10_000
"""Columns where nobody looks: a row is a line, whatever is in it."""


def console() -> Console:
    """Return the terminal, or the pipe."""
    made = Console(markup=False, highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPED
    return made


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, cut: str | None = None
) -> Table:
    """Return a table; the first column is what people copy, so it is never broken.

    The column `cut` ends where the terminal does; all others go on below.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, heading in enumerate(headings):
        if heading == cut:
            made.add_column(heading, overflow="ellipsis", no_wrap=True)
        else:
            made.add_column(heading, overflow="fold", no_wrap=place == 0)
    for row in rows:
        made.add_row(*(cell(value) for value in row))
    return made


def cell(value: object) -> Text:
    """Return a value as harmless text, states in their colours."""
    text = "" if value is None else plain(str(value))
    return Text(text, style=STYLES.get(text, ""))


def say(text: str) -> None:
    """Print one line of text."""
    console().print(Text(plain(text)))


def builtin(value: object) -> Any:
    """Return plain values under the API's names."""
    import msgspec

    return msgspec.to_builtins(value)


def print_json(value: object) -> None:
    """Print one document; what is not ASCII is escaped, so that it moves no cursor."""
    sys.stdout.write(json.dumps(builtin(value), indent=2) + "\n")


def print_line(value: object) -> None:
    """Print one line of JSON, now."""
    sys.stdout.write(json.dumps(builtin(value)) + "\n")
    sys.stdout.flush()


def task_row(task: RetryTask, now: float) -> tuple[object, ...]:
    """Return a task under `TASK_HEADINGS`; `now` in epoch seconds."""
    return (
        task.task_id,
        task.status,
        task.attempt_number,
        "" if task.next_attempt_at is None else until(task.next_attempt_at, now),
        f"{task.method} {task.target_url}",
    )


def letter_row(task: RetryTask, now: float) -> tuple[object, ...]:
    """Return a dead letter under `LETTER_HEADINGS`; `now` in epoch seconds."""
    return (
        task.task_id,
        task.reason,
        task.attempt_number,
        None if task.finished_at is None else since(task.finished_at, now),
        f"{task.method} {task.target_url}",
    )


def until(at: int, now: float) -> str:
    """Say when something comes: in 3 s."""
    left = at / 1000 - now
    return f"in {format_duration(left)}" if left > 0 else "now"


def since(at: int, now: float) -> str:
    """Say when something was: 3 s ago."""
    return f"{format_duration(max(0.0, now - at / 1000))} ago"


def clock(at: int) -> str:
    """Return the time of day, here, to the millisecond."""
    return f"{datetime.fromtimestamp(at / 1000).astimezone():%H:%M:%S}.{at % 1000:03}"


def came_to(attempt: AttemptLog) -> str:
    """Say what an attempt got: 503, timeout."""
    if attempt.response_status is not None:
        return str(attempt.response_status)
    return attempt.error_class or attempt.outcome


def followed(attempt: AttemptLog) -> str:
    """Say what was decided after an attempt."""
    decision = attempt.decision
    if decision is None or decision.action == "done":
        return ""
    if decision.action == "stop":
        return f"stopped: {decision.reason}"
    return f"next after {format_duration((decision.delay_ms or 0.0) / 1000)}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 attempt, 2 attempts."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Control characters (C0, DEL, C1), marks that reverse the direction of text, odd line ends.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Return one line in which control characters are written out, as Python writes them."""
    one_line = " ".join(text.split())
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], one_line)
