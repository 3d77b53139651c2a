"""HTTP as retries see it: what may be repeated, and which headers tell the other side."""

from __future__ import annotations

from tarry.core.checks import duration_or_none
from tarry.errors import ConfigurationError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})
"""They change nothing (RFC 9110, 9.2.1; QUERY by its own RFC), so that a copy does no harm."""
IDEMPOTENT_METHODS = SAFE_METHODS | {"PUT", "DELETE"}

KEY = "Idempotency-Key"
ATTEMPT = "X-Retry-Attempt"
"""The number of the attempt. The library's adapters leave it out on the first."""
DEADLINE = "X-Deadline-Ms"
"""The milliseconds that are left for the request when it is sent."""
SHOULD_RETRY = "X-Should-Retry"
"""What a server says about another attempt, whatever its status."""

_LONGEST = 15
"""Digits of a deadline that is believed: 30,000 years in milliseconds."""


def repeatable(method: str, *, keyed: bool) -> bool:
    """Say whether a request may be sent again although the server may have read it."""
    return keyed or method.upper() in IDEMPOTENT_METHODS


def origin_of(scheme: str, host: str, port: int | None) -> str:
    """Return the name of a server as one dependency: scheme, host and port."""
    shown = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}.get(scheme)
    return f"{scheme}://{shown}" if port in (None, usual) else f"{scheme}://{shown}:{port}"


def key_text(key: str) -> str:
    """Return the header for a key: a string as RFC 9651, 3.3.3, has it, in double quotes."""
    if not (isinstance(key, str) and key and key.isascii() and key.isprintable()):
        msg = f"an idempotency key must be a text of visible ASCII characters, got {key!r}"
        raise ConfigurationError(msg)
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def deadline_text(seconds: float) -> str:
    """Return the header for the time that is left, never more than that."""
    return str(max(0, int(seconds * 1000)))


def deadline_from(text: str) -> float | None:
    """Return the seconds that a header leaves, or None: anything odd is ignored."""
    text = text.strip()
    if not text.isascii() or not text.isdigit() or len(text) > _LONGEST:
        return None
    return duration_or_none(int(text) / 1000)
