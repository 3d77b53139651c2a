"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_SERVER = "http://127.0.0.1:8080"
DEFAULT_LIMIT = 50

ServerOption = Annotated[
    str,
    typer.Option("--server", envvar="TARRY_SERVER", help="Address of the service.", metavar="URL"),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="TARRY_KEY", help="API key, if the service requires one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LimitOption = Annotated[
    int, typer.Option("--limit", min=1, help="Maximum number of entries to list.")
]
PolicyFilter = Annotated[str | None, typer.Option("--policy", help="Only tasks with this policy.")]
LaneFilter = Annotated[
    str | None,
    typer.Option("--lane", help="Only tasks for this downstream; see `tarry downstreams`."),
]
ReasonFilter = Annotated[
    str | None, typer.Option("--reason", help="Only tasks that ended for this reason.")
]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="Id of the task.")]


def example_epilog(command: str) -> str:
    """Return the last paragraph of a command's help text, which shows an example."""
    return f"[bold]Example[/bold]\n\n[bold cyan]  {command}[/bold cyan]"
