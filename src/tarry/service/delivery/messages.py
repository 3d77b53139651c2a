"""The two ends of one attempt: what goes out and what came back."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable


class Fault(StrEnum):
    """Why an attempt got no answer. The value stands in the attempt log and is a metric label."""

    DNS = "dns"
    REFUSED = "refused"
    """The connection was not made: refused, unreachable."""
    TLS = "tls"
    BLOCKED = "blocked"
    """The guard does not let us connect to this address."""
    TIMEOUT = "timeout"
    RESET = "reset"
    """The connection ended before the answer did."""
    PROTOCOL = "protocol"
    """What came back is no answer: malformed, or headers without end."""
    INVALID = "invalid"
    """The request cannot be sent as it stands, or its answer cannot be read, however often."""
    INTERNAL = "internal"
    """Our own side failed (egress proxy, file descriptors): nothing is charged for it."""


class DeliveryRequest(msgspec.Struct, kw_only=True, gc=False):
    """What goes out; `timeout` (seconds) covers everything from the look-up to the last byte."""

    url: str
    method: str
    headers: list[tuple[str, str]]
    body: bytes
    timeout: float
    max_excerpt: int = 2048
    """Bytes of the answer to keep; the rest is read up to a bound and dropped."""


class DeliveryResult(msgspec.Struct, kw_only=True, gc=False):
    """What came back: an answer with a `status`, or a `fault`."""

    status: int | str | None = None
    """The HTTP status, or the name of a gRPC code."""
    headers: list[tuple[str, str]] = []
    """Of the answer, names in lower case; for gRPC its trailing metadata."""
    excerpt: bytes = b""
    truncated: bool = False
    """Whether the answer has more than the excerpt."""
    fault: Fault | None = None
    error: str | None = None
    """The fault in words, without the request's secrets."""
    remote: str | None = None
    duration_ms: float = 0.0
    dns_ms: float | None = None
    connect_ms: float | None = None
    tls_ms: float | None = None
    first_byte_ms: float | None = None


class DeliveryError(Exception):
    """There is no connection to a server; says why, and whose fault it is."""

    def __init__(self, fault: Fault, words: str) -> None:
        super().__init__(words)
        self.fault: Fault = fault


class Delivery(Protocol):
    """A way to make attempts."""

    def send(self, request: DeliveryRequest) -> Awaitable[DeliveryResult]:
        """Make one attempt. Whatever the target does comes back as a value, never as an error.

        A future is begun at once and costs less; a coroutine will do.
        """
        ...

    async def close(self) -> None:
        """End what runs and close connections."""
        ...
