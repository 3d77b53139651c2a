"""HTTP: methods, headers for retries, problem details (RFC 9457) and the types of ASGI 3."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.core.checks import check_count
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.core.policy import KeyFormat

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})
"""Methods without side effects (RFC 9110 section 9.2.1, and the QUERY method)."""
IDEMPOTENT_METHODS = SAFE_METHODS | {"PUT", "DELETE"}
STANDARD_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY")
"""The methods of HTTP that a client sends to a resource (not CONNECT and TRACE)."""
HOP_BY_HOP_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1), which must not be forwarded."""
SERVICE_HEADERS = frozenset({
    "accept-encoding", "content-length", "expect", "host", "idempotency-key", "traceparent",
    "tracestate", "upstash-message-id", "upstash-retried", "upstash-signature", "x-retry-attempt",
})  # fmt: skip
SERVICE_HEADER_PREFIXES = ("webhook-", "x-cloudtasks-")
"""Headers that the service sets itself. No caller may set them: a receiver trusts them."""

IDEMPOTENCY_KEY_HEADER = "Idempotency-Key"
ATTEMPT_HEADER = "X-Retry-Attempt"
"""The number of the attempt. The library's adapters omit it on the first attempt."""
DEADLINE_HEADER = "X-Deadline-Ms"
"""The milliseconds left for the request at the time it is sent."""
SHOULD_RETRY_HEADER = "X-Should-Retry"
"""A server sends true or false to allow or forbid a retry, whatever the status is."""

PROBLEM_MEDIA_TYPE = "application/problem+json"
_PROBLEM_MEMBERS = ("type", "title", "status", "detail", "instance")
ABOUT_BLANK = "about:blank"
"""The type of a problem that means no more than its HTTP status."""

_QUOTED_STRING = re.compile(r'"(?:[ !#-\[\]-~]|\\["\\])*"')
_MAX_STATUS = 599
_MAX_DEADLINE_DIGITS = 15
"""15 digits are 30,000 years in milliseconds; a longer number is ignored."""

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""Called as app(scope, receive, send), typed as Any because frameworks have narrower types."""


def is_repeatable(method: str, *, has_key: bool) -> bool:
    """Return whether a request can be sent again although the server may have received it.

    `has_key` is whether the request has an idempotency key.
    """
    return has_key or method.upper() in IDEMPOTENT_METHODS


def origin_of(scheme: str, host: str, port: int | None) -> str:
    """Return the origin of a server: scheme, host, and port unless it is the default port."""
    if ":" in host:
        host = f"[{host}]"  # an IPv6 address
    default_port = {"http": 80, "https": 443}.get(scheme)
    return f"{scheme}://{host}" if port in (None, default_port) else f"{scheme}://{host}:{port}"


def check_idempotency_key(key: str) -> str:
    """Return an idempotency key, or raise ConfigurationError if a header cannot contain it."""
    if not (isinstance(key, str) and is_idempotency_key(key)):
        rule = "must be a non-empty string of visible ASCII characters, with spaces only inside"
        raise ConfigurationError("an idempotency key", rule, key)
    return key


def is_idempotency_key(key: str) -> bool:
    """Return whether a header can contain the key: visible ASCII, with spaces only inside."""
    # HTTP removes spaces at both ends of a header value.
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def format_idempotency_key(key: str, key_format: KeyFormat) -> str:
    """Return an idempotency key as a header value: as it is, or as a quoted string.

    A key that is already a quoted string is not quoted again.
    """
    if key_format == "plain" or _QUOTED_STRING.fullmatch(key):
        return key
    return quote_idempotency_key(key)


def quote_idempotency_key(key: str) -> str:
    """Return an idempotency key as a quoted string (RFC 9651 section 3.3.3)."""
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def format_deadline_ms(seconds: float) -> str:
    """Return the value of `X-Deadline-Ms` for the seconds left, rounded down."""
    return str(max(0, int(seconds * 1000)))


def parse_deadline_header(text: str) -> float | None:
    """Return a value of `X-Deadline-Ms` in seconds, or None when it is malformed."""
    text = text.strip()
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DEADLINE_DIGITS:
        return None
    return int(text) / 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: `title` is the same for all problems of a `type`, `detail` describes this one."""

    status: int
    title: str
    detail: str | None = None
    type: str = ABOUT_BLANK
    instance: str | None = None
    extensions: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further members of the JSON object, for programs."""

    def __post_init__(self) -> None:
        """Check the status and the extensions."""
        if check_count("status", self.status, 100) > _MAX_STATUS:
            raise ConfigurationError("status", f"must be at most {_MAX_STATUS}", self.status)
        for name in _PROBLEM_MEMBERS:
            if name in self.extensions:
                rule = f"must not contain {name!r}, which is a standard member"
                raise ConfigurationError("extensions", rule)

    def to_dict(self) -> dict[str, Any]:
        """Return the members of the JSON object; members that are None are left out."""
        members = {name: getattr(self, name) for name in _PROBLEM_MEMBERS}
        present = {name: value for name, value in members.items() if value is not None}
        return present | dict(self.extensions)

    def to_json(self) -> bytes:
        """Return JSON in ASCII, because UTF-8 cannot encode lone surrogates in text of a client."""
        return json.dumps(self.to_dict()).encode()
