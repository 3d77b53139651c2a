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
from collections import OrderedDict, deque
from contextlib import suppress
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias, cast
from urllib.parse import unquote, urlsplit

import msgspec

from tarry.errors import ConfigurationError
from tarry.runtime.clocks import environment  # clock, sleep and random numbers
from tarry.service.delivery import DeliveryError, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.targets import Target

Addresses: TypeAlias = "tuple[str, ...]"
_LookupResult: TypeAlias = "Addresses | str"  # the addresses of a host, or an error message

_DNS_TTL_S = 60.0
_MAX_CACHED_HOSTS = 65_536  # about 350 bytes each
_MAX_LOOKUPS = 64  # at a time; each occupies a thread until the DNS server answers
_MAX_HOST_ADDRESSES = 8
_HEAD_START_S = 0.25  # time after which the next address is tried in parallel (RFC 8305, 5)
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
    """Opens connections to the origin of a target."""

    target: Target
    guard: Guard
    dns: DnsCache
    tls: ssl.SSLContext | None  # None if this machine has no trusted certificates
    proxy: Proxy | None

    async def connect(self, protocol: asyncio.Protocol) -> ConnectResult:
        """Open a connection for `protocol`, or raise DeliveryError."""
        target = self.target
        if self.proxy is not None:
            return await self._connect_through(self.proxy, protocol)
        use_tls = target.scheme == "https"
        return await self._connect_to(target.host, target.port, protocol, use_tls=use_tls)

    async def _connect_to(
        self, host: str, port: int, protocol: asyncio.Protocol, *, use_tls: bool
    ) -> ConnectResult:
        started_at = environment.now()
        addresses: Sequence[str] = await self.dns.resolve(host)
        resolved_at = environment.now()
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
        connected_at = environment.now()
        dns_ms = None if addresses[0] == host else (resolved_at - started_at) * 1000
        connect_ms = (connected_at - resolved_at) * 1000
        result = ConnectResult(transport, transport, remote, dns_ms, connect_ms)
        if use_tls:
            await self._start_tls(result, protocol, host)
        else:
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
        return result

    async def _start_tls(
        self, result: ConnectResult, protocol: asyncio.Protocol, host: str
    ) -> None:
        """Perform the TLS handshake; the certificate must be valid for `host`."""
        assert self.tls is not None  # noqa: S101 - checked by `HttpDeliveryClient`
        loop, started_at = asyncio.get_running_loop(), environment.now()
        protocol.connection_made(result.raw_transport)
        if result.transport.is_closing():
            raise DeliveryError(Fault.TLS, _CLOSED_IN_HANDSHAKE)
        try:
            transport = await loop.start_tls(
                result.transport, protocol, self.tls, server_hostname=host
            )
        except (OSError, TypeError) as error:
            # asyncio before 3.12 raises TypeError when TLS within TLS fails.
            result.raw_transport.abort()
            raise DeliveryError(Fault.TLS, _describe_tls_error(error)) from None
        except BaseException:
            result.raw_transport.abort()
            raise
        assert transport is not None  # noqa: S101 - None is returned in server mode only
        result.transport = transport
        result.tls_ms = (environment.now() - started_at) * 1000

    async def _connect_through(self, proxy: Proxy, protocol: asyncio.Protocol) -> ConnectResult:
        reader = asyncio.StreamReader(limit=_MAX_CONNECT_RESPONSE_BYTES)
        proxy_protocol = asyncio.StreamReaderProtocol(reader)
        try:
            use_tls = proxy.scheme == "https"
            result = await self._connect_to(proxy.host, proxy.port, proxy_protocol, use_tls=use_tls)
        except DeliveryError as error:
            message = f"No connection to the egress proxy: {error}"
            raise DeliveryError(Fault.INTERNAL, message) from None
        try:
            if self.target.scheme == "https":
                await _open_tunnel(proxy, self.target.authority, result.transport, reader)
                await self._start_tls(result, protocol, self.target.host)
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
    try:
        url_parts = urlsplit(url)
        port = url_parts.port
    except ValueError:
        url_parts, port = urlsplit(""), 0
    if url_parts.scheme not in _DEFAULT_PROXY_PORTS or not url_parts.hostname or port == 0:
        rule = "must be a URL like http://host:port"
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


