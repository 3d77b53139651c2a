"""HTTP methods that can be repeated, and headers that carry information about retries."""

from __future__ import annotations

from tarry.core.checks import duration_or_none
from tarry.errors import ConfigurationError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})
"""Methods without side effects (RFC 9110 section 9.2.1, and QUERY by its own RFC)."""
IDEMPOTENT_METHODS = SAFE_METHODS | {"PUT", "DELETE"}

IDEMPOTENCY_KEY_HEADER = "Idempotency-Key"
ATTEMPT_HEADER = "X-Retry-Attempt"
"""The number of the attempt. The library's adapters omit it on the first attempt."""
DEADLINE_HEADER = "X-Deadline-Ms"
"""The milliseconds left for the request at the time it is sent."""
SHOULD_RETRY_HEADER = "X-Should-Retry"
"""A server sends true or false to allow or forbid a retry, whatever the status is."""

_MAX_DEADLINE_DIGITS = 15
"""15 digits are 30,000 years in milliseconds; a longer number is ignored."""


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


def format_idempotency_key(key: str) -> str:
    """Return an idempotency key as a header value: a quoted string (RFC 9651 section 3.3.3)."""
    if not (isinstance(key, str) and key and key.isascii() and key.isprintable()):
        rule = "must be a string of visible ASCII characters"
        raise ConfigurationError("an idempotency key", rule, key)
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def format_deadline_ms(seconds: float) -> str:
    """Return the value of `X-Deadline-Ms` for the seconds left, rounded down."""
    return str(max(0, int(seconds * 1000)))


def parse_deadline_ms(text: str) -> float | None:
    """Return the seconds of a value of `X-Deadline-Ms`, or None when it is malformed."""
    text = text.strip()
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DEADLINE_DIGITS:
        return None
    return duration_or_none(int(text) / 1000)
