"""The HTTP client with which the service makes attempts: `HttpDeliveryClient`.

The client keeps connections alive and applies one deadline to all phases of an attempt. It does not
follow redirects, decompress bodies, store cookies or read proxy settings from the environment. The
guard, which blocks internal networks, checks every address right before a connection to it is
opened. An egress proxy resolves names itself, so with a proxy the guard checks only the URL, before
each attempt.

The client is written by hand for two reasons: the guard can check the exact address, and an attempt
takes half the CPU time that it takes with libcurl (17 us instead of 35). Libraries do the difficult
parts: llhttp parses responses, and the ssl module does TLS. `_prepare` rejects header values that
would inject a line into the request.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.errors import ConfigurationError, short_repr
from tarry.runtime.effects import effects
from tarry.service.certificates import ReloadingCertificate
from tarry.service.defaults import MAX_RESPONSE_BYTES
from tarry.service.delivery import (
    DeliveryError,
    DeliveryFuture,
    DeliveryResult,
    Fault,
    call_when_done,
)
from tarry.service.delivery.client_certificates import find_certificate
from tarry.service.delivery.dns import DnsCache
from tarry.service.delivery.http1.connection import (
    METHODS_WITHOUT_BODY,
    DeadlineTimer,
    PendingRequest,
)
from tarry.service.delivery.http1.connector import Connector, parse_proxy
from tarry.service.delivery.http1.pool import ConnectionLimit, HttpConnectionPool
from tarry.service.delivery.targets import parse_target
from tarry.wire.http import HOP_BY_HOP_HEADERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.certificates import CertificateFiles
    from tarry.service.delivery import DeliveryCallback, DeliveryRequest, PendingDelivery
    from tarry.service.delivery.client_certificates import ClientCertificate
    from tarry.service.delivery.guard import Guard

MAX_CONNECTIONS, MAX_POOL_CONNECTIONS = 1024, 256
"""The limits of connections of all pools together, and of one pool."""
_SWEEP_INTERVAL_S = 15.0
_COMMON_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_FORBIDDEN_METHODS = frozenset({"CONNECT", "TRACE"})
_is_token = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch  # RFC 9110, 5.6.2
_FORBIDDEN_HEADERS = HOP_BY_HOP_HEADERS | {"content-length", "expect", "host"}
"""Headers that belong to the connection or the message framing; a task must not set them."""
_DEFAULT_HEADERS = {
    "user-agent": f"tarry/{version('tarry')}",
    "accept": "*/*",
    "accept-encoding": "identity",
}
_HEADER_RULE = (
    "headers must have valid names (RFC 9110) and no line breaks, and must not set Host, "
    "Content-Length, Expect or a hop-by-hop header"
)
_MAX_HEAD_PARTS = 16  # lists of header names per pool; most tasks for a target have the same
_NOT_CANONICAL = "targetUrl must be in its canonical form"  # as `parse_target` returns it


class HttpDeliveryClient:
    """Makes attempts over HTTP/1.1, all on one event loop.

    `proxy` is the URL of an egress proxy (`http://host:port` or `https://host:port`). `ca_file` is
    a PEM file of certificates to trust instead of the system's. Of `client_certificates`, the first
    one for a target is presented to it.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        dns: DnsCache | None = None,
        proxy: str | None = None,
        ca_file: str | None = None,
        client_certificates: Sequence[ClientCertificate] = (),
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        max_pool_connections: int = MAX_POOL_CONNECTIONS,
    ) -> None:
        self._guard = guard
        self._clock = effects.now  # monotonic; the loop's own clock may be too coarse
        self._proxy = None if proxy is None else parse_proxy(proxy)
        self._max_response_bytes = check_count("max_response_bytes", max_response_bytes)
        self._tls = _create_tls_context(ca_file)
        self._client_certificates = {
            certificate: ReloadingCertificate(
                certificate.open_files(), partial(_create_client_context, ca_file)
            )
            for certificate in client_certificates
        }
        self._dns = dns or DnsCache()
        self._deadlines = DeadlineTimer(self._clock)
        self._max_pool_connections = check_count("max_pool_connections", max_pool_connections)
        self._limit = ConnectionLimit(check_count("max_connections", max_connections))
        self._pools: dict[tuple[str, str], HttpConnectionPool] = {}
        """Pools by tenant and origin: the canonical URL up to its path, such as `https://host`.
        Tenants do not share connections: one tenant's target could send a response to the request
        of another tenant, and servers may authenticate a connection instead of each request. A
        pool is removed when it is empty, so their number does not grow with the number of hosts."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def send(self, request: DeliveryRequest) -> DeliveryFuture:
        """Make one attempt. Cancelling the returned future aborts the attempt."""
        return DeliveryFuture(self, request)

    def start(self, request: DeliveryRequest, on_done: DeliveryCallback) -> PendingDelivery:
        """Make one attempt, and call `on_done` when it has ended."""
        try:
            pool, head = self._prepare(request)
        except DeliveryError as error:
            failed: asyncio.Future[DeliveryResult] = asyncio.get_running_loop().create_future()
            failed.set_result(error.to_result())
            return call_when_done(failed, on_done)
        now = self._clock()
        pending = PendingRequest(pool, request, head, now, on_done)
        pending.deadline = self._deadlines.add(now + request.timeout, pending.on_deadline)
        pool.send(pending, now)
        return pending

    async def close(self) -> None:
        """Fail running attempts and close all connections."""
        self._is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        pools, self._pools = self._pools, {}
        self._deadlines.close()
        cancelled = [task for pool in pools.values() for task in pool.close(self._clock())]
        if cancelled:
            await asyncio.wait(cancelled)
        await self._dns.close()

    def _prepare(self, request: DeliveryRequest) -> tuple[HttpConnectionPool, bytes]:
        """Return the pool for a request, and the encoded head, or raise DeliveryError."""
        url, method, body = request.url, request.method, request.body
        path_start = url.find("/", 8)  # after https://
        # The origin is a prefix of the canonical URL, so a known origin needs no URL parser.
        pool = self._pools.get((request.tenant, url[:path_start]))
        if pool is None or path_start < 0 or self._proxy is not None:
            pool = self._get_pool(request.tenant, url)
        path_and_query = url[path_start:]
        if not (path_and_query.isascii() and path_and_query.isprintable()) or " " in path_and_query:
            raise DeliveryError(Fault.INVALID, _NOT_CANONICAL)
        if method not in _COMMON_METHODS:
            _check_method(method, body)
        headers = request.headers
        names = tuple(headers)
        cached_parts = pool.head_parts.get(names)
        if cached_parts is None:
            cached_parts = _build_head_parts(pool, names)
            if len(pool.head_parts) >= _MAX_HEAD_PARTS:
                pool.head_parts.clear()
            pool.head_parts[names] = cached_parts
        values = [method, path_and_query, *headers.values()]
        joined_values = "".join(values)  # one check of all values is faster than a check of each
        if "\n" in joined_values or "\r" in joined_values or "\0" in joined_values:
            raise DeliveryError(Fault.INVALID, _HEADER_RULE)
        # Filling in the parts takes half the time of formatting each header line.
        parts = cached_parts.copy()
        parts[:-1:2] = values
        if body or method not in METHODS_WITHOUT_BODY:  # else no `Content-Length: 0`
            parts[-1] = f"\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            return pool, "".join(parts).encode()
        except UnicodeEncodeError:
            raise DeliveryError(Fault.INVALID, "headers must be valid Unicode text") from None

    def _get_pool(self, tenant: str, url: str) -> HttpConnectionPool:
        """Parse and check a URL, as when its task was added; return its pool, or raise."""
        try:
            target = parse_target(url)
        except ConfigurationError as error:
            raise DeliveryError(Fault.INVALID, str(error)) from None
        if target.url != url or target.scheme not in {"http", "https"}:
            raise DeliveryError(Fault.INVALID, _NOT_CANONICAL)
        proxy = self._proxy
        if proxy is not None:
            try:
                self._guard.check_host(target)
            except ConfigurationError as error:
                raise DeliveryError(Fault.BLOCKED, str(error)) from None
        if self._is_closed:
            raise DeliveryError(Fault.INTERNAL, "the service is shutting down")
        use_tls = target.scheme == "https"
        if self._tls is None and (use_tls or (proxy is not None and proxy.scheme == "https")):
            raise DeliveryError(Fault.INTERNAL, "no trusted certificates found: set `ca_file`")
        origin = url[: url.index("/", 8)]
        key = tenant, origin
        pool = self._pools.get(key)
        if pool is None:
            # A pool belongs to one tenant and one origin, so that connections with different client
            # certificates are never shared.
            certificate = find_certificate(self._client_certificates, tenant, target)
            context = None if certificate is None else self._client_certificates[certificate]
            pool = HttpConnectionPool(
                Connector(tenant, target, self._guard, self._dns, self._tls, proxy, context),
                self._limit,
                self._clock,
                partial(self._pools.pop, key, None),
                max_connections=self._max_pool_connections,
                max_response_bytes=self._max_response_bytes,
            )
            pool.header_lines = [f"Host: {origin.partition('://')[2]}"]
            if proxy is not None and not use_tls:  # with TLS, the proxy only forwards bytes
                pool.url_prefix = origin
                pool.header_lines += proxy.header_lines.splitlines()
            self._pools[key] = pool
            self._schedule_sweep()
        return pool

    def _schedule_sweep(self) -> None:
        if self._sweep_timer is None:
            loop = asyncio.get_running_loop()
            self._sweep_timer = loop.call_later(_SWEEP_INTERVAL_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        self._limit.close_expired(self._clock())
        if self._pools:
            self._schedule_sweep()


def _check_method(method: str, body: bytes) -> None:
    if not _is_token(method) or method.upper() in _FORBIDDEN_METHODS:
        message = f"method must be an HTTP method other than CONNECT and TRACE, got {method!r}"
        raise DeliveryError(Fault.INVALID, message)
    if method == "HEAD" and body:
        raise DeliveryError(Fault.INVALID, "body must be empty, because a HEAD request has no body")


def _create_tls_context(ca_file: str | None) -> ssl.SSLContext | None:
    """Return the TLS context; None if this machine has no trusted certificates."""
    if ca_file is not None and not Path(ca_file).is_file():
        raise ConfigurationError("ca_file", "must be a file of PEM certificates", ca_file)
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        rule = f"must be a file of PEM certificates, but {short_repr(ca_file)} has none"
        raise ConfigurationError("ca_file", rule) from None
    context.set_alpn_protocols(["http/1.1"])
    context.hostname_checks_common_name = False  # RFC 9525, 2
    paths = ssl.get_default_verify_paths()
    has_certificates = context.cert_store_stats()["x509_ca"] or paths.cafile or paths.capath
    return context if ca_file is not None or has_certificates else None


def _create_client_context(ca_file: str | None, files: CertificateFiles) -> ssl.SSLContext:
    """Return a TLS context with a client certificate."""
    context = _create_tls_context(ca_file)
    if context is None:
        raise ConfigurationError("ca_file", "must be set: this machine has no trusted certificates")
    files.load_into(context)
    return context


def _build_head_parts(pool: HttpConnectionPool, names: tuple[str, ...]) -> list[str]:
    """Return the parts of a request head with these header names, or raise DeliveryError.

    The parts at even indexes are filled in for each request: the method, the path and the header
    values, and then the end of the head, which may contain a Content-Length.
    """
    present = {name.lower() for name in names}
    if present & _FORBIDDEN_HEADERS or not all(map(_is_token, names)):
        raise DeliveryError(Fault.INVALID, _HEADER_RULE)
    lines = [*pool.header_lines]
    lines += [f"{name}: {value}" for name, value in _DEFAULT_HEADERS.items() if name not in present]
    parts = ["", f" {pool.url_prefix}", "", "\r\n".join([" HTTP/1.1", *lines])]
    for name in names:
        parts[-1] += f"\r\n{name}: "
        parts += ["", ""]
    return [*parts, "\r\n\r\n"]
