"""The parser of target URLs, and their canonical form. Pure functions.

The URL that is sent is rebuilt from the parsed parts, so no other parser can interpret it
differently. Notations that programs interpret differently (`127.1`, `0x7f.0.0.1`, user info, zone
ids, backslashes) are rejected. An error message shows only the invalid part of the URL, because the
rest may be secret.
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

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEMES = frozenset({"http", "https", "grpc", "grpcs"})
_SCHEME_RULE = "must start with http://, https://, grpc:// or grpcs://"
_MAX_PORT = 65_535
_MAX_HOST_CHARS = 253

_FORBIDDEN_CHARS = re.compile(r"[\x00-\x20\x7f\\\s]")
_SERVER = r"([^:/?#]*+://[^/?#]*+)"
_PARTS = re.compile(rf"{_SERVER}([^#]*)", re.DOTALL)
_NEEDS_NO_ENCODING = re.compile(rf"{_SERVER}([A-Za-z0-9/?:@!$&'()*+,;=._~%\[\]-]*+)")
"""A URL whose path and query need no encoding, as two groups: server, and path with query."""
_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)
"""Matches a host whose last label is a number: it must be an IPv4 address (WHATWG URL)."""
_SAFE_CHARS = "/?:@!$&'()*+,;=._~%[]-"  # characters that are not percent-encoded
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_GRPC_METHOD = re.compile(r"/[A-Za-z_][\w.]*/[A-Za-z_]\w*", re.ASCII)


class Target(msgspec.Struct, frozen=True, gc=False):
    """A parsed target URL."""

    url: str  # the canonical URL, to which the request is sent
    scheme: str  # `http`, `https`, `grpc` or `grpcs`
    host: str  # the host in ASCII and lower case; an IPv6 address has no brackets
    port: int
    origin: str  # `scheme:host:port`, the name of the lane (the queue of this target)
    path: str  # the path, followed by the query if there is one

    @property
    def authority(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return self.origin.partition(":")[2]


def parse_target(text: str) -> Target:
    """Parse a target URL; raise ConfigurationError for the field `targetUrl` if it is invalid."""
    if not isinstance(text, str):
        raise ConfigurationTypeError("targetUrl", f"must be a string, got {short_repr(text)}")
    if len(text) > MAX_URL_BYTES:
        _reject(f"must have at most {MAX_URL_BYTES} bytes: send long data in the body")
    match = _NEEDS_NO_ENCODING.fullmatch(text)
    server, path = _encode_path(text) if match is None else match.groups()
    scheme, host, port, canonical_server, origin = _parse_server(server)
    if scheme not in _DEFAULT_PORTS and _GRPC_METHOD.fullmatch(path) is None:
        _reject(f"must name a gRPC method: {scheme}://host:port/package.Service/Method")
    if not path.startswith("/"):
        path = f"/{path}"
    if "%" in path:
        path = _ESCAPE.sub(lambda escape: escape[0].upper(), path)
    url = canonical_server + path
    if len(url) > MAX_URL_BYTES:
        _reject(f"must have at most {MAX_URL_BYTES} bytes: send long data in the body")
    return Target(url, scheme, host, port, origin, path)


def parse_host(text: str) -> str:
    """Return the canonical form of a host: a name, or an address (IPv6 without brackets)."""
    if "%" in text:
        _reject("must not have percent-encoding in the host: write the name itself")
    host = text.lower() if text.isascii() else _encode_idna(text)
    host = host.removesuffix(".")
    if not host:
        _reject("must name a host")
    if _ENDS_IN_NUMBER.fullmatch(host):
        try:
            return str(IPv4Address(host))
        except AddressValueError:
            _reject(f"must write an IPv4 address as four decimal numbers, got {short_repr(host)}")
    if len(host) > _MAX_HOST_CHARS or _NAME.fullmatch(host) is None:
        rule = "must name a host that consists of letters, digits, '-', '_' and '.'"
        _reject(f"{rule}, got {short_repr(host)}")
    if "xn--" in host:
        _encode_idna(host)
    return host


@lru_cache(1024)  # few servers get most of the tasks
def _parse_server(server: str) -> tuple[str, str, int, str, str]:
    """Return the scheme, host, port, canonical form and origin of `scheme://authority`."""
    _check_characters(server)
    scheme, _, authority = server.partition("://")
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        _reject(_SCHEME_RULE)
    if "@" in authority:
        _reject("must not have user info before the host: put credentials into headers")
    host, port_text = _split_authority(authority)
    port = _parse_port(port_text, scheme)
    bracketed = f"[{host}]" if ":" in host else host
    canonical = bracketed if port == _DEFAULT_PORTS.get(scheme) else f"{bracketed}:{port}"
    return scheme, host, port, f"{scheme}://{canonical}", f"{scheme}:{bracketed}:{port}"


def _split_authority(authority: str) -> tuple[str, str | None]:
    """Return the host of an authority, and its port as text or None if it has no port."""
    if not authority.startswith("["):
        host, colon, port = authority.partition(":")
        if ":" in port:
            _reject("must have square brackets around an IPv6 address")
        return parse_host(host), port if colon else None
    text, bracket, rest = authority[1:].partition("]")
    if not bracket or (rest and rest[0] != ":"):
        _reject("must have square brackets around an IPv6 address, followed by :PORT or nothing")
    if "%" in text:
        _reject("must not have a zone id in an IPv6 address")
    try:
        address = IPv6Address(text)
    except AddressValueError:
        _reject(f"must have an IPv6 address in its brackets, got {short_repr(text)}")
    # Not str(address): its format differs from Python 3.13 on.
    return inet_ntop(AF_INET6, address.packed), rest[1:] if rest else None


def _parse_port(text: str | None, scheme: str) -> int:
    if text is None:
        if scheme not in _DEFAULT_PORTS:
            _reject(f"must name the port of a gRPC server: {scheme}://host:port/Service/Method")
        return _DEFAULT_PORTS[scheme]
    if _PORT.fullmatch(text) is None or not 0 < int(text) <= _MAX_PORT:
        _reject(f"must have a port from 1 to {_MAX_PORT} after the colon, got {short_repr(text)}")
    return int(text)


def _encode_path(text: str) -> tuple[str, str]:
    """Return the server part, and the path and query with invalid characters percent-encoded."""
    _check_characters(text)
    parts = _PARTS.match(text)
    if parts is None:
        _reject(_SCHEME_RULE)
    try:
        return parts[1], quote(parts[2], safe=_SAFE_CHARS)
    except UnicodeEncodeError:
        _reject("must be valid Unicode text")


def _check_characters(text: str) -> None:
    if forbidden := _FORBIDDEN_CHARS.search(text):
        rule = "must not have spaces, control characters or backslashes"
        _reject(f"{rule}, found {forbidden[0]!r}: write them as %XX")


def _encode_idna(host: str) -> str:
    """Return a host name in ASCII, as browsers encode it: UTS 46, then IDNA 2008."""
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        _reject(f"must name a host that is valid in DNS (IDNA 2008), got {short_repr(host)}")


def _reject(rule: str) -> NoReturn:
    raise ConfigurationError("targetUrl", rule)
