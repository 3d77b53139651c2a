"""Connecting to a server: DNS, the guard's check of each address, TCP, TLS, egress proxy.

With an egress proxy the connection goes to the proxy, through a tunnel if the target uses TLS. The
proxy resolves the target's name and applies its own address rules. The address of the proxy itself
is not checked, because the operator sets it. If the proxy fails or cannot be reached, the fault is
`Fault.INTERNAL`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from socket import (
    AF_INET,
    AF_INET6,
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SOCK_STREAM,
    SOL_SOCKET,
    TCP_NODELAY,
    socket,
)
from typing import TYPE_CHECKING, cast

import msgspec

from tarry.runtime.clocks import system
from tarry.service.delivery.http1.proxy import MAX_CONNECT_RESPONSE_BYTES, open_tunnel
from tarry.service.delivery.messages import DeliveryError, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.http1.dns import DnsCache
    from tarry.service.delivery.http1.proxy import Proxy
    from tarry.service.delivery.targets import Target

_LOCAL_ERRNOS = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})
"""Error numbers of failures of this process or machine, not of the target."""
_CLOSED_IN_HANDSHAKE = "The connection was closed during the TLS handshake"
_HEAD_START_S = 0.25
"""Time after which the next address is tried in parallel (RFC 8305, 5)."""


class ConnectResult(msgspec.Struct):
    """An established connection, its address, and the durations of its phases."""

    transport: asyncio.Transport
    socket: asyncio.Transport
    """The transport below TLS, which knows how many bytes were not sent yet."""
    remote: str
    dns_ms: float | None
    connect_ms: float
    tls_ms: float | None = None


class Connector:
    """Opens connections to one server."""

    def __init__(
        self,
        target: Target,
        guard: Guard,
        dns: DnsCache,
        *,
        tls: ssl.SSLContext | None,
        proxy: Proxy | None,
    ) -> None:
        self._target = target
        self._guard = guard
        self._dns = dns
        self._tls = tls
        self._proxy = proxy

    @property
    def uses_proxy(self) -> bool:
        """Whether connections go through an egress proxy."""
        return self._proxy is not None

    async def connect(self, protocol: asyncio.Protocol) -> ConnectResult:
        """Open a connection for `protocol`, or raise DeliveryError."""
        target = self._target
        if self._proxy is not None:
            return await self._connect_through(self._proxy, protocol)
        return await self._connect_to(target.host, target.port, protocol, target.scheme == "https")

    async def _connect_to(
        self,
        host: str,
        port: int,
        protocol: asyncio.Protocol,
        use_tls: bool,  # noqa: FBT001 - private, and always passed by position
    ) -> ConnectResult:
        started = system.now()
        addresses: Sequence[str] = await resolve_host(host, self._dns)
        resolved = system.now()
        if self._proxy is None:
            addresses = select_allowed(addresses, host, self._guard)
        try:
            sock, remote = await connect_first(addresses, port)
        except OSError as error:
            if error.errno in _LOCAL_ERRNOS:
                raise DeliveryError(
                    Fault.INTERNAL, f"cannot create a socket: {error.strerror}"
                ) from None
            message = f"Could not connect to {host} port {port}: {error.strerror or error}"
            raise DeliveryError(Fault.REFUSED, message) from None
        connected = system.now()
        transport = await _create_transport(sock, _BeforeTls() if use_tls else protocol)
        result = ConnectResult(
            transport,
            transport,
            remote,
            None if addresses[0] == host else (resolved - started) * 1000,
            (connected - resolved) * 1000,
        )
        if use_tls:
            await self._start_tls(result, protocol, host)
        return result

    async def _start_tls(
        self, result: ConnectResult, protocol: asyncio.Protocol, host: str
    ) -> None:
        """Perform the TLS handshake; the certificate must be valid for `host`."""
        assert self._tls is not None  # noqa: S101 - checked when the pool was created
        loop, started = asyncio.get_running_loop(), system.now()
        protocol.connection_made(result.socket)
        if result.transport.is_closing():
            raise DeliveryError(Fault.TLS, _CLOSED_IN_HANDSHAKE)
        try:
            transport = await loop.start_tls(
                result.transport, protocol, self._tls, server_hostname=host
            )
        except (OSError, TypeError) as error:
            # asyncio before 3.12 raises TypeError when TLS within TLS fails.
            result.socket.abort()
            raise DeliveryError(Fault.TLS, _describe_tls_error(error)) from None
        except BaseException:
            result.socket.abort()
            raise
        assert transport is not None  # noqa: S101 - None is returned in server mode only
        result.transport = transport
        result.tls_ms = (system.now() - started) * 1000

    async def _connect_through(self, proxy: Proxy, protocol: asyncio.Protocol) -> ConnectResult:
        reader = asyncio.StreamReader(limit=MAX_CONNECT_RESPONSE_BYTES)
        proxy_protocol = asyncio.StreamReaderProtocol(reader)
        try:
            result = await self._connect_to(
                proxy.host, proxy.port, proxy_protocol, proxy.scheme == "https"
            )
        except DeliveryError as error:
            message = f"No connection to the egress proxy: {error}"
            raise DeliveryError(Fault.INTERNAL, message) from None
        try:
            if self._target.scheme == "https":
                await open_tunnel(proxy, self._target.authority, result.transport, reader)
                await self._start_tls(result, protocol, self._target.host)
            else:
                result.transport.set_protocol(protocol)
        except BaseException:
            result.transport.abort()
            raise
        return result


class _BeforeTls(asyncio.Protocol):
    """Rejects bytes that arrive before the TLS handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Close the connection, because the peer is not authenticated yet."""
        del data
        self._transport.abort()


async def _create_transport(sock: socket, protocol: asyncio.Protocol) -> asyncio.Transport:
    """Return the event loop's transport for a connected socket."""
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    except OSError as error:  # the peer has closed the connection already
        sock.close()
        message = f"The connection was closed at once: {error.strerror}"
        raise DeliveryError(Fault.RESET, message) from None
    except BaseException:
        sock.close()
        raise
    return transport


