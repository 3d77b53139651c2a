"""`tarry top`: tasks by status, rates and the busiest downstreams, live."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.cli.options import DEFAULT_SERVER, JsonOption, KeyOption, ServerOption
from tarry.cli.remote import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from tarry.client import Client
    from tarry.wire.tasks import DownstreamInfo

REFRESH_INTERVAL_S = 1.0
_MAX_DOWNSTREAMS = 1_000
"""Downstreams that are fetched; the busiest of them are shown."""
_SAMPLE = re.compile(r"(retry_\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LABEL_OF_METRIC = {
    "retry_tasks": "status",
    "retry_attempts_total": "outcome",
    "retry_task_outcomes_total": "outcome",
}


class Snapshot(NamedTuple):
    """Metrics and downstreams at one moment."""

    at: float
    """Monotonic seconds."""
    metrics: dict[str, dict[str, float]]
    """Value of each metric in `_LABEL_OF_METRIC`, by label."""
    downstreams: list[DownstreamInfo]
    has_rates: bool = True
    """Whether the service exposes attempt counters; it does so only for an operator's key."""


def top(
    server: ServerOption = DEFAULT_SERVER, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """Show tasks by status, rates and the busiest downstreams, once a second.

    Runs until Ctrl-C. Without a terminal, prints one table. With --json, each line is a snapshot.
    """
    from rich.live import Live

    from tarry.cli.output import console, print_json_line

    terminal = console()
    with connect(server, key) as client:
        pairs = _snapshot_pairs(client, server, key)
        if as_json:
            for previous, current in pairs:
                print_json_line(summarize(previous, current))
        elif not terminal.is_terminal:
            terminal.print(_render(*next(pairs), max_rows=_MAX_DOWNSTREAMS))
        else:
            with Live(console=terminal, auto_refresh=False, screen=True) as live:
                for previous, current in pairs:
                    live.update(_render(previous, current, terminal.height - 5), refresh=True)


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
    client: Client, server: str, key: str | None
) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield each snapshot together with the previous one, forever."""
    from tarry.runtime.clocks import system

    previous = _take_snapshot(client, server, key)
    while True:
        system.sleep(REFRESH_INTERVAL_S, None)
        current = _take_snapshot(client, server, key)
        yield previous, current
        previous = current


def _take_snapshot(client: Client, server: str, key: str | None) -> Snapshot:
    from itertools import islice

    from tarry.runtime.clocks import system

    downstreams = sorted(
        islice(client.downstreams(), _MAX_DOWNSTREAMS),
        key=lambda each: (-each.pending - each.in_flight, -each.dead, each.lane),
    )
    text = _fetch_metrics(server, key)
    return Snapshot(system.now(), parse_metrics(text), downstreams, "retry_attempts_total" in text)


def _fetch_metrics(server: str, key: str | None) -> str:
    import httpx

    from tarry.client.errors import ServiceUnavailable, ServiceUnreachable

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
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
    if not current.has_rates:
        return None
    elapsed = max(current.at - previous.at, 1e-9)
    # After a restart of the service the counters start at zero: never negative.
    return {
        label: max(0.0, count - previous.metrics[name].get(label, 0.0)) / elapsed
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
