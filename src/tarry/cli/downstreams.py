"""`tarry downstreams`: the targets' hosts, and an operator's hand on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import (
    DEFAULT_LIMIT,
    DEFAULT_SERVER,
    JsonOption,
    KeyOption,
    LimitOption,
    ServerOption,
)
from tarry.cli.remote import connect
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from tarry.wire.tasks import Downstream

ACTS = ("pause", "resume", "reset")
_HEADINGS = ("downstream", "state", "pending", "running", "dead", "p50", "p95")


def downstreams(
    act: Annotated[
        str | None,
        typer.Argument(
            metavar="|".join(ACTS),
            help="pause: send nothing to it. resume: go on, slowly. reset: forget what was learnt.",
        ),
    ] = None,
    lane: Annotated[
        str | None, typer.Argument(metavar="LANE", help="Which, as the list names it.")
    ] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the targets' hosts: state, backlog, latency; or pause, resume or reset one."""
    from itertools import islice

    from tarry.cli.output import console, print_json, print_text

    if act is not None:
        _move(act, lane, server, key, as_json=as_json)
        return
    with connect(server, key) as client:
        found = list(islice(client.downstreams(), limit))
    if as_json:
        print_json(found)
    elif not found:
        print_text("none yet: each host that a task goes to is one")
    else:
        console().print(downstream_table(found))


def downstream_table(found: Iterable[Downstream]) -> Table:
    """Return downstreams as rows."""
    from tarry.cli.output import table

    return table(_HEADINGS, map(_row, found))


def _move(act: str, lane: str | None, server: str, key: str | None, *, as_json: bool) -> None:
    from tarry.cli.output import print_json, print_text
    from tarry.core.checks import check_one_of

    check_one_of("the first argument", act, ACTS)
    if lane is None:
        rule = f"must say which downstream to {act}; `tarry downstreams` lists them"
        raise ConfigurationError("LANE", rule)
    with connect(server, key) as client:
        move = {"pause": client.pause, "resume": client.resume, "reset": client.reset}[act]
        moved = move(lane)
    if as_json:
        print_json(moved)
    else:
        print_text(f"{moved.lane} {moved.state}")


def _row(one: Downstream) -> tuple[object, ...]:
    from tarry.core.explain import format_duration

    def shown(ms: float | None) -> str:
        return "" if ms is None else format_duration(ms / 1000)

    here = one.here
    latency = ("", "") if here is None else (shown(here.p50_ms), shown(here.p95_ms))
    return (one.lane, one.state, one.pending, one.in_flight, one.dead, *latency)