async def resolve_host(host: str, dns: DnsCache) -> tuple[str, ...]:
    """Return the addresses of a host (in canonical form), or raise DeliveryError."""
    if ":" in host or host.replace(".", "").isdigit():
        return (host,)
    # RFC 6761, 6.3: every name below .localhost is localhost, which some resolvers do not know.
    return await dns.resolve("localhost" if host.endswith(".localhost") else host)


def select_allowed(addresses: Sequence[str], host: str, guard: Guard) -> list[str]:
    """Return the addresses that the guard allows; raise DeliveryError if there are none.

    The caller connects to the returned addresses without another lookup, so that DNS cannot change
    them after the check (DNS rebinding).
    """
    first_refusal: str | None = None
    allowed: list[str] = []
    for address in addresses:
        refusal = guard.refusal(address, host)
        if refusal is None:
            allowed.append(address)
        first_refusal = first_refusal or refusal
    if not allowed:
        raise DeliveryError(Fault.BLOCKED, first_refusal or f"{host} has no address")
    return allowed


def _describe_tls_error(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"The TLS handshake failed: {error.reason.lower().replace('_', ' ')}"
    return _CLOSED_IN_HANDSHAKE


async def connect_first(addresses: Sequence[str], port: int) -> tuple[socket, str]:
    """Return a connected socket and its address; raise the last OSError if all addresses fail.

    Addresses are tried in order, each a little after the one before it (Happy Eyeballs, RFC 8305).
    """
    if len(addresses) == 1:
        return await _connect_socket(addresses[0], port)
    loop, untried = asyncio.get_running_loop(), deque(addresses)
    racing: set[asyncio.Task[tuple[socket, str]]] = set()
    last_error: BaseException = OSError("there is no address")
    try:
        while untried or racing:
            if untried:
                racing.add(loop.create_task(_connect_socket(untried.popleft(), port)))
            head_start = _HEAD_START_S if untried else None
            finished, _ = await asyncio.wait(
                racing, timeout=head_start, return_when=asyncio.FIRST_COMPLETED
            )
            for task in finished:
                racing.remove(task)
                error = task.exception()
                if error is None:
                    return task.result()
                last_error = error
        raise last_error
    finally:
        del last_error  # breaks a reference cycle: its traceback refers to this frame
        for task in racing:
            task.add_done_callback(_close_unused)
            task.cancel()


def _close_unused(task: asyncio.Task[tuple[socket, str]]) -> None:
    """Close a socket that was connected after the socket that is used."""
    if not task.cancelled() and task.exception() is None:
        task.result()[0].close()


async def _connect_socket(address: str, port: int) -> tuple[socket, str]:
    sock = socket(AF_INET6 if ":" in address else AF_INET, SOCK_STREAM)
    try:
        sock.setblocking(False)  # noqa: FBT003 - the signature of the standard library
        sock.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
        sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock, address
