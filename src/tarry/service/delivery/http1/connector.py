"""The way to a server: its addresses, the guard's word on each, a connection, and TLS.

With an egress proxy the way leads there, and on through a tunnel where the target speaks TLS. The
proxy looks names up and judges their addresses; its own is the operator's word and is not judged.
What goes wrong on the way to the proxy, or in it, is a fault of ours.
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

from tarry.runtime.clocks import world
from tarry.service.delivery.http1.proxy import MAX_RESPONSE_BYTES, open_tunnel
from tarry.service.delivery.messages import DeliveryError, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.http1.dns import DnsCache
    from tarry.service.delivery.http1.proxy import Proxy
    from tarry.service.delivery.targets import Target

_OUR_ERRORS = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})
_ENDED = "The connection ended within the TLS handshake"


class ConnectResult(msgspec.Struct):
    """A connection that stands: to whom, and how long its phases took, in milliseconds."""

    transport: asyncio.Transport
    socket: asyncio.Transport
    """What is below TLS, and knows what has not gone out yet."""
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
        names: DnsCache,
        *,
        tls: ssl.SSLContext | None,
        proxy: Proxy | None,
    ) -> None:
        self._target = target
        self._guard = guard
        self._names = names
        self._tls = tls
        self._proxy = proxy

    @property
    def is_proxied(self) -> bool:
        """Whether it leads through a proxy."""
        return self._proxy is not None

    async def open(self, protocol: asyncio.Protocol) -> ConnectResult:
        """Connect; raise NoWay, which says whose fault it is."""
        target = self._target
        if self._proxy is not None:
            return await self._through(self._proxy, protocol)
        return await self._reach(target.host, target.port, protocol, target.scheme == "https")

    async def _reach(
        self,
        host: str,
        port: int,
        protocol: asyncio.Protocol,
        is_secure: bool,  # noqa: FBT001 - the scheme says so
    ) -> ConnectResult:
        began = world.now()
        addresses: Sequence[str] = await resolve_host(host, self._names)
        looked_up = world.now()
        if self._proxy is None:
            addresses = select_allowed(addresses, host, self._guard)
        try:
            made, remote = await dial(addresses, port)
        except OSError as error:
            if error.errno in _OUR_ERRORS:
                raise DeliveryError(Fault.INTERNAL, f"no socket: {error.strerror}") from None
            words = f"Could not connect to {host} port {port}: {error.strerror or error}"
            raise DeliveryError(Fault.REFUSED, words) from None
        connected = world.now()
        transport = await _taken_over(made, _Mute() if is_secure else protocol)
        opened = ConnectResult(
            transport,
            transport,
            remote,
            None if addresses[0] == host else (looked_up - began) * 1000,
            (connected - looked_up) * 1000,
        )
        if is_secure:
            await self._secure(opened, protocol, host)
        return opened

    async def _secure(self, opened: ConnectResult, protocol: asyncio.Protocol, host: str) -> None:
        """Go on with TLS, with a host that has to prove who it is."""
        assert self._tls is not None  # noqa: S101 - else nobody would have begun
        loop, began = asyncio.get_running_loop(), world.now()
        protocol.connection_made(opened.socket)
        if opened.transport.is_closing():
            raise DeliveryError(Fault.TLS, _ENDED)
        try:
            secure = await loop.start_tls(
                opened.transport, protocol, self._tls, server_hostname=host
            )
        except (OSError, TypeError) as error:  # asyncio before 3.12 has the latter, in TLS in TLS
            opened.socket.abort()
            raise DeliveryError(Fault.TLS, _tls_words(error)) from None
        except BaseException:
            opened.socket.abort()
            raise
        assert secure is not None  # noqa: S101 - it is that in server mode alone
        opened.transport = secure
        opened.tls_ms = (world.now() - began) * 1000

    # --- through a proxy --------------------------------------------------------------------------

    async def _through(self, proxy: Proxy, protocol: asyncio.Protocol) -> ConnectResult:
        reader = asyncio.StreamReader(limit=MAX_RESPONSE_BYTES)
        talk = asyncio.StreamReaderProtocol(reader)
        try:
            opened = await self._reach(proxy.host, proxy.port, talk, proxy.scheme == "https")
        except DeliveryError as error:
            raise DeliveryError(Fault.INTERNAL, f"No way to the egress proxy: {error}") from None
        try:
            if self._target.scheme == "https":
                await open_tunnel(proxy, self._target.authority, opened.transport, reader)
                await self._secure(opened, protocol, self._target.host)
            else:
                opened.transport.set_protocol(protocol)
        except BaseException:
            opened.transport.abort()
            raise
        return opened


class _Mute(asyncio.Protocol):
    """Hears nothing: what comes before TLS was said by nobody who has proved who he is."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Learn that the server was reached."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """End it."""
        del data
        self._transport.abort()


async def _taken_over(made: socket, protocol: asyncio.Protocol) -> asyncio.Transport:
    """Return what the loop makes of a socket."""
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(lambda: protocol, sock=made)
    except OSError as error:  # it has ended already
        made.close()
        raise DeliveryError(
            Fault.RESET, f"The connection ended at once: {error.strerror}"
        ) from None
    except BaseException:
        made.close()
        raise
    return transport


async def resolve_host(host: str, names: DnsCache) -> tuple[str, ...]:
    """Return the addresses of a host in its canonical form; raise NoWay when it has none."""
    if ":" in host or host.replace(".", "").isdigit():
        return (host,)
    # RFC 6761, 6.3: all names below it are localhost, and not every resolver knows.
    return await names.look_up("localhost" if host.endswith(".localhost") else host)


def select_allowed(addresses: Sequence[str], host: str, guard: Guard) -> list[str]:
    """Return the addresses that the guard lets us connect to: here no name deceives."""
    why: str | None = None
    allowed: list[str] = []
    for address in addresses:
        refusal = guard.refusal(address, host)
        if refusal is None:
            allowed.append(address)
        why = why or refusal
    if not allowed:
        raise DeliveryError(Fault.BLOCKED, why or f"{host} has no address")
    return allowed


def _tls_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate is not in order: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"The TLS handshake failed: {error.reason.lower().replace('_', ' ')}"
    return _ENDED


_HEAD_START = 0.25
"""Seconds that an address has to itself before the next one is tried too (RFC 8305, section 5)."""


async def dial(addresses: Sequence[str], port: int) -> tuple[socket, str]:
    """Return a connected socket and its address, or raise the OSError of the last that failed."""
    if len(addresses) == 1:
        return await _dial(addresses[0], port)
    loop, left = asyncio.get_running_loop(), deque(addresses)
    racing: set[asyncio.Task[tuple[socket, str]]] = set()
    failure: BaseException = OSError("there is no address")
    try:
        while left or racing:
            if left:
                racing.add(loop.create_task(_dial(left.popleft(), port)))
            head_start = _HEAD_START if left else None
            ended, _ = await asyncio.wait(
                racing, timeout=head_start, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                racing.remove(task)
                error = task.exception()
                if error is None:
                    return task.result()
                failure = error
        raise failure
    finally:
        del failure  # it knows this frame
        for task in racing:
            task.add_done_callback(_close)
            task.cancel()


def _close(task: asyncio.Task[tuple[socket, str]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].close()


async def _dial(address: str, port: int) -> tuple[socket, str]:
    made = socket(AF_INET6 if ":" in address else AF_INET, SOCK_STREAM)
    try:
        made.setblocking(False)  # noqa: FBT003 - there is no other way to say it
        made.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
        made.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made, address
