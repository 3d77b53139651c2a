"""`tarry top`: tasks by status, rates and the busiest downstreams, live."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.cli.options import DEFAULT_SERVER, ApiKeyOption, JsonOption, ServerOption
from tarry.cli.remote import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from tarry.client import Client
    from tarry.wire.tasks import DownstreamInfo

REFRESH_INTERVAL_S = 1.0
_MAX_DOWNSTREAMS = 1_000
"""Number of downstreams to fetch; the busiest of them are shown."""
_LINES_AROUND_ROWS = 5
"""Lines of the terminal that the rows of downstreams cannot use."""
_SAMPLE = re.compile(r"(retry_\w+)\{([^}]*)\} (\S+)")
"""Line of the Prometheus text format: metric, labels and value."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LABEL_OF_METRIC = {
    "retry_tasks": "status",
    "retry_attempts_total": "outcome",
    "retry_task_outcomes_total": "outcome",
}
"""Metrics to show, and the label by which each is summed up."""


class Snapshot(NamedTuple):
    """Metrics and downstreams at one moment."""

    at: float
    """Monotonic seconds."""
    metrics: dict[str, dict[str, float]]
    """Values of each metric in `_LABEL_OF_METRIC`, by the value of its label."""
    downstreams: list[DownstreamInfo]
    has_rates: bool = True
    """Whether the service exposes attempt counters, which only an operator's key can read."""


def top(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """Show tasks by status, rates and the busiest downstreams, once a second.

    Runs until Ctrl-C. Without a terminal, prints one table. With --json, each line is a snapshot.
    """
    from rich.live import Live

    from tarry.cli.output import console, print_json_line

    terminal = console()
    with connect(server, api_key) as client:
        pairs = _snapshot_pairs(client, server, api_key)
        if as_json:
            for previous, current in pairs:
                print_json_line(summarize(previous, current))
        elif not terminal.is_terminal:
            terminal.print(_render(*next(pairs), max_rows=_MAX_DOWNSTREAMS))
        else:
            with Live(console=terminal, auto_refresh=False, screen=True) as live:
                for previous, current in pairs:
                    live.update(
                        _render(previous, current, terminal.height - _LINES_AROUND_ROWS),
                        refresh=True,
                    )


def summarize(previous: Snapshot, current: Snapshot) -> dict[str, Any]:
    """Return task counts, rates per second where known, and downstreams, for `--json`."""
    from tarry.cli.output import to_builtins

    return {
        "tasks": {name: int(count) for name, count in current.metrics["retry_tasks"].items()},
        "attemptsPerSecond": _rates("retry_attempts_total", previous, current),
        "finishedPerSecond": _rates("retry_task_outcomes_total", previous, current),
        "downstreams": to_builtins(current.downstreams),
    }


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Return the metrics in `_LABEL_OF_METRIC` from the Prometheus text format."""
    metrics: dict[str, dict[str, float]] = {name: {} for name in _LABEL_OF_METRIC}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None and sample[1] in metrics:
            label = dict(_LABEL.findall(sample[2])).get(_LABEL_OF_METRIC[sample[1]], "")
            counts = metrics[sample[1]]
            counts[label] = counts.get(label, 0.0) + float(sample[3])
    return metrics


def _snapshot_pairs(
    client: Client, server: str, api_key: str | None
) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield each snapshot together with the previous one, forever."""
    from tarry.runtime.clocks import system

    previous = _take_snapshot(client, server, api_key)
    while True:
        system.sleep(REFRESH_INTERVAL_S, None)
        current = _take_snapshot(client, server, api_key)
        yield previous, current
        previous = current


def _take_snapshot(client: Client, server: str, api_key: str | None) -> Snapshot:
    from itertools import islice

    from tarry.runtime.clocks import system

    downstreams = sorted(
        islice(client.downstreams(), _MAX_DOWNSTREAMS),
        key=lambda info: (-info.pending - info.in_flight, -info.dead, info.lane),
    )
    text = _fetch_metrics(server, api_key)
    return Snapshot(system.now(), parse_metrics(text), downstreams, "retry_attempts_total" in text)


def _fetch_metrics(server: str, api_key: str | None) -> str:
    import httpx

    from tarry.client.errors import ServiceUnavailable, ServiceUnreachable

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(f"{server.rstrip('/')}/metrics", headers=headers, trust_env=False)
    except httpx.RequestError as error:
        msg = f"GET /metrics got no response: {error}"
        raise ServiceUnreachable(msg) from error
    if not response.is_success:
        msg = f"GET /metrics was answered with {response.status_code}"
        raise ServiceUnavailable(msg, status=response.status_code)
    return response.text


def _rates(name: str, previous: Snapshot, current: Snapshot) -> dict[str, float] | None:
    """Return the increase per second of a counter, by label; None without counters."""
    if not current.has_rates:
        return None
    elapsed_s = max(current.at - previous.at, 1e-9)
    # A restart of the service resets its counters, so a negative difference counts as 0.
    return {
        label: max(0.0, count - previous.metrics[name].get(label, 0.0)) / elapsed_s
        for label, count in current.metrics[name].items()
    }


def _render(previous: Snapshot, current: Snapshot, max_rows: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tarry.cli.downstreams import downstream_table
    from tarry.cli.output import printable

    summary = summarize(previous, current)
    tasks = "  ".join(f"{printable(name)} {count:,}" for name, count in summary["tasks"].items())
    rates = "visible only with an operator's key"
    if current.has_rates:
        attempts = "  ".join(_format_rates("attempts", summary["attemptsPerSecond"]))
        finished = "  ".join(_format_rates("tasks", summary["finishedPerSecond"]))
        rates = f"{attempts or 'no attempts yet'}  {finished}".rstrip()
    return Group(
        Text(f"tasks: {tasks or 'none'}"),
        Text(f"per second: {rates}"),
        Text(),
        downstream_table(current.downstreams[: max(1, max_rows)]),
    )


def _format_rates(noun: str, rates: dict[str, float]) -> Iterator[str]:
    from tarry.cli.output import printable

    for label, rate in sorted(rates.items()):
        yield f"{rate:,.1f} {noun} {printable(label)}"
