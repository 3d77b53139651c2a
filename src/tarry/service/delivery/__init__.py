"""Delivery, the network part of an attempt: sends its request by HTTP or gRPC.

This module has the requests and results of deliveries, the interface of the HTTP and gRPC clients,
and the dispatcher, which passes each request to one of these clients by the scheme of its URL.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from tarry.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


class Fault(StrEnum):
    """Why an attempt got no usable response: `errorClass` in the attempt log of the API."""

    DNS = "dns"
    REFUSED = "refused"  # no connection, because it was refused or the target is unreachable
    TLS = "tls"
    BLOCKED = "blocked"  # the address is not allowed as a target, see `delivery.guard`
    TIMEOUT = "timeout"
    RESET = "reset"  # the connection was closed before the response was complete
    PROTOCOL = "protocol"  # the response is malformed, or its headers exceed a limit
    INVALID = "invalid"  # the request is not valid, or a gRPC response is too long; not retried
    INTERNAL = "internal"  # in the service, such as an unreachable proxy; not counted as an attempt


class DeliveryRequest(msgspec.Struct, kw_only=True, gc=False):
    """The request of one attempt; `timeout` (seconds) is for all phases from DNS to last byte."""

    tenant: str  # connections are never shared between tenants
    url: str
    method: str
    headers: dict[str, str]
    body: bytes
    timeout: float
    max_excerpt: int = 2048  # bytes of the response body to keep; the rest is dropped

    def __repr__(self) -> str:
        """Return a text without URL, headers and body, which may contain secrets."""
        return f"DeliveryRequest(tenant={self.tenant!r}, method={self.method!r})"


class DeliveryResult(msgspec.Struct, kw_only=True, gc=False):
    """The result of an attempt: a response with a `status`, or a `fault`."""

    status: int | str | None = None  # the HTTP status, or the name of a gRPC status code
    headers: Sequence[tuple[str, str]] = ()  # names in lower case; for gRPC the trailing metadata
    excerpt: bytes = b""
    truncated: bool = False  # whether the response body is longer than the excerpt
    fault: Fault | None = None
    pause_s: float | None = None
    """If set, the target did not cause the fault, and the attempt is not counted. The target can be
    attempted again after this time. Attempts to other targets are not affected."""
    error: str | None = None  # describes the fault or the gRPC status; contains no secret
    remote: str | None = None  # the IP address that the attempt was connected to
    duration_ms: float = 0.0
    dns_ms: float | None = None
    connect_ms: float | None = None
    tls_ms: float | None = None
    first_byte_ms: float | None = None
    sent_secrets: Sequence[str] = ()
    """The values of secrets that the request had, and of other secrets that requests to this target
    may have. The target may have returned them."""
    has_unknown_secrets: bool = False
    """Whether the target may know a secret whose value this process has not obtained yet."""

    def __repr__(self) -> str:
        """Return a text without secrets: asyncio logs it if a callback of the attempt fails."""
        return f"DeliveryResult(status={self.status!r}, fault={self.fault!r})"


class DeliveryError(Exception):
    """Raised in a client if a request cannot be sent; `send` returns its `fault` as a result."""

    def __init__(self, fault: Fault, message: str, *, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.pause_s: float | None = pause_s

    def to_result(self) -> DeliveryResult:
        """Return the result of the request."""
        return DeliveryResult(fault=self.fault, error=str(self), pause_s=self.pause_s)


class PendingDelivery(Protocol):
    """A delivery in progress."""

    def cancel(self) -> object:
        """Abort the delivery; its callback is called with a CancelledError, at once or later."""
        ...


DeliveryCallback: TypeAlias = "Callable[[DeliveryResult | BaseException], object]"
"""Called once with the result of a delivery, or with an unexpected error."""


class DeliveryClient(Protocol):
    """Sends the requests of attempts."""

    def send(self, request: DeliveryRequest) -> Awaitable[DeliveryResult]:
        """Send a request. Failures of the target are results, never exceptions."""
        ...

    async def close(self) -> None:
        """Abort running requests and close all connections."""


@runtime_checkable
class CallbackDeliveryClient(DeliveryClient, Protocol):
    """A client that can also pass results to a callback, which is faster than a coroutine."""

    def start(self, request: DeliveryRequest, on_done: DeliveryCallback) -> PendingDelivery:
        """Send a request; call `on_done` when it has ended, never before `start` returns."""
        ...


def start_function(
    client: DeliveryClient,
) -> Callable[[DeliveryRequest, DeliveryCallback], PendingDelivery]:
    """Return `client.start`, or an equivalent function that uses `send` if there is no `start`."""
    if isinstance(client, CallbackDeliveryClient):
        return client.start
    return lambda request, on_done: call_when_done(client.send(request), on_done)


def call_when_done(
    delivery: Awaitable[DeliveryResult], on_done: DeliveryCallback
) -> asyncio.Future[DeliveryResult]:
    """Call `on_done` when a coroutine or future is done; return the future or the new task."""

    def on_future_done(future: asyncio.Future[DeliveryResult]) -> None:
        if future.cancelled():
            on_done(asyncio.CancelledError())
        else:
            error = future.exception()
            on_done(future.result() if error is None else error)

    future = asyncio.ensure_future(delivery)
    future.add_done_callback(on_future_done)
    return future


class DeliveryFuture(asyncio.Future[DeliveryResult]):
    """The future of a delivery by a `CallbackDeliveryClient`; cancelling it aborts the delivery."""

    def __init__(self, client: CallbackDeliveryClient, request: DeliveryRequest) -> None:
        super().__init__()
        self.delivery: PendingDelivery = client.start(request, self._on_delivery_done)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future and the delivery."""
        if not super().cancel(msg):
            return False
        self.delivery.cancel()
        return True

    def _on_delivery_done(self, result: DeliveryResult | BaseException) -> None:
        if self.done():
            return
        if isinstance(result, DeliveryResult):
            self.set_result(result)
        elif isinstance(result, asyncio.CancelledError):
            super().cancel()
        else:
            self.set_exception(result)


class DeliveryDispatcher:
    """Passes requests to the HTTP client, or to the gRPC client, which is built when needed."""

    def __init__(self, http: DeliveryClient, build_grpc: Callable[[], DeliveryClient]) -> None:
        self._http = http
        self._start_http = start_function(http)
        self._build_grpc = build_grpc
        self._grpc: DeliveryClient | None = None

    def send(self, request: DeliveryRequest) -> Awaitable[DeliveryResult]:
        """Send a request."""
        if request.url.startswith("grpc"):
            return self._send_grpc(request)
        return self._http.send(request)

    def start(self, request: DeliveryRequest, on_done: DeliveryCallback) -> PendingDelivery:
        """Send a request, and call `on_done` when it has ended."""
        if request.url.startswith("grpc"):
            return call_when_done(self._send_grpc(request), on_done)
        return self._start_http(request, on_done)

    async def _send_grpc(self, request: DeliveryRequest) -> DeliveryResult:
        if self._grpc is None:
            try:
                self._grpc = self._build_grpc()
            except (MissingExtra, ConfigurationError) as error:
                return DeliveryResult(fault=Fault.INTERNAL, error=str(error))
        return await self._grpc.send(request)

    async def close(self) -> None:
        """Close both clients, the gRPC client even if closing the HTTP client fails."""
        try:
            await self._http.close()
        finally:
            if self._grpc is not None:
                await self._grpc.close()
