"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from tarry.core.checks import check_positive
from tarry.errors import ConfigurationError

DEFAULT_SERVER = "http://127.0.0.1:8080"
DEFAULT_LIMIT = 50
_DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|m|min|h|)\s*", re.ASCII)
_SECONDS_BY_UNIT = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

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


def example_epilog(command: str) -> str:
    """Return the end of a command's help text, which shows an example."""
    return f"[bold]Example[/bold]\n\n[bold cyan]  {command}[/bold cyan]"


def parse_duration(option: str, text: str | None) -> float | None:
    """Return a duration such as 500ms or 1.5 min in seconds, the default unit; None for None."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigurationError(option, "must be a time such as 500ms, 2s, 10m or 24h", text)
    return check_positive(option, float(match[1]) * _SECONDS_BY_UNIT[match[2]])
