"""`tarry top`: how much there is to do, how fast it is done, and for whom."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.cli.options import DEFAULT_SERVER, JsonOption, KeyOption, ServerOption
from tarry.cli.remote import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from tarry.client import Client
    from tarry.wire.tasks import Downstream

EVERY = 1.0
"""Seconds between two looks."""
_MOST = 1_000
"""Downstreams that are looked at; those with most to do are shown."""
_SAMPLE = re.compile(r"(retry_\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_COUNTED = {
    "retry_tasks": "status",
    "retry_attempts_total": "outcome",
    "retry_task_outcomes_total": "outcome",
}


class Look(NamedTuple):
    """What is seen at one moment."""

    at: float
    numbers: dict[str, dict[str, float]]
    """Each metric of `_COUNTED`, by its label."""
    downstreams: list[Downstream]
    whole: bool = True
    """Whether the page had more than a tenant's own numbers, so that there are rates."""


def top(
    server: ServerOption = DEFAULT_SERVER, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """Show tasks by status, rates, and the busiest downstreams, once a second.

    It ends with Ctrl-C; into a pipe goes one table. With --json, each line is a look.
    """
    from rich.live import Live

    from tarry.cli.output import console, print_json_line

    terminal = console()
    with connect(server, key) as client:
        pairs = _pairs(client, server, key)
        if as_json:
            for before, now in pairs:
                print_json_line(summary(before, now))
        elif not terminal.is_terminal:
            terminal.print(_frame(*next(pairs), room=_MOST))
        else:
            with Live(console=terminal, auto_refresh=False, screen=True) as live:
                for before, now in pairs:
                    live.update(_frame(before, now, terminal.height - 5), refresh=True)


def summary(before: Look, now: Look) -> dict[str, Any]:
    """Return what programs get: counts, rates a second where they are told, downstreams."""
    from tarry.cli.output import to_builtins

    return {
        "tasks": {name: int(count) for name, count in now.numbers["retry_tasks"].items()},
        "attemptsPerSecond": _rates("retry_attempts_total", before, now),
        "endsPerSecond": _rates("retry_task_outcomes_total", before, now),
        "downstreams": to_builtins(now.downstreams),
    }


def numbers_of(metrics: str) -> dict[str, dict[str, float]]:
    """Return what `_COUNTED` names from a page of metrics."""
    numbers: dict[str, dict[str, float]] = {name: {} for name in _COUNTED}
    for line in metrics.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None and sample[1] in numbers:
            label = dict(_LABEL.findall(sample[2])).get(_COUNTED[sample[1]], "")
            counts = numbers[sample[1]]
            counts[label] = counts.get(label, 0.0) + float(sample[3])
    return numbers


def _pairs(client: Client, server: str, key: str | None) -> Iterator[tuple[Look, Look]]:
    """Return each look with the one before it, for ever."""
    from tarry.runtime.clocks import system

    before = _look(client, server, key)
    while True:
        system.sleep(EVERY, None)
        now = _look(client, server, key)
        yield before, now
        before = now


def _look(client: Client, server: str, key: str | None) -> Look:
    from itertools import islice

    from tarry.runtime.clocks import system

    found = sorted(
        islice(client.downstreams(), _MOST),
        key=lambda one: (-one.pending - one.in_flight, -one.dead, one.lane),
    )
    page = _metrics(server, key)
    return Look(system.now(), numbers_of(page), found, "retry_attempts_total" in page)


def _metrics(server: str, key: str | None) -> str:
    import httpx

    from tarry.client.errors import ServiceUnavailable, ServiceUnreachable

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{server.rstrip('/')}/metrics", headers=headers, trust_env=False)
    except httpx.RequestError as error:
        msg = f"GET /metrics got no answer: {error}"
        raise ServiceUnreachable(msg) from error
    if not answer.is_success:
        msg = f"GET /metrics was answered with {answer.status_code}"
        raise ServiceUnavailable(msg, status=answer.status_code)
    return answer.text


def _rates(name: str, before: Look, now: Look) -> dict[str, float] | None:
    if not now.whole:
        return None
    passed = max(now.at - before.at, 1e-9)
    # A service that was started again counts from nothing.
    return {
        label: max(0.0, count - before.numbers[name].get(label, 0.0)) / passed
        for label, count in now.numbers[name].items()
    }


def _frame(before: Look, now: Look, room: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tarry.cli.downstreams import downstream_table
    from tarry.cli.output import printable

    seen = summary(before, now)
    tasks = "  ".join(f"{printable(name)} {count:,}" for name, count in seen["tasks"].items())
    rates = "only an operator's key is told"
    if now.whole:
        attempts = "  ".join(_paced("attempts", seen["attemptsPerSecond"]))
        ends = "  ".join(_paced("tasks", seen["endsPerSecond"]))
        rates = f"{attempts or 'no attempts yet'}  {ends}".rstrip()
    return Group(
        Text(f"tasks: {tasks or 'none'}"),
        Text(f"a second: {rates}"),
        Text(),
        downstream_table(now.downstreams[: max(1, room)]),
    )


def _paced(noun: str, rates: dict[str, float]) -> Iterator[str]:
    from tarry.cli.output import printable

    for label, rate in sorted(rates.items()):
        yield f"{rate:,.1f} {noun} {printable(label)}"
