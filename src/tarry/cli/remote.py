"""Connects a command to the service, and prints the reason for long waits to standard error."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from tarry.cli.output import to_printable_line
from tarry.client.errors import InvalidRequest, NotFound, ServiceUnreachable
from tarry.core.text import format_duration
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from tarry.client import Client

_MIN_REPORTED_WAIT_S = 1.0
_CA_FILE_VARIABLE = "TARRY_CA_FILE"


class _WaitReporter(logging.Handler):
    """Prints the client's log records that explain a long wait.

    These are all warnings, which are about lost event streams, and the records of waits of at least
    1 s that the service requested with Retry-After. Other retries are not printed, because the
    command prints the last error if all attempts fail.
    """

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "tarry", {})
        if record.levelno >= logging.WARNING:
            typer.echo(to_printable_line(record.getMessage()), err=True)
        elif (
            "max_retries" in fields  # only in records of a wait before a retry
            and "slept" not in fields  # only in records after the wait
            and fields["hint"] is not None
            and fields["delay"] >= _MIN_REPORTED_WAIT_S
        ):
            delay = format_duration(fields["delay"])
            typer.echo(f"the service answered {fields['detail']}: retrying in {delay}", err=True)


@contextmanager
def connect(
    server: str, api_key: str | None, *, option_by_field: Mapping[str, str] | None = None
) -> Generator[Client]:
    """Open a client; if the service is unreachable, the error says how to start a service.

    Errors about the fields of the API in `option_by_field` name the option instead of the field.
    """
    new_client = _make_client(server, api_key)
    logger = logging.getLogger("tarry.client")
    level = logger.level
    logger.addHandler(reporter := _WaitReporter())
    logger.setLevel(logging.DEBUG)
    try:
        with new_client as client:
            yield client
    except ServiceUnreachable as error:
        raise ServiceUnreachable(
            f"no service answers at {server} ({_cause_of(server, error)}): start one with "
            "`tarry serve`, or set another address with --server or TARRY_SERVER"
        ) from error
    except InvalidRequest as error:
        raise _with_option_name(error, option_by_field or {}) from None
    finally:
        logger.removeHandler(reporter)
        logger.setLevel(level)


def _with_option_name(error: InvalidRequest, option_by_field: Mapping[str, str]) -> InvalidRequest:
    """Return the error with the option instead of the API's field in its message."""
    field, detail = error.field or "", error.detail or ""
    option = option_by_field.get(field.removeprefix("filter."))
    if option is None or not detail.startswith(f"{field} "):
        return error
    problem = {**error.problem, "detail": option + detail.removeprefix(field)}
    return InvalidRequest(str(error), status=error.status, problem=problem)


def check_downstream_exists(client: Client, option: str, lane: str) -> None:
    """Raise NotFound, with the name of the option, if the service has no downstream `lane`."""
    if all(info.lane != lane for info in client.downstreams()):
        raise NotFound(
            f"{option}: there is no downstream {lane!r}. The format is http:host:port or "
            "https:host:port; `tarry downstreams` lists all"
        )


def _make_client(server: str, api_key: str | None) -> Client:
    from tarry.client import Client
    from tarry.client.transport import require_packages

    require_packages()
    from tarry.service.settings import check_environment, environment_variables

    check_environment()  # rejects a misspelt TARRY_SERVER or TARRY_KEY
    ca_file = environment_variables().get(_CA_FILE_VARIABLE) or None
    try:
        return Client(server, key=api_key, ca_file=ca_file)
    except ConfigurationError as error:
        options = {"url": "--server", "ca_file": _CA_FILE_VARIABLE}
        raise error.with_field(options.get(error.field or "", f"--{error.field}")) from None


def _cause_of(server: str, error: Exception) -> str:
    """Return the operating system's or TLS library's message for a failed connection."""
    cause = str(error.__cause__ or "")
    _, _, after_errno = cause.partition("] ")  # "[Errno 111] Connection refused"
    message = (after_errno or cause or "no response").lower()
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        return f"{message}; {_CA_FILE_VARIABLE} can name the certificates to trust"
    if server.startswith("https:") and "SSL" in cause and "CERTIFICATE" not in cause:
        return f"{message}; does the service use http:// instead?"
    return message
