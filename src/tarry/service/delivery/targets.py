"""Where an attempt goes: the one parser of target URLs, and their canonical form.

What is parsed is what is sent: the text that goes to the client library is built anew from the
parsed parts, so no second parser can read it otherwise. Spellings that programs read differently
(`127.1`, `0x7f.0.0.1`, user info, zone ids, backslashes) are refused, not guessed at. A refusal
shows no more of the URL than what is wrong with it, for the rest may be secret. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from socket import AF_INET6, inet_ntop
from typing import NoReturn
from urllib.parse import quote

import msgspec

from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

MAX_URL_BYTES = 8192
"""Bytes of a URL."""

_PORTS = {"http": 80, "https": 443}
"""What a URL without a port means."""
_SCHEMES = frozenset({"http", "https", "grpc", "grpcs"})
_SCHEME_RULE = "must start with http://, https://, grpc:// or grpcs://"
_LAST_PORT = 65_535
_LONGEST_HOST = 253

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\\s]")
_START = r"([^:/?#]*+://[^/?#]*+)"
_PARTS = re.compile(rf"{_START}([^#]*)", re.DOTALL)
_PLAIN = re.compile(rf"{_START}([A-Za-z0-9/?:@!$&'()*+,;=._~%\[\]-]*+)")
"""A URL whose path and query need no encoding, in two parts: the second begins with the path."""
_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)
"""A host that ends in a number: an IPv4 address to all who read it, or nothing."""
_KEPT = "/?:@!$&'()*+,;=._~%[]-"
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_METHOD = re.compile(r"/[A-Za-z_][\w.]*/[A-Za-z_]\w*", re.ASCII)


class Target(msgspec.Struct, frozen=True, gc=False):
    """A URL that an attempt can be sent to, taken apart."""

    url: str
    """The canonical text: this is what is sent."""
    scheme: str
    """`http`, `https`, `grpc` or `grpcs`."""
    host: str
    """In ASCII and lower case; an IPv6 address without its brackets."""
    port: int
    origin: str
    """What names its lane: `scheme:host:port`."""
    path: str
    """The path, with the query if there is one."""

    @property
    def authority(self) -> str:
        """The host and port as a URL has them."""
        return self.origin.partition(":")[2]


def parse_target(text: str) -> Target:
    """Return the target that a URL names, or raise ConfigurationError about `targetUrl`."""
    if not isinstance(text, str):
        raise ConfigurationTypeError("targetUrl", f"must be text, got {short_repr(text)}")
    if len(text) > MAX_URL_BYTES:
        _refuse(f"must have at most {MAX_URL_BYTES} bytes: send long data in the body")
    plain = _PLAIN.fullmatch(text)
    start, path = _encoded(text) if plain is None else plain.groups()
    scheme, host, port, shown, origin = _server(start)
    if scheme not in _PORTS and _METHOD.fullmatch(path) is None:
        _refuse(f"must name a gRPC method: {scheme}://host:port/package.Service/Method")
    if not path.startswith("/"):
        path = f"/{path}"
    if "%" in path:
        path = _ESCAPE.sub(lambda found: found[0].upper(), path)
    url = shown + path
    if len(url) > MAX_URL_BYTES:
        _refuse(f"must have at most {MAX_URL_BYTES} bytes: send long data in the body")
    return Target(url, scheme, host, port, origin, path)


def parse_host(text: str) -> str:
    """Return the canonical form of a host: a name, or an address (IPv6 without brackets)."""
    if "%" in text:
        _refuse("must have no percent-encoding in the host: write the name itself")
    host = text.lower() if text.isascii() else _ascii(text)
    host = host.removesuffix(".")
    if not host:
        _refuse("must name a host")
    if _NUMBER.fullmatch(host):
        try:
            return str(IPv4Address(host))
        except AddressValueError:
            _refuse(f"must spell an IPv4 address as four decimal numbers, got {short_repr(host)}")
    if len(host) > _LONGEST_HOST or _NAME.fullmatch(host) is None:
        _refuse(f"must name a host of letters, digits, '-', '_' and '.', got {short_repr(host)}")
    if "xn--" in host:
        _ascii(host)
    return host


@lru_cache(1024)  # few servers get most of the tasks
def _server(start: str) -> tuple[str, str, int, str, str]:
    """Take the start of a URL apart: its scheme, host, port, canonical form, and origin."""
    _check_characters(start)
    scheme, _, authority = start.partition("://")
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        _refuse(_SCHEME_RULE)
    if "@" in authority:
        _refuse("must have no user info before the host: put credentials into headers")
    host, port_text = _divided(authority)
    port = _port(port_text, scheme)
    shown = f"[{host}]" if ":" in host else host
    canonical = shown if port == _PORTS.get(scheme) else f"{shown}:{port}"
    return scheme, host, port, f"{scheme}://{canonical}", f"{scheme}:{shown}:{port}"


def _divided(authority: str) -> tuple[str, str | None]:
    """Return the host and the text of the port of an authority."""
    if not authority.startswith("["):
        name, colon, port = authority.partition(":")
        if ":" in port:
            _refuse("must have square brackets around an IPv6 address")
        return parse_host(name), port if colon else None
    text, bracket, rest = authority[1:].partition("]")
    if not bracket or (rest and rest[0] != ":"):
        _refuse("must have square brackets around an IPv6 address, and a port after them or none")
    if "%" in text:
        _refuse("must have no zone id in an IPv6 address")
    try:
        address = IPv6Address(text)
    except AddressValueError:
        _refuse(f"must have an IPv6 address in its brackets, got {short_repr(text)}")
    # str(address) is another text from Python 3.13 on.
    return inet_ntop(AF_INET6, address.packed), rest[1:] if rest else None


def _port(text: str | None, scheme: str) -> int:
    if text is None:
        if scheme not in _PORTS:
            _refuse(f"must name the port of a gRPC server: {scheme}://host:port/Service/Method")
        return _PORTS[scheme]
    if _PORT.fullmatch(text) is None or not 0 < int(text) <= _LAST_PORT:
        _refuse(f"must have a port from 1 to {_LAST_PORT} after the colon, got {short_repr(text)}")
    return int(text)


def _encoded(text: str) -> tuple[str, str]:
    """Return the two parts of a URL; what no path or query may have is encoded."""
    _check_characters(text)
    parts = _PARTS.match(text)
    if parts is None:
        _refuse(_SCHEME_RULE)
    try:
        return parts[1], quote(parts[2], safe=_KEPT)
    except UnicodeEncodeError:
        _refuse("must be valid Unicode text")


def _check_characters(text: str) -> None:
    if found := _FORBIDDEN.search(text):
        _refuse(
            f"must have no spaces, control characters or backslashes, found {found[0]!r}: "
            "write them as %XX"
        )


def _ascii(host: str) -> str:
    """Return a name as DNS has it. As browsers read names: UTS 46, then IDNA 2008."""
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        _refuse(f"must name a host that DNS can have (IDNA 2008), got {short_repr(host)}")


def _refuse(rule: str) -> NoReturn:
    raise ConfigurationError("targetUrl", rule)
