"""Exit codes of the commands, and the message that is printed for an error."""

from __future__ import annotations

from tarry.client import errors
from tarry.core.text import format_duration
from tarry.errors import Overloaded, StoreUnavailable, TarryError

EXIT_FAILED = 1
EXIT_INVALID = 2
EXIT_NOT_FOUND = 3
EXIT_SERVICE_ERROR = 4
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    0: "success",
    EXIT_FAILED: "a task or assertion failed, a wait timed out, "
    "or the state of the task or policy forbids the command",
    EXIT_INVALID: "an argument, option, file or API key is invalid",
    EXIT_NOT_FOUND: "the task, policy, API key or downstream does not exist",
    EXIT_SERVICE_ERROR: "the service did not start, cannot be reached, is overloaded or failed",
    EXIT_INTERRUPTED: "interrupted with Ctrl-C",
}
"""The meaning of each exit code, for `--help` and docs/cli.md."""

_EXIT_CODE_RULES: tuple[tuple[tuple[type[TarryError], ...], int], ...] = (
    ((errors.NotFound,), EXIT_NOT_FOUND),
    ((errors.Conflict, errors.NotFinished), EXIT_FAILED),
    ((errors.InvalidRequest, errors.NotAuthorized), EXIT_INVALID),
    ((errors.ServiceError, StoreUnavailable, Overloaded), EXIT_SERVICE_ERROR),
)
"""Error types and their exit code. The first match counts, so subclasses precede their bases."""


def exit_code_of(error: TarryError) -> int:
    """Return the exit code for an error."""
    for error_types, code in _EXIT_CODE_RULES:
        if isinstance(error, error_types):
            return code
    return EXIT_INVALID  # most errors of other types are caused by the user's input


def error_message(error: TarryError) -> str:
    """Return what is wrong and, if known, what to do about it."""
    if not isinstance(error, errors.ServiceError):
        return str(error)
    message = error.detail or str(error)
    if isinstance(error, errors.NotAuthorized):
        message += " Pass an API key with --key or TARRY_KEY; create one with `tarry keys create`."
    if error.retry_after is not None:
        message += f" Try again in {format_duration(error.retry_after)}."
    return message
