"""Output of the commands: text, tables and JSON on the terminal, and files.

Text from outside, such as a target's response, is printed literally: rich does not interpret it
as markup, and control characters are escaped.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from tarry.core.text import format_duration
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tarry.wire.tasks import AttemptLog

T = TypeVar("T")

STYLE_BY_STATE = {
    "SUCCEEDED": "green",
    "EXHAUSTED": "red",
    "CANCELLED": "dim",
    "IN_FLIGHT": "cyan",
    "PAUSED": "yellow",
    "PARKED": "red",
    "PROBING": "yellow",
}
POLICY_SUFFIXES = (".json", ".toml")
"""Suffixes of policy files that commands write."""

_PIPE_WIDTH = 10_000
"""Width of output that is not a terminal, in characters: so large that no table row is wrapped."""
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters (C0, DEL, C1), bidirectional marks, line separators and surrogates."""


def to_printable_line(text: str) -> str:
    """Join the lines of a text, and escape control characters as in Python source."""
    one_line = " ".join(text.split())
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], one_line)


def console() -> Console:
    """Return a console for standard output."""
    from rich.console import Console

    result = Console(markup=False, highlight=False, emoji=False)
    if not result.is_terminal:
        result.width = _PIPE_WIDTH
    return result


class UpdateProgress(Protocol):
    """Updates a progress bar."""

    def __call__(self, finished: int, total: int | None, description: str | None = None, /) -> None:
        """Show the number of finished items and of all items (None: unknown).

        Without a description, the last one stays.
        """
        ...


@contextmanager
def progress_bar(description: str, *, hidden: bool = False) -> Generator[UpdateProgress]:
    """Show a progress bar if standard error is a terminal; yield the function that updates it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=hidden or not sys.stderr.isatty(),
        transient=True,
    ) as progress:
        task = progress.add_task(description, total=None)

        def update(finished: int, total: int | None, description: str | None = None) -> None:
            progress.update(task, completed=finished, total=total, description=description)

        yield update


def print_text(text: str) -> None:
    """Print a text as one line."""
    console().print(to_printable_line(text))


def print_result(value: object, text: str, *, as_json: bool) -> None:
    """Print the value as JSON if `as_json`, otherwise the text that describes the value."""
    if as_json:
        print_json(value)
    else:
        print_text(text)


def print_limit_note(limit: int) -> None:
    """Print to standard error that a list has more entries than --limit."""
    typer.echo(f"only the first {limit} are listed; use --limit to list more", err=True)


def print_list(
    values: Sequence[T],
    headings: Sequence[str],
    to_row: Callable[[T], Sequence[object]],
    *,
    as_json: bool,
    if_empty: str = "none",
    cut_column: str | None = None,
    next_cursor: str | None = None,
) -> None:
    """Print values as JSON, like a page of the API, or as a table of the cells of `to_row`."""
    if as_json:
        document: dict[str, object] = {"items": values}
        if next_cursor is not None:
            document["nextCursor"] = next_cursor
        print_json(document)
    elif not values:
        print_text(if_empty)
    else:
        console().print(table(headings, map(to_row, values), cut_column=cut_column))


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, cut_column: str | None = None
) -> Table:
    """Return a table that fits the terminal: cells of `cut_column` are cut, and no others.

    Without `cut_column`, cells are wrapped, except in the first column, so that ids can be copied.
    """
    from rich.table import Table

    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    lines = [[format_cell(value) for value in row] for row in rows]
    for index, heading in enumerate(headings):
        if cut_column is None:
            result.add_column(heading, overflow="fold", no_wrap=index == 0)
        elif heading != cut_column:
            width = max([len(heading), *(line[index].cell_len for line in lines)])
            result.add_column(heading, no_wrap=True, min_width=width)
        else:
            # rich narrows only columns that may wrap, so the cells are marked instead.
            result.add_column(heading, overflow="ellipsis", min_width=len(heading))
            for line in lines:
                line[index].no_wrap = True
    for line in lines:
        result.add_row(*line)
    return result


def report_table() -> Table:
    """Return an empty table with a line below the headings, for `simulate` and `tune`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)


def format_cell(value: object) -> Text:
    """Return a table cell; task statuses and downstream states are coloured."""
    from rich.text import Text

    text = "" if value is None else to_printable_line(str(value))
    return Text(text, style=STYLE_BY_STATE.get(text, ""))


def to_builtins(value: object) -> Any:
    """Return a struct of the API as dicts, lists and scalars, with the field names of the API."""
    import msgspec

    return msgspec.to_builtins(value)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print JSON; non-ASCII characters are escaped, because some of them are control characters."""
    sys.stdout.write(json.dumps(to_builtins(value), indent=indent) + "\n")
    sys.stdout.flush()  # so that the reader of `tarry tail` gets each event at once


def attempt_result(attempt: AttemptLog) -> str:
    """Return the result of an attempt: a status such as 503, or an error such as timeout."""
    if attempt.response_status is not None:
        return str(attempt.response_status)
    return attempt.error_class or attempt.outcome


def decision_text(attempt: AttemptLog) -> str:
    """Return when the next attempt starts or why none follows; empty after a success."""
    decision = attempt.decision
    if decision is None or decision.action == "done":
        return ""
    if decision.action == "stop":
        return f"stopped: {decision.reason}"
    return f"next after {format_duration((decision.delay_ms or 0.0) / 1000)}"


def format_ms(ms: float | None) -> str:
    """Return a duration in milliseconds as text; empty for None."""
    return "" if ms is None else format_duration(ms / 1000)


def time_until(epoch_ms: int | None, now_s: float) -> str:
    """Return when a time will be, such as "in 3 s", or "now" if it has passed; empty for None."""
    if epoch_ms is None:
        return ""
    seconds_left = epoch_ms / 1000 - now_s
    return f"in {format_duration(seconds_left)}" if seconds_left > 0 else "now"


def time_since(epoch_ms: int | None, now_s: float) -> str:
    """Return how long ago a time was, such as "3 s ago"; empty for None."""
    if epoch_ms is None:
        return ""
    return f"{format_duration(max(0.0, now_s - epoch_ms / 1000))} ago"


def time_of_day(epoch_ms: int) -> str:
    """Return the time of day in the local time zone, with milliseconds."""
    return f"{datetime.fromtimestamp(epoch_ms / 1000).astimezone():%H:%M:%S}.{epoch_ms % 1000:03}"


def check_output_path(
    path: Path | None, suffixes: Sequence[str] = (), option: str = "--out"
) -> None:
    """Raise `ConfigurationError` if a file cannot be written, or has none of the suffixes.

    Without `suffixes`, any name is allowed. Commands call this before a long run, so that its
    results are not lost.
    """
    if path is None:
        return
    from tarry.simulator.documents import check_output_path as check_writable

    if suffixes and path.suffix.lower() not in suffixes:
        rule = f"must be a file name that ends in {' or '.join(suffixes)}"
        raise ConfigurationError(option, rule, str(path))
    with _prefix_errors(option):
        check_writable(path)


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a file atomically; error messages name the option and the path."""
    from tarry.simulator.documents import write_atomically

    with _prefix_errors(option):
        write_atomically(path, text.encode())


@contextmanager
def _prefix_errors(option: str) -> Generator[None]:
    """Prefix the message of a `ConfigurationError` with the name of the option."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None
