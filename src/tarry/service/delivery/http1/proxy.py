"""Egress proxies: which one, and how it is asked for a tunnel."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from urllib.parse import unquote, urlsplit

import msgspec

from tarry.errors import ConfigurationError
from tarry.service.delivery.messages import DeliveryError, Fault

MAX_RESPONSE_BYTES = 16 * 1024
"""Bytes of its answer."""
_PORTS = {"http": 80, "https": 443}
_SAYS = {403: Fault.BLOCKED, 502: Fault.REFUSED, 503: Fault.REFUSED, 504: Fault.REFUSED}
"""What a proxy means that does not open the way; all else is a failure of its own."""


class Proxy(msgspec.Struct, frozen=True):
    """An egress proxy."""

    scheme: str
    host: str
    port: int
    lines: str
    """The header lines that are for it."""


def parse_proxy(url: str) -> Proxy:
    """Return the proxy that a URL names, or raise ConfigurationError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        rule = "must be a URL as http://host:port"
        raise ConfigurationError("proxy", rule, url.rpartition("@")[2])
    lines = ""
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        lines = f"Proxy-Authorization: Basic {b64encode(secret).decode()}\r\n"
    return Proxy(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], lines)


async def open_tunnel(
    proxy: Proxy, there: str, transport: asyncio.WriteTransport, reader: asyncio.StreamReader
) -> None:
    """Have a proxy open the way to a server, `host:port`; raise NoWay when it does not."""
    transport.write(f"CONNECT {there} HTTP/1.1\r\nHost: {there}\r\n{proxy.lines}\r\n".encode())
    try:
        said = await reader.readuntil(b"\r\n\r\n")
    except (OSError, EOFError, asyncio.LimitOverrunError):
        raise DeliveryError(Fault.INTERNAL, "The egress proxy did not answer") from None
    status = said[9:12]
    if said[:7] != b"HTTP/1." or not status.isdigit():
        raise DeliveryError(Fault.INTERNAL, "What the egress proxy answered is no HTTP")
    if not status.startswith(b"2"):
        fault = _SAYS.get(int(status), Fault.INTERNAL)
        raise DeliveryError(fault, f"The egress proxy does not open the way: {int(status)}")
