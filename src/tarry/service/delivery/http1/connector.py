"""Opens connections: DNS, the guard's check of each address, TCP, TLS, egress proxy.

Before each new connection the guard (`Guard`, which blocks internal addresses) checks the address,
even if the address comes from the DNS cache.

With an egress proxy the connection goes to the proxy. If the target uses TLS, the proxy opens a
tunnel to the target (CONNECT). The proxy resolves the target's name and applies its own address
rules. The address of the proxy itself is not checked, because the operator sets it. If the proxy
fails or cannot be reached, the fault is `Fault.INTERNAL`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections import deque
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

import msgspec

from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects
from tarry.service.delivery import DeliveryError, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.certificates import ReloadingCertificate
    from tarry.service.delivery.dns import DnsCache
    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.targets import Target

_CONNECTION_ATTEMPT_DELAY_S = 0.25  # until the next address is tried in parallel (RFC 8305, 5)
_MAX_CONNECT_RESPONSE_BYTES = 16 * 1024
_DEFAULT_PROXY_PORTS = {"http": 80, "https": 443}
_PROXY_FAULTS = {403: Fault.BLOCKED, 502: Fault.REFUSED, 503: Fault.REFUSED, 504: Fault.REFUSED}
"""Faults of the target by the status of the proxy; others are failures of the proxy itself."""
_LOCAL_ERRNOS = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})  # failures of this machine
_CLOSED_IN_HANDSHAKE = "The connection was closed during the TLS handshake"


class Proxy(msgspec.Struct, frozen=True):
    """An egress proxy."""

    scheme: str
    host: str
    port: int
    header_lines: str  # for the proxy only: its credentials, or empty


class ConnectResult(msgspec.Struct):
    """An established connection, and the durations of the phases in which it was opened."""

    transport: asyncio.Transport
    raw_transport: asyncio.Transport  # the transport below TLS; without TLS, `transport`
    remote: str  # the IP address of the server or the proxy
    dns_ms: float | None  # None if the host is an IP address
    connect_ms: float
    tls_ms: float | None = None  # None without TLS


class Connector(msgspec.Struct, frozen=True):
    """Opens connections of one tenant to the origin of a target."""

    tenant: str
    target: Target
    guard: Guard
    dns: DnsCache
    tls: ssl.SSLContext | None  # None if this machine has no trusted certificates
    proxy: Proxy | None
    certificate: ReloadingCertificate[ssl.SSLContext] | None = None
    """The context with the client certificate for the target; None: the target gets none. The
    proxy never gets it."""

    async def connect(self, protocol: asyncio.Protocol) -> ConnectResult:
        """Open a connection for `protocol`, or raise DeliveryError."""
        target = self.target
        if self.proxy is not None:
            return await self._connect_through(self.proxy, protocol)
        tls = self._target_tls() if target.scheme == "https" else None
        return await self._connect_to(target.host, target.port, protocol, tls)

    def _target_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for the target, with the current client certificate."""
        if self.certificate is None:
            return self.tls
        self.certificate.reload_if_changed()
        return self.certificate.current

    async def _connect_to(
        self, host: str, port: int, protocol: asyncio.Protocol, tls: ssl.SSLContext | None
    ) -> ConnectResult:
        started_at = effects.now()
        addresses: Sequence[str] = await self.dns.resolve(host, self.tenant)
        resolved_at = effects.now()
        if self.proxy is None:
            addresses = select_allowed(addresses, host, self.guard)
        try:
            transport, remote = await connect_to_any(addresses, port)
        except OSError as error:
            # Not `error.strerror`, in which asyncio has the address: it may be internal.
            reason = os.strerror(error.errno) if error.errno else "no connection"
            if error.errno in _LOCAL_ERRNOS:
                message = f"cannot create a socket: {reason}"
                raise DeliveryError(Fault.INTERNAL, message) from None
            message = f"Could not connect to {host} port {port}: {reason}"
            raise DeliveryError(Fault.REFUSED, message) from None
        connected_at = effects.now()
        dns_ms = None if addresses[0] == host else (resolved_at - started_at) * 1000
        connect_ms = (connected_at - resolved_at) * 1000
        result = ConnectResult(transport, transport, remote, dns_ms, connect_ms)
        if tls is not None:
            await self._start_tls(result, protocol, host, tls)
        else:
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
        return result

    async def _start_tls(
        self, result: ConnectResult, protocol: asyncio.Protocol, host: str, tls: ssl.SSLContext
    ) -> None:
        """Perform the TLS handshake; the certificate must be valid for `host`."""
        loop, started_at = asyncio.get_running_loop(), effects.now()
        protocol.connection_made(result.raw_transport)
        if result.transport.is_closing():
            raise DeliveryError(Fault.TLS, _CLOSED_IN_HANDSHAKE)
        try:
            transport = await loop.start_tls(result.transport, protocol, tls, server_hostname=host)
        except (OSError, TypeError) as error:
            # asyncio before 3.12 raises TypeError when TLS within TLS fails.
            result.raw_transport.abort()
            raise DeliveryError(Fault.TLS, describe_tls_error(error)) from None
        except BaseException:
            result.raw_transport.abort()
            raise
        assert transport is not None  # noqa: S101 - None is returned in server mode only
        result.transport = transport
        result.tls_ms = (effects.now() - started_at) * 1000

    async def _connect_through(self, proxy: Proxy, protocol: asyncio.Protocol) -> ConnectResult:
        reader = asyncio.StreamReader(limit=_MAX_CONNECT_RESPONSE_BYTES)
        proxy_protocol = asyncio.StreamReaderProtocol(reader)
        try:
            proxy_tls = self.tls if proxy.scheme == "https" else None
            result = await self._connect_to(proxy.host, proxy.port, proxy_protocol, proxy_tls)
        except DeliveryError as error:
            message = f"No connection to the egress proxy: {error}"
            raise DeliveryError(Fault.INTERNAL, message) from None
        try:
            if self.target.scheme == "https":
                await _open_tunnel(proxy, self.target.authority, result.transport, reader)
                tls = self._target_tls()
                assert tls is not None  # noqa: S101 - checked by `HttpDeliveryClient`
                await self._start_tls(result, protocol, self.target.host, tls)
            else:
                result.transport.set_protocol(protocol)
        except BaseException:
            result.transport.abort()
            raise
        return result


