"""`tarry downstreams`: list downstreams (the hosts of targets); pause, resume or reset one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import (
    DEFAULT_LIMIT,
    DEFAULT_SERVER,
    ApiKeyOption,
    JsonOption,
    LimitOption,
    ServerOption,
)
from tarry.cli.remote import connect
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from tarry.wire.tasks import DownstreamInfo

ACTIONS = ("pause", "resume", "reset")
_HEADINGS = ("downstream", "state", "pending", "running", "dead", "p50", "p95")


def downstreams(
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="|".join(ACTIONS),
            help=(
                "pause: send nothing to it. resume: send again, slowly at first. "
                "reset: discard its statistics."
            ),
        ),
    ] = None,
    lane: Annotated[
        str | None, typer.Argument(metavar="LANE", help="Name of the downstream, as listed.")
    ] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the targets' hosts with state, backlog and latency; or pause, resume or reset one."""
    from itertools import islice

    from tarry.cli.output import console, print_json, print_text

    if action is not None:
        _run_action(action, lane, server, api_key, as_json=as_json)
        return
    with connect(server, api_key) as client:
        listed = list(islice(client.downstreams(), limit))
    if as_json:
        print_json(listed)
    elif not listed:
        print_text("none yet: a downstream is created with the first task for its host")
    else:
        console().print(downstream_table(listed))


def downstream_table(rows: Iterable[DownstreamInfo]) -> Table:
    """Return a table with one row per downstream."""
    from tarry.cli.output import table

    return table(_HEADINGS, map(_row, rows))


def _run_action(
    action: str, lane: str | None, server: str, api_key: str | None, *, as_json: bool
) -> None:
    from tarry.cli.output import print_json, print_text
    from tarry.core.checks import check_one_of

    check_one_of("the first argument", action, ACTIONS)
    if lane is None:
        rule = f"is required: the downstream to {action}. `tarry downstreams` lists all"
        raise ConfigurationError("LANE", rule)
    with connect(server, api_key) as client:
        run = {"pause": client.pause, "resume": client.resume, "reset": client.reset}[action]
        downstream = run(lane)
    if as_json:
        print_json(downstream)
    else:
        print_text(f"{downstream.lane} {downstream.state}")


def _row(downstream: DownstreamInfo) -> tuple[object, ...]:
    from tarry.core.text import format_duration

    def format_ms(ms: float | None) -> str:
        return "" if ms is None else format_duration(ms / 1000)

    local = downstream.local
    return (
        downstream.lane,
        downstream.state,
        downstream.pending,
        downstream.in_flight,
        downstream.dead,
        "" if local is None else format_ms(local.p50_ms),
        "" if local is None else format_ms(local.p95_ms),
    )
