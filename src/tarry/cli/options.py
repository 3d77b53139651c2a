"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tarry.core.checks import check_positive
from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Generator

DEFAULT_SERVER = "http://127.0.0.1:8080"
DEFAULT_LIMIT = 50
_DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|m|min|h|d|)\s*", re.ASCII)
_USER_INFO = re.compile(r"[^\s('\"]*[:/][^\s]*@")
_SECONDS_BY_UNIT = {
    "ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0
}  # fmt: skip

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


class Command(TyperCommand):
    """A command whose help shows flags without a type, because they take no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command."""
        with _redacted_usage_errors():
            return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command, with the option --help."""
        return _hide_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows flags without a type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the group."""
        with _redacted_usage_errors():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name."""
        with _redacted_usage_errors():
            return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group, with the option --help."""
        return _hide_flag_types(super().get_params(ctx))


@contextmanager
def _redacted_usage_errors() -> Generator[None]:
    """Remove user names and passwords from errors, which quote an argument in the wrong place."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)  # of a `UsageError`, which typer does not export
        if isinstance(message, str):
            vars(error)["message"] = _USER_INFO.sub("[redacted]@", message)
        raise


def _hide_flag_types(params: list[Any]) -> list[Any]:
    """Remove the type from the help of flags: typer shows `--dry-run <bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def example_epilog(command: str) -> str:
    """Return the end of a command's help text, which shows an example."""
    return f"[bold]Example[/bold]\n\n[bold cyan]  {command}[/bold cyan]"


def parse_time(option: str, text: str | None) -> float | None:
    """Return a time in seconds since 1970: an ISO 8601 time, or a duration such as 2h ago."""
    if text is None:
        return None
    if _DURATION.fullmatch(text):
        return effects.unix_time() - (parse_duration(option, text) or 0.0)
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        rule = "must be a time such as 2026-11-16T08:00, or a duration before now such as 2h"
        raise ConfigurationError(option, rule, text) from None


def parse_duration(option: str, text: str | None) -> float | None:
    """Return a duration such as 500ms or 1.5 min in seconds, the default unit; None for None."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigurationError(option, "must be a time such as 500ms, 2s, 10m, 24h or 7d", text)
    return check_positive(option, float(match[1]) * _SECONDS_BY_UNIT[match[2]])
