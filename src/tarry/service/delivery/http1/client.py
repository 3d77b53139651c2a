"""HTTP deliveries.

Keep-alive connections per server, one deadline over all phases, no redirects, no decompression, no
cookies, nothing from the environment. Every address is judged by the guard when a connection to it
is about to be made; with an egress proxy, the guard judges what the URL alone shows, before each
attempt.

A client of our own, for two reasons: the guard sees the very address, and an attempt costs half of
what it costs with libcurl (17 us of processor time against 35). What is hard is not ours: llhttp
parses, the ssl module does TLS, and the loop the rest.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from tarry.core.checks import count
from tarry.errors import ConfigurationError, short_repr
from tarry.runtime.clocks import world
from tarry.service.defaults import MAX_RESPONSE_BYTES
from tarry.service.delivery.http1.connector import Connector
from tarry.service.delivery.http1.dns import DnsCache
from tarry.service.delivery.http1.headers import encode_headers, is_token
from tarry.service.delivery.http1.pending_request import DeadlineTimer, PendingRequest
from tarry.service.delivery.http1.pool import ConnectionLimit, ConnectionPool
from tarry.service.delivery.http1.proxy import parse_proxy
from tarry.service.delivery.messages import DeliveryError, DeliveryResult, Fault
from tarry.service.delivery.targets import parse_target

if TYPE_CHECKING:
    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.messages import DeliveryRequest

MAX_CONNECTIONS, MAX_HOST_CONNECTIONS = 1024, 256
_SWEEP_SECONDS = 15.0
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_FORBIDDEN = frozenset({"CONNECT", "TRACE"})
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
"""Methods whose requests say nothing of a body when they have none."""
_NOT_CANONICAL = "targetUrl must be in its canonical form"


class HttpDelivery:
    """Makes attempts over HTTP/1.1.

    `proxy` is the URL of an egress proxy (`http://host:port` or `https`), `ca` a PEM file of
    trusted certificates instead of the system's. Bound to the event loop of its first attempt.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        proxy: str | None = None,
        ca: str | None = None,
        max_body: int = MAX_RESPONSE_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        max_host_connections: int = MAX_HOST_CONNECTIONS,
    ) -> None:
        self._guard = guard
        self._clock = world.now  # a loop's own may be too coarse
        self._proxy = None if proxy is None else parse_proxy(proxy)
        self._max_body = count("max_body", max_body)
        self._tls = _trusting(ca)
        self._names = DnsCache()
        self._deadlines = DeadlineTimer(self._clock)
        self._most = count("max_host_connections", max_host_connections)
        self._room = ConnectionLimit(count("max_connections", max_connections), self._make_room)
        self._pools: dict[str, ConnectionPool] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    def send(self, request: DeliveryRequest) -> asyncio.Future[DeliveryResult]:
        """Make one attempt; cancelled, it leaves nothing behind."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        try:
            pool, head = self._prepared(request)
        except DeliveryError as error:
            answer: asyncio.Future[DeliveryResult] = loop.create_future()
            answer.set_result(DeliveryResult(fault=error.fault, error=str(error)))
            return answer
        now = self._clock()
        sending = PendingRequest(loop, pool, request, head, now)
        sending.deadline = self._deadlines.add(now + request.timeout, sending)
        pool.send(sending, now)
        return sending

    async def close(self) -> None:
        """End what runs and close connections."""
        self._is_closed = True
        if self._loop is None:
            return
        if self._sweeper is not None:
            self._sweeper.cancel()
        pools, self._pools = self._pools, {}
        self._deadlines.close()
        ending = [task for pool in pools.values() for task in pool.close(self._clock())]
        if ending:
            await asyncio.wait(ending)
        await self._names.close()

    # --- what goes out ----------------------------------------------------------------------------

    def _prepared(self, request: DeliveryRequest) -> tuple[ConnectionPool, bytes]:
        """Return where a request goes, and its head; raise NoWay when it cannot be sent."""
        url, method, body = request.url, request.method, request.body
        at = url.find("/", 8)  # after https://
        pool = self._pools.get(url[:at])
        if pool is None or at < 0 or self._proxy is not None:
            pool = self._pool_for(url)
        path = url[at:]
        if not (path.isascii() and path.isprintable()) or " " in path:
            raise DeliveryError(Fault.INVALID, _NOT_CANONICAL)
        if method not in _METHODS:
            _check_method(method, body)
        lines = encode_headers(request.headers)
        if lines is None:
            words = "headers must have names that are tokens, and no line breaks in their values"
            raise DeliveryError(Fault.INVALID, words)
        if body or method not in _BODILESS:
            lines = f"{lines}Content-Length: {len(body)}\r\n"
        head = f"{method} {pool.prefix}{path} HTTP/1.1\r\n{pool.lines}{lines}\r\n"
        try:
            return pool, head.encode()
        except UnicodeEncodeError:
            raise DeliveryError(Fault.INVALID, "headers must be valid Unicode text") from None

    def _pool_for(self, url: str) -> ConnectionPool:
        """Return the connections to a server; the URL is judged as it was when it was posted."""
        try:
            target = parse_target(url)
        except ConfigurationError as error:
            raise DeliveryError(Fault.INVALID, str(error)) from None
        if target.url != url or target.scheme not in {"http", "https"}:
            raise DeliveryError(Fault.INVALID, _NOT_CANONICAL)
        proxy = self._proxy
        if proxy is not None:
            try:
                self._guard.check_url(target)
            except ConfigurationError as error:
                raise DeliveryError(Fault.BLOCKED, str(error)) from None
        if self._is_closed:
            raise DeliveryError(Fault.INTERNAL, "the delivery is closed")
        is_secure = target.scheme == "https"
        if self._tls is None and (is_secure or (proxy is not None and proxy.scheme == "https")):
            raise DeliveryError(Fault.INTERNAL, "no trusted certificates found: set `ca`")
        start = url[: url.index("/", 8)]
        pool = self._pools.get(start)
        if pool is None:
            way = Connector(target, self._guard, self._names, tls=self._tls, proxy=proxy)
            pool = ConnectionPool(
                way, self._room, self._clock, most=self._most, max_body=self._max_body
            )
            pool.lines = f"Host: {start.partition('://')[2]}\r\n"
            if proxy is not None and not is_secure:  # else it is in the tunnel
                pool.prefix = start
                pool.lines += proxy.lines
            self._pools[start] = pool
            self._sweep_later()
        return pool

    # --- connections that nobody needs ------------------------------------------------------------

    def _make_room(self) -> None:
        """Close a connection that is idle, if there is one."""
        any(pool.drop_idle() for pool in self._pools.values())

    def _sweep_later(self) -> None:
        if self._sweeper is None and self._loop is not None:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        assert self._loop is not None  # noqa: S101 - it calls
        self._sweeper = None
        now = self._clock()
        for pool in self._pools.values():
            pool.drop_stale(now)
        self._pools = {at: pool for at, pool in self._pools.items() if not pool.is_empty}
        if self._pools:
            self._sweep_later()


def _check_method(method: str, body: bytes) -> None:
    if not is_token(method) or method.upper() in _FORBIDDEN:
        words = f"method must be an HTTP method other than CONNECT and TRACE, got {method!r}"
        raise DeliveryError(Fault.INVALID, words)
    if method == "HEAD" and body:
        raise DeliveryError(Fault.INVALID, "body must be empty: a HEAD request has none")


def _trusting(ca: str | None) -> ssl.SSLContext | None:
    """Return how TLS is done; None when this machine has no certificates to trust."""
    if ca is not None and not Path(ca).is_file():
        raise ConfigurationError("ca", "must be a file of PEM certificates", ca)
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        rule = f"must be a file of PEM certificates, and {short_repr(ca)} has none"
        raise ConfigurationError("ca", rule) from None
    context.set_alpn_protocols(["http/1.1"])
    paths = ssl.get_default_verify_paths()
    has_any = context.cert_store_stats()["x509_ca"] or paths.cafile or paths.capath
    return context if ca is not None or has_any else None
