"""What the commands that talk to a service have in common: their options, and the connection."""

from __future__ import annotations

import logging
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
_LONG_WAIT = 1.0
"""Seconds of silence that people ask about."""


def example(command: str) -> str:
    """Return the end of a command's help: what one types."""
    return f"[bold]Example[/bold]\n\n[bold cyan]  {command}[/bold cyan]"


class _News(logging.Handler):
    """Says why a command is silent: a stream was lost, or the service asked to wait."""

    def emit(self, record: logging.LogRecord) -> None:
        from tarry.cli.output import plain
        from tarry.core.explain import format_duration

        wait = getattr(record, "tarry", {})
        if record.name == "tarry.client":
            typer.echo(plain(record.getMessage()), err=True)
        elif "max_retries" in wait and wait["hint"] is not None and wait["delay"] >= _LONG_WAIT:
            said = f"the service answered {wait['detail']}: trying again in "
            typer.echo(said + format_duration(wait["delay"]), err=True)


@contextmanager
def connected(server: str, key: str | None) -> Generator[Client]:
    """Talk to a service; one that does not answer is told with the way to start one."""
    from tarry.client.errors import ServiceUnreachable

    opened = _opened(server, key)
    logger = logging.getLogger("tarry")
    # The client's other retries are no news here: the last error says what there is to say.
    logger.addHandler(news := _News())
    try:
        with opened as client:
            yield client
    except ServiceUnreachable as error:
        msg = (
            f"no service answers at {server} ({_why(server, error)}): start one with "
            "`tarry serve`, or name another with --server or TARRY_SERVER"
        )
        raise ServiceUnreachable(msg) from error
    finally:
        logger.removeHandler(news)


def _opened(server: str, key: str | None) -> Client:
    from tarry.client import Client
    from tarry.client.transport import require_packages
    from tarry.errors import ConfigurationError

    require_packages()
    from tarry.service.settings import check_environment

    check_environment()
    try:
        return Client(server, key=key)
    except ConfigurationError as error:
        option = "--server" if error.field == "url" else f"--{error.field}"
        raise error.with_field(option) from None


def _why(server: str, error: Exception) -> str:
    cause = str(error.__cause__ or "")
    _, _, after = cause.partition("] ")
    said = (after or cause or "no answer").lower()
    is_plain = server.startswith("https:") and "SSL" in cause and "CERTIFICATE" not in cause
    return f"{said}; is it http:// and not https://?" if is_plain else said
