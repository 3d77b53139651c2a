"""Parses target URLs, and returns them in canonical form.

The canonical URL is rebuilt from the parsed parts, so no other parser can interpret it
differently. Notations that programs interpret differently (`127.1`, `0x7f.0.0.1`, user info, zone
ids, backslashes) are rejected. An error message shows only the invalid part of the URL, because the
rest may be secret.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from socket import AF_INET6, inet_ntop
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import quote

import msgspec

from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_URL_BYTES = 8192

_DEFAULT_PORTS = {"http": 80, "https": 443}
_GRPC_SCHEMES = frozenset({"grpc", "grpcs"})
_SCHEMES = _GRPC_SCHEMES | _DEFAULT_PORTS.keys()
_SCHEME_RULE = "must start with http://, https://, grpc:// or grpcs://"
_MAX_PORT = 65_535
_MAX_HOST_CHARS = 253

_FORBIDDEN_CHARS = re.compile(r"[\x00-\x20\x7f\\\s]")
_CHARACTER_RULE = "must not have spaces, control characters or backslashes"
_ORIGIN = r"([^:/?#]*+://[^/?#]*+)"  # scheme and authority
_ORIGIN_AND_PATH = re.compile(rf"{_ORIGIN}([^#]*)")  # the path includes the query
_HAS_CANONICAL_PATH = re.compile(rf"{_ORIGIN}(/[A-Za-z0-9/?:@!$&'()*+,;=._~\[\]-]*+)")
"""Matches a URL whose path and query are canonical and not percent-encoded, as in most URLs."""
_NEEDS_NO_ENCODING = re.compile(rf"{_ORIGIN}([A-Za-z0-9/?:@!$&'()*+,;=._~%\[\]-]*+)")
"""Matches a URL whose path and query need no encoding, with the groups of `_ORIGIN_AND_PATH`."""
_PORT = re.compile(r"[0-9]{1,5}")
_HOST_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_HOST_NAME = re.compile(rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)
"""Matches a host whose last label is a number: it must be an IPv4 address (WHATWG URL)."""
_UNENCODED_CHARS = "/?:@!$&'()*+,;=._~%[]-"  # besides letters and digits
_PERCENT_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
LANE_KEY: re.Pattern[str] = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,63}")
_GRPC_METHOD = re.compile(r"/[A-Za-z_][\w.]*/[A-Za-z_]\w*", re.ASCII)


class Target(msgspec.Struct, frozen=True, gc=False):
    """A parsed target URL."""

    url: str  # the canonical URL, to which the request is sent
    scheme: str  # `http`, `https`, `grpc` or `grpcs`
    host: str  # the host in ASCII and lower case; an IPv6 address has no brackets
    port: int
    endpoint: str  # `scheme:host:port`; part of the name of a lane, see `lane_name`
    path_and_query: str  # for gRPC `/package.Service/Method`

    @property
    def authority(self) -> str:
        """`host:port` (also if the port is the default), with brackets around an IPv6 address."""
        return self.endpoint.partition(":")[2]


def parse_target_prefix(text: str) -> Target:
    """Parse the beginning of a target URL, with the whole host; see `parse_target`.

    A gRPC URL may have no method.
    """
    return parse_target(text, is_prefix=True)


def parse_target(text: str, *, is_prefix: bool = False) -> Target:
    """Parse a target URL; raise ConfigurationError for the field `targetUrl` if it is invalid.

    With `is_prefix`, a gRPC URL may have no method.
    """
    if not isinstance(text, str):
        raise ConfigurationTypeError("targetUrl", f"must be a string, got {short_repr(text)}")
    if len(text) > MAX_URL_BYTES:
        _reject(f"must have at most {MAX_URL_BYTES} bytes: send long data in the body")
    match = _HAS_CANONICAL_PATH.fullmatch(text)
    origin, path_and_query = _split_and_encode(text) if match is None else match.groups()
    scheme, host, port, canonical_origin, endpoint = _parse_origin(origin)
    url = canonical_origin + path_and_query
    if len(url) > MAX_URL_BYTES:
        _reject(f"must have at most {MAX_URL_BYTES} bytes: send long data in the body")
    if scheme in _GRPC_SCHEMES and not (is_prefix or _GRPC_METHOD.fullmatch(path_and_query)):
        _reject(f"must name a gRPC method: {scheme}://host:port/package.Service/Method")
    return Target(url, scheme, host, port, endpoint, path_and_query)


def lane_name(tenant: str, target: Target, lane_key: str | None = None) -> str:
    """Return the name of a task's lane: `tenant/scheme:host:port`, and `@key` with a lane key.

    Tenants and endpoints have no `@`, so lanes with and without a key have different names.
    """
    name = f"{tenant}/{target.endpoint}"
    return name if lane_key is None else f"{name}@{lane_key}"


def public_lane_name(lane: str) -> str:
    """Return the name of a lane in the API, from its name in the store."""
    return lane.partition("/")[2]


def stored_lane_name(tenant: str, public_name: str) -> str:
    """Return the name of a lane in the store: tenant, slash, name in the API."""
    return f"{tenant}/{public_name}"


def compile_lane_patterns(
    tenant: str, patterns: Sequence[str]
) -> Callable[[str], re.Match[str] | None]:
    """Return a function that matches lanes of a tenant, without a lane key.

    The patterns have the format `scheme:host:port`, in which `*` matches any characters.
    """
    escaped = (re.escape(f"{tenant}/{each}").replace(r"\*", ".*") for each in patterns)
    return re.compile("|".join(escaped)).fullmatch


def parse_lane_name(text: str) -> str:
    """Return the canonical name of a lane in the API: `scheme:host:port`, and perhaps `@key`."""
    endpoint, at, lane_key = text.partition("@")
    scheme, _, authority = endpoint.partition(":")
    if scheme.lower() not in _SCHEMES or authority.startswith("/"):
        _reject("must be scheme:host:port, such as https:example.com:443")
    if at and LANE_KEY.fullmatch(lane_key) is None:
        _reject(f"must have a lane key after the @, got {short_repr(lane_key)}")
    return _parse_origin(f"{scheme}://{authority}")[-1] + at + lane_key


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
    if len(host) > _MAX_HOST_CHARS:
        _reject(f"must name a host of at most {_MAX_HOST_CHARS} characters, got {len(host)}")
    if _HOST_NAME.fullmatch(host) is None:
        rule = "must name a host that consists of letters, digits, '-', '_' and '.'"
        _reject(f"{rule}, got {short_repr(host)}")
    if "xn--" in host:
        _encode_idna(host)  # raises if the Punycode is invalid
    return host


@lru_cache(1024)  # most tasks go to few origins
def _parse_origin(origin: str) -> tuple[str, str, int, str, str]:
    """Return the scheme, host, port, canonical origin and endpoint of `scheme://authority`."""
    if forbidden := _FORBIDDEN_CHARS.search(origin):
        _reject(f"{_CHARACTER_RULE} before the path, found {forbidden[0]!r}")
    scheme, _, authority = origin.partition("://")
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        _reject(_SCHEME_RULE)
    if "@" in authority:
        _reject("must not have user info before the host: put credentials into headers")
    host, port_text = _split_authority(authority)
    port = _parse_port(port_text, scheme)
    url_host = f"[{host}]" if ":" in host else host
    canonical_authority = url_host if port == _DEFAULT_PORTS.get(scheme) else f"{url_host}:{port}"
    canonical_origin, endpoint = f"{scheme}://{canonical_authority}", f"{scheme}:{url_host}:{port}"
    return scheme, host, port, canonical_origin, endpoint


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
        if scheme in _GRPC_SCHEMES:
            _reject(f"must name the port of a gRPC server: {scheme}://host:port/Service/Method")
        return _DEFAULT_PORTS[scheme]
    if _PORT.fullmatch(text) is None or not 0 < int(text) <= _MAX_PORT:
        _reject(f"must have a port from 1 to {_MAX_PORT} after the colon, got {short_repr(text)}")
    return int(text)


def _split_and_encode(text: str) -> tuple[str, str]:
    """Return the origin of a URL, and its canonical path and query."""
    match = _NEEDS_NO_ENCODING.fullmatch(text)
    if match is not None:
        path_and_query = match[2]
    else:
        match = _ORIGIN_AND_PATH.match(text)
        if match is None:
            _reject(_SCHEME_RULE)
        if forbidden := _FORBIDDEN_CHARS.search(text, match.end(1)):
            _reject(f"{_CHARACTER_RULE}, found {forbidden[0]!r}: write them as %XX")
        try:
            path_and_query = quote(match[2], safe=_UNENCODED_CHARS)
        except UnicodeEncodeError:
            _reject("must be valid Unicode text")
    if not path_and_query.startswith("/"):
        path_and_query = f"/{path_and_query}"
    if "%" in path_and_query:
        path_and_query = _PERCENT_ESCAPE.sub(lambda match: match[0].upper(), path_and_query)
    return match[1], path_and_query


def _encode_idna(host: str) -> str:
    """Return a host name in ASCII, as browsers encode it: UTS 46, then IDNA 2008."""
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        _reject(f"must name a host that is valid in DNS (IDNA 2008), got {short_repr(host)}")


def _reject(rule: str) -> NoReturn:
    raise ConfigurationError("targetUrl", rule)
