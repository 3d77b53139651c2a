"""What a failure means to the user: the exit code, and the words on standard error."""

from __future__ import annotations

from tarry.client.errors import (
    Conflict,
    InvalidRequest,
    NotAuthorized,
    NotFinished,
    NotFound,
    ServiceError,
)
from tarry.core.explain import format_duration
from tarry.errors import Overloaded, StoreUnavailable, TarryError

FAILED, MISTAKE, MISSING, AWAY, INTERRUPTED = 1, 2, 3, 4, 130
MEANINGS = {
    0: "it is as you asked",
    FAILED: "the task or the claim failed, or is in no state for this",
    MISTAKE: "a mistake in what you wrote",
    MISSING: "there is no such task, policy, key or downstream",
    AWAY: "the service cannot be reached, is overloaded, or failed",
    INTERRUPTED: "Ctrl-C",
}
"""The exit codes."""

_CODES: tuple[tuple[type[TarryError], int], ...] = (
    (NotFound, MISSING),
    (Conflict, FAILED),
    (NotFinished, FAILED),
    (InvalidRequest, MISTAKE),
    (NotAuthorized, MISTAKE),
    (ServiceError, AWAY),
    (StoreUnavailable, AWAY),
    (Overloaded, AWAY),
)


def code_of(error: TarryError) -> int:
    """Return the exit code; what is in no list is a mistake of the user."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), MISTAKE)


def words_of(error: TarryError) -> str:
    """Return what went wrong, and what helps, where that is known."""
    if not isinstance(error, ServiceError):
        return str(error)
    said = error.detail or str(error)
    if isinstance(error, NotAuthorized):
        said += " Give a key with --key or TARRY_KEY; `tarry keys create` makes one."
    if error.retry_after is not None:
        said += f" Try again in {format_duration(error.retry_after)}."
    return said
