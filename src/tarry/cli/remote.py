"""What the commands that talk to a service have in common: their options, and the connection."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Generator

    from tarry.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8080"

Server = Annotated[
    str, typer.Option(envvar="TARRY_SERVER", help="The address of the service.", metavar="URL")
]
Key = Annotated[
    str | None,
    typer.Option(envvar="TARRY_KEY", help="Your API key, where the service wants one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Limit = Annotated[int, typer.Option(min=1, help="The most to list.")]
OfPolicy = Annotated[str | None, typer.Option("--policy", help="Only those with this policy.")]
OfLane = Annotated[
    str | None,
    typer.Option("--lane", help="Only those for this downstream: `tarry downstreams`."),
]
ForReason = Annotated[str | None, typer.Option("--reason", help="Only those ended for this.")]
Task = Annotated[str, typer.Argument(metavar="TASK", help="The id of a task.")]

LISTED = 50


def example(command: str) -> str:
    """Return the end of a command's help: what one types."""
    return f"[bold]Example[/bold]\n\n[bold cyan]  {command}[/bold cyan]"


@contextmanager
def connected(server: str, key: str | None) -> Generator[Client]:
    """Talk to a service; one that does not answer is told with the way to start one."""
    import logging

    from tarry.client import Client
    from tarry.errors import ConfigurationError, ServiceUnreachable

    # The client's own retries are no news here: the last error says what there is to say.
    if not (logger := logging.getLogger("tarry")).handlers:
        logger.addHandler(logging.NullHandler())
    try:
        opened = Client(server, key=key)
    except ConfigurationError as error:
        msg = f"--server or --key: {error}"
        raise ConfigurationError(msg) from None
    with opened as client:
        try:
            yield client
        except ServiceUnreachable as error:
            why = str(error.__cause__ or "").partition("] ")
            said = (why[2] or why[0] or "no answer").lower()
            msg = (
                f"no service answers at {server} ({said}): start one with `tarry serve`, or name "
                "another with --server or TARRY_SERVER"
            )
            raise ServiceUnreachable(msg) from error