class _NoDataProtocol(asyncio.Protocol):
    """The protocol of a new connection, which is closed if bytes arrive before the TLS handshake.

    Without TLS, the peer must not send bytes before the first request.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        del data
        self._transport.abort()


def parse_proxy(url: str) -> Proxy:
    """Return the proxy at a URL; raise ConfigurationError when the URL is not valid."""
    rule = "must be a URL like http://host:port"
    try:
        url_parts = urlsplit(url)
        port = url_parts.port
    except ValueError:  # the text after the colon may be a password
        raise ConfigurationError("proxy", rule) from None
    if url_parts.scheme not in _DEFAULT_PROXY_PORTS or not url_parts.hostname or port == 0:
        raise ConfigurationError("proxy", rule, url.rpartition("@")[2])
    header_lines = ""
    if url_parts.username is not None:
        credentials = f"{unquote(url_parts.username)}:{unquote(url_parts.password or '')}".encode()
        header_lines = f"Proxy-Authorization: Basic {b64encode(credentials).decode()}\r\n"
    port = port or _DEFAULT_PROXY_PORTS[url_parts.scheme]
    return Proxy(url_parts.scheme, url_parts.hostname, port, header_lines)


async def _open_tunnel(
    proxy: Proxy, authority: str, transport: asyncio.WriteTransport, reader: asyncio.StreamReader
) -> None:
    """Open a tunnel to `authority` (`host:port`), or raise DeliveryError."""
    transport.write(
        f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{proxy.header_lines}\r\n".encode()
    )
    try:
        response = await reader.readuntil(b"\r\n\r\n")
    except (OSError, EOFError, asyncio.LimitOverrunError):
        raise DeliveryError(Fault.INTERNAL, "The egress proxy sent no valid response") from None
    status = response[9:12]
    if response[:7] != b"HTTP/1." or not status.isdigit():
        raise DeliveryError(Fault.INTERNAL, "The response of the egress proxy is not HTTP")
    if not status.startswith(b"2"):
        fault = _PROXY_FAULTS.get(int(status), Fault.INTERNAL)
        raise DeliveryError(fault, f"The egress proxy refused the tunnel: status {int(status)}")


def select_allowed(addresses: Sequence[str], host: str, guard: Guard) -> list[str]:
    """Return the addresses that the guard allows; raise DeliveryError if there are none.

    The caller connects to the returned addresses without another lookup, so that DNS cannot change
    them after the check (DNS rebinding).
    """
    allowed = [address for address in addresses if guard.block_reason(address, host) is None]
    if not allowed:
        raise DeliveryError(Fault.BLOCKED, guard.report_blocked(host, addresses))
    return allowed


def describe_tls_error(error: Exception) -> str:
    """Return a text about a TLS handshake that failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"The TLS handshake failed: {error.reason.lower().replace('_', ' ')}"
    return _CLOSED_IN_HANDSHAKE


async def connect_to_any(addresses: Sequence[str], port: int) -> tuple[asyncio.Transport, str]:
    """Connect to the address that answers first; raise the last OSError if all of them fail."""
    if len(addresses) == 1:
        return await _connect(addresses[0], port)
    # Each address is tried a little after the one before it (Happy Eyeballs, RFC 8305).
    loop, untried = asyncio.get_running_loop(), deque(addresses)
    connect_tasks: set[asyncio.Task[tuple[asyncio.Transport, str]]] = set()
    last_error: BaseException = OSError("there is no address")
    try:
        while untried or connect_tasks:
            if untried:
                connect_tasks.add(loop.create_task(_connect(untried.popleft(), port)))
            delay = _CONNECTION_ATTEMPT_DELAY_S if untried else None
            done, _ = await asyncio.wait(
                connect_tasks, timeout=delay, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                connect_tasks.remove(task)
                error = task.exception()
                if error is None:
                    return task.result()
                last_error = error
        raise last_error
    finally:
        del last_error  # breaks a reference cycle: its traceback refers to this frame
        for task in connect_tasks:
            task.add_done_callback(_close_unused)
            task.cancel()


def _close_unused(task: asyncio.Task[tuple[asyncio.Transport, str]]) -> None:
    """Close a connection that was opened after another one was chosen."""
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


async def _connect(address: str, port: int) -> tuple[asyncio.Transport, str]:
    """Connect to an IP address. The event loop switches Nagle's algorithm off."""
    # A socket from `sock_connect` would take five times the CPU time with uvloop.
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(_NoDataProtocol, address, port)
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return transport, address
