"""The Python clients of the retry service, blocking and asynchronous, and the errors they raise.

The client classes are imported on first use, so that a program which needs only the errors, such as
the command line, does not import the modules that retry calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.client.errors import (
    Conflict,
    InvalidRequest,
    NotAuthorized,
    NotFinished,
    NotFound,
    ServiceError,
    ServiceUnavailable,
    ServiceUnreachable,
    TooManyRequests,
)

if TYPE_CHECKING:
    from tarry.client.client import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Client",
    "Conflict",
    "InvalidRequest",
    "NotAuthorized",
    "NotFinished",
    "NotFound",
    "ServiceError",
    "ServiceUnavailable",
    "ServiceUnreachable",
    "TooManyRequests",
]


def __getattr__(name: str) -> object:
    if name in {"AsyncClient", "Client"}:
        from tarry.client import client

        return getattr(client, name)
    raise AttributeError(f"module 'tarry.client' has no attribute {name!r}")
