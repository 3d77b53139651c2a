"""Egress proxies: their URL, and the CONNECT request that opens a tunnel."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from urllib.parse import unquote, urlsplit

import msgspec

from tarry.errors import ConfigurationError
from tarry.service.delivery.messages import DeliveryError, Fault

MAX_CONNECT_RESPONSE_BYTES = 16 * 1024
_DEFAULT_PORTS = {"http": 80, "https": 443}
_STATUS_FAULTS = {403: Fault.BLOCKED, 502: Fault.REFUSED, 503: Fault.REFUSED, 504: Fault.REFUSED}
"""The fault for a status with which a proxy reports a problem of the target.

Any other status is a failure of the proxy itself.
"""


class Proxy(msgspec.Struct, frozen=True):
    """An egress proxy."""

    scheme: str
    host: str
    port: int
    header_lines: str
    """The header lines that only the proxy receives: credentials, if its URL has any."""


def parse_proxy(url: str) -> Proxy:
    """Return the proxy at a URL; raise ConfigurationError when the URL is not valid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or port == 0:
        rule = "must be a URL like http://host:port"
        raise ConfigurationError("proxy", rule, url.rpartition("@")[2])
    header_lines = ""
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        header_lines = f"Proxy-Authorization: Basic {b64encode(credentials).decode()}\r\n"
    return Proxy(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme], header_lines)


async def open_tunnel(
    proxy: Proxy, authority: str, transport: asyncio.WriteTransport, reader: asyncio.StreamReader
) -> None:
    """Open a tunnel to a server (`host:port`); raise DeliveryError when the proxy refuses."""
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
        fault = _STATUS_FAULTS.get(int(status), Fault.INTERNAL)
        raise DeliveryError(fault, f"The egress proxy refused the tunnel: status {int(status)}")
