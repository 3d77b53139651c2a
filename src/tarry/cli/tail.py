"""`tarry tail`: what happens, as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.cli.remote import DEFAULT_SERVER, Json, Key, Server, connected

if TYPE_CHECKING:
    from tarry.wire.tasks import EventNews

_STYLES = {"succeeded": "green", "exhausted": "red", "parked": "red", "missed": "yellow"}


def tail(server: Server = DEFAULT_SERVER, key: Key = None, as_json: Json = False) -> None:
    """Print events as they happen: attempts, tasks that end, downstreams that fail or return.

    It begins now and ends with Ctrl-C. With --json, each line is an event.
    """
    from tarry.cli.output import builtin, print_line

    with connected(server, key) as client:
        for event in client.events():
            if as_json:
                given = builtin(event)
                print_line({name: given[name] for name in given if given[name] is not None})
            else:
                _show(event)


def _show(event: EventNews) -> None:
    from rich.text import Text

    from tarry.cli.output import clock, console, plain

    at = "" if event.at is None else clock(event.at)
    line = Text(f"{at:12}  ", style="dim")
    line.append(f"{plain(event.kind):10}  ", style=_STYLES.get(event.kind, "not dim"))
    parts = [event.task_id or "", event.lane or "", said(event)]
    line.append("  ".join(plain(part) for part in parts if part), style="not dim")
    console().print(line, soft_wrap=True)


def said(event: EventNews) -> str:
    """Say what is special about an event."""
    from tarry.cli.output import came_to, followed
    from tarry.core.explain import format_duration

    if event.missed is not None:
        return f"{event.missed} events, for this reader was too slow"
    if event.attempt is None:
        return event.reason or ""
    attempt = event.attempt
    took = (
        "" if attempt.duration_ms is None else f" in {format_duration(attempt.duration_ms / 1000)}"
    )
    then = followed(attempt)
    return f"attempt {attempt.attempt_number} got {came_to(attempt)}{took}" + (
        f"; {then}" if then else ""
    )