def _describe_tls_error(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"The TLS handshake failed: {error.reason.lower().replace('_', ' ')}"
    return _CLOSED_IN_HANDSHAKE


async def connect_to_any(addresses: Sequence[str], port: int) -> tuple[asyncio.Transport, str]:
    """Connect to the fastest of several addresses; raise the last OSError if all of them fail."""
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
            head_start = _HEAD_START_S if untried else None
            done, _ = await asyncio.wait(
                connect_tasks, timeout=head_start, return_when=asyncio.FIRST_COMPLETED
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


class DnsCache:
    """Caches the addresses of host names for a minute, in the order of the system's resolver."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, tuple[float, Addresses]] = OrderedDict()
        """By host name: the time at which the entry expires, and the addresses; oldest first."""
        self._lookups: dict[str, asyncio.Future[_LookupResult]] = {}
        self._lookup_slots = asyncio.Semaphore(_MAX_LOOKUPS)
        self._is_closed = False

    async def resolve(self, host: str) -> Addresses:
        """Return the addresses of a host (a canonical name or address), or raise DeliveryError."""
        if ":" in host or host.replace(".", "").isdigit():
            return (host,)
        if host.endswith(".localhost"):
            host = "localhost"  # RFC 6761, 6.3: the same host, which some resolvers do not know
        addresses = self._get_cached(host)
        if addresses is None and host not in self._lookups:
            await self._lookup_slots.acquire()
            addresses = self._get_cached(host)
            if addresses is None and host not in self._lookups:
                self._start_lookup(host)
            else:  # another caller has started or finished the lookup meanwhile
                self._lookup_slots.release()
        if addresses is not None:
            return addresses
        # Shielded: cancelling this caller must not cancel the lookup, for which other callers may
        # be waiting.
        result = await asyncio.shield(self._lookups[host])
        if isinstance(result, str):
            raise DeliveryError(Fault.INTERNAL if self._is_closed else Fault.DNS, result)
        return result

    async def close(self) -> None:
        """Fail the callers that wait for a lookup."""
        self._is_closed = True
        for lookup in self._lookups.values():
            if not lookup.done():
                lookup.set_result("the service is shutting down")

    def _get_cached(self, host: str) -> Addresses | None:
        expires_at, addresses = self._cached.get(host, (0.0, ()))
        return addresses if asyncio.get_running_loop().time() < expires_at else None

    def _start_lookup(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        # One thread per lookup instead of a thread pool: names that cannot be resolved would occupy
        # all threads of a pool, and the process would wait for those threads at exit.
        thread = Thread(target=_resolve, args=(host, loop, self._on_resolved), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._lookup_slots.release()
            message = f"cannot start a thread for a DNS lookup: {error}"
            raise DeliveryError(Fault.INTERNAL, message) from None
        self._lookups[host] = loop.create_future()

    def _on_resolved(self, host: str, result: _LookupResult) -> None:
        self._lookup_slots.release()
        if not isinstance(result, str):
            self._cached[host] = asyncio.get_running_loop().time() + _DNS_TTL_S, result
            self._cached.move_to_end(host)
            if len(self._cached) > _MAX_CACHED_HOSTS:
                self._cached.popitem(last=False)
        lookup = self._lookups.pop(host)
        if not lookup.done():
            lookup.set_result(result)


def _resolve(
    host: str, loop: asyncio.AbstractEventLoop, on_resolved: Callable[[str, _LookupResult], None]
) -> None:
    """Resolve a name in a thread of its own, and pass the result to the event loop."""
    result: _LookupResult
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        result = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))[:_MAX_HOST_ADDRESSES]
    except (OSError, UnicodeError) as error:
        result = f"Could not resolve {host}: {getattr(error, 'strerror', None) or error}"
    with suppress(RuntimeError):  # raised if the loop is closed; then no caller waits
        loop.call_soon_threadsafe(on_resolved, host, result)
