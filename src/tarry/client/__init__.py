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
    from tarry.client.async_client import AsyncClient
    from tarry.client.client import Client

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
    if name == "AsyncClient":
        from tarry.client.async_client import AsyncClient

        return AsyncClient
    if name == "Client":
        from tarry.client.client import Client

        return Client
    raise AttributeError(f"module 'tarry.client' has no attribute {name!r}")
