"""HTTP deliveries, on libcurl.

Keep-alive connections per host, one deadline over all phases, no redirects, no decompression, no
cookies, nothing from the environment. Every address is judged by the guard when a connection to it
is about to be made.

With an egress proxy the proxy looks names up, so it judges their addresses: the guard judges what
the URL alone shows, before each attempt. The proxy's own address is the operator's word and is not
judged. What goes wrong on the way to the proxy, or in it, is a fault of ours.
"""

from __future__ import annotations

import asyncio
import ssl
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tarry.core.checks import count, short
from tarry.errors import ConfigurationError
from tarry.service.delivery.driver import Driver, DriverFailed
from tarry.service.delivery.exchange import Delivered, Fault
from tarry.service.delivery.handle import Handle
from tarry.service.delivery.library import pycurl
from tarry.service.delivery.targets import parse_target

if TYPE_CHECKING:
    from tarry.service.delivery.driver import Failure
    from tarry.service.delivery.exchange import Request
    from tarry.service.delivery.guard import Guard

MAX_BODY = 1024 * 1024
"""Bytes of an answer's body that are read; the rest is not waited for."""
MAX_CONNECTIONS, MAX_HOST_CONNECTIONS = 1024, 256
_MOST_IDLE = 1024
"""Handles that are kept for later."""
_IDLE_SECONDS, _LIFE_SECONDS = 60, 300
"""How long a connection is kept unused, and at all: then a name is looked up anew."""
_HTTPS = "https:"


class HttpDelivery:
    """Makes attempts over HTTP/1.1.

    `proxy` is the URL of an egress proxy (`http://host:port`, `https`, `socks5h`), `ca` a PEM file
    of trusted certificates instead of the system's. Bound to the event loop of its first attempt.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        proxy: str | None = None,
        ca: str | None = None,
        max_body: int = MAX_BODY,
        max_connections: int = MAX_CONNECTIONS,
        max_host_connections: int = MAX_HOST_CONNECTIONS,
    ) -> None:
        self._guard = guard
        self._proxied = proxy is not None
        self._max_body = count("max_body", max_body)
        self._ca = _trusted(ca)
        self._common = [
            (pycurl.NOSIGNAL, 1),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),
            (pycurl.PATH_AS_IS, 1),
            (pycurl.USERAGENT, f"tarry/{version('tarry')}"),
            (pycurl.PROXY, "" if proxy is None else _proxy(proxy)),  # "": not the environment's
            (pycurl.NOPROXY, ""),
            (pycurl.TCP_KEEPALIVE, 1),
            (pycurl.MAXAGE_CONN, _IDLE_SECONDS),
            (pycurl.MAXLIFETIME_CONN, _LIFE_SECONDS),
            *self._ca,
        ]
        self._idle: list[Handle] = []
        self._is_closed = False
        most = count("max_connections", max_connections)
        per_host = count("max_host_connections", max_host_connections)
        self._driver = Driver(
            (pycurl.M_MAX_TOTAL_CONNECTIONS, most),
            (pycurl.M_MAXCONNECTS, most),
            (pycurl.M_MAX_HOST_CONNECTIONS, per_host),
        )

    def send(self, request: Request) -> asyncio.Future[Delivered]:
        """Make one attempt; cancelled, it leaves nothing behind."""
        refused = self._refusal(request)
        if refused is not None:
            return _at_once(refused)
        handle = self._idle.pop() if self._idle else self._new_handle()
        why = handle.prepare(request)
        if why is not None:
            self._keep(handle)
            return _at_once(Delivered(fault=Fault.INVALID, error=why))
        sending = _Sending(self, handle)
        self._driver.perform(handle.curl, sending.ended)
        return sending

    async def close(self) -> None:
        """End what runs and close connections."""
        self._is_closed = True
        self._driver.close()
        self._idle.clear()

    def _new_handle(self) -> Handle:
        return Handle(self._guard, self._common, self._max_body, proxied=self._proxied)

    def abandon(self, handle: Handle) -> None:
        """Break an attempt off."""
        self._driver.abandon(handle.curl)
        self._keep(handle)

    def ended(self, handle: Handle, failure: Failure) -> Delivered:
        """Return what an attempt came to."""
        if isinstance(failure, DriverFailed):
            return Delivered(fault=Fault.OURS, error=f"libcurl: {failure}")
        delivered = handle.answered() if failure is None else handle.failed(*failure)
        self._keep(handle)
        return delivered

    def _keep(self, handle: Handle) -> None:
        if len(self._idle) < _MOST_IDLE and not self._is_closed:
            handle.rest()
            self._idle.append(handle)

    def _refusal(self, request: Request) -> Delivered | None:
        if self._is_closed:
            return Delivered(fault=Fault.OURS, error="the delivery is closed")
        if not self._ca and request.url.startswith(_HTTPS):
            return Delivered(fault=Fault.OURS, error="no trusted certificates found: set `ca`")
        return self._shown_by_url(request.url) if self._proxied else None

    def _shown_by_url(self, url: str) -> Delivered | None:
        try:
            target = parse_target(url)
        except ConfigurationError as error:
            return Delivered(fault=Fault.INVALID, error=str(error))
        try:
            self._guard.check_url(target)
        except ConfigurationError as error:
            return Delivered(fault=Fault.BLOCKED, error=str(error))
        return None


class _Sending(asyncio.Future[Delivered]):
    """An attempt under way. It is no coroutine: nothing has to be woken but who waits for it."""

    def __init__(self, delivery: HttpDelivery, handle: Handle) -> None:
        super().__init__()
        self._delivery = delivery
        self._handle = handle

    def ended(self, failure: Failure) -> None:
        """Learn from the driver that it is over."""
        try:
            self.set_result(self._delivery.ended(self._handle, failure))
        except Exception as error:  # noqa: BLE001 - whoever waits for it is told
            self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Break it off."""
        if not super().cancel(msg):
            return False
        self._delivery.abandon(self._handle)
        return True


def _at_once(delivered: Delivered) -> asyncio.Future[Delivered]:
    answer: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
    answer.set_result(delivered)
    return answer


def _proxy(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https", "socks5h"} or not parts.hostname:
        msg = f"proxy must be a URL as http://host:port, got {short(url.rpartition('@')[2])}"
        raise ConfigurationError(msg)
    return url


def _trusted(ca: str | None) -> list[tuple[int, str]]:
    """Return the option that names the trusted certificates: libcurl's own default is unknown."""
    if ca is not None:
        if not Path(ca).is_file():
            msg = f"ca must be a file of PEM certificates, got {short(ca)}"
            raise ConfigurationError(msg)
        return [(pycurl.CAINFO, ca)]
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return [(pycurl.CAINFO, paths.cafile)]
    return [(pycurl.CAPATH, paths.capath)] if paths.capath else []
