"""`tarry tail`: print live events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.cli.options import DEFAULT_SERVER, ApiKeyOption, JsonOption, ServerOption
from tarry.cli.remote import connect

if TYPE_CHECKING:
    from tarry.wire.tasks import ServiceEvent

_STYLES = {"succeeded": "green", "exhausted": "red", "parked": "red", "missed": "yellow"}


def tail(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """Print live events: attempts, finished tasks, downstreams that fail or recover.

    Prints events from now on, until Ctrl-C. With --json, each line is one event.
    """
    from tarry.cli.output import print_json_line, to_builtins

    with connect(server, api_key) as client:
        for event in client.events():
            if as_json:
                fields = to_builtins(event)
                present = {name: value for name, value in fields.items() if value is not None}
                print_json_line(present)
            else:
                _print_event(event)


def _print_event(event: ServiceEvent) -> None:
    from rich.text import Text

    from tarry.cli.output import console, printable, time_of_day

    time = "" if event.at is None else time_of_day(event.at)
    line = Text(f"{time:12}  ", style="dim")
    line.append(f"{printable(event.kind):10}  ", style=_STYLES.get(event.kind, "not dim"))
    parts = [event.task_id or "", event.lane or "", event_details(event)]
    line.append("  ".join(printable(part) for part in parts if part), style="not dim")
    console().print(line, soft_wrap=True)


def event_details(event: ServiceEvent) -> str:
    """Return the details of an event other than its kind, task and lane."""
    from tarry.cli.output import attempt_result, decision_text
    from tarry.core.text import format_duration

    if event.missed is not None:
        return f"{event.missed} events were dropped: this reader is too slow"
    if event.attempt is None:
        return event.reason or ""
    attempt = event.attempt
    took = (
        "" if attempt.duration_ms is None else f" in {format_duration(attempt.duration_ms / 1000)}"
    )
    decision = decision_text(attempt)
    return f"attempt {attempt.attempt_number} got {attempt_result(attempt)}{took}" + (
        f"; {decision}" if decision else ""
    )
