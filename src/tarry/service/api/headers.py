"""The headers that a caller may have sent: valid on the wire, and his to set."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tarry.core.checks import short
from tarry.service.api.problems import invalid

if TYPE_CHECKING:
    from tarry.service.api.surroundings import Limits

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_is_value = re.compile(r"(?:[!-~]++(?:[\t ]++[!-~]++)*+)?").fullmatch
"""Visible ASCII with blanks inside (RFC 9110, 5.5): no line can be smuggled in."""

_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_OURS = frozenset({
    "accept-encoding", "content-length", "expect", "host", "idempotency-key", "traceparent",
    "tracestate", "x-retry-attempt",
})  # fmt: skip
_OUR_PREFIX = "webhook-"


def check_headers(given: dict[str, Any], limits: Limits) -> tuple[str, ...]:
    """Return the names of headers in lower case, or refuse a header by its name."""
    if len(given) > limits.headers:
        detail = f"headers may have {limits.headers} fields, got {len(given)}."
        raise invalid("headers", detail)
    lower = lower_names(tuple(given))
    size = 0
    for name, value in given.items():
        if not isinstance(value, str):
            raise invalid(_path(name), f"{name} must be a string, got {short(value)}.")
        is_plain = value.isascii() and value.isprintable() and value == value.strip()
        if not is_plain and not _is_value(value):  # one with a tab may do
            detail = f"{name} must be visible ASCII characters, with blanks only between them."
            raise invalid(_path(name), detail)
        size += len(name) + len(value) + 4
    if size > limits.header_bytes:
        raise invalid("headers", f"headers may have {limits.header_bytes} bytes, got {size}.")
    return lower


@lru_cache(256)  # most tasks have the same few names; these are short, for others are refused
def lower_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of headers in lower case, or refuse one that is not the caller's to set."""
    for name in given:
        if wrong := _what_is_wrong(name):
            raise invalid(_path(name), wrong)
    lower = tuple(name.lower() for name in given)
    if len(set(lower)) < len(lower):
        twice = next(name for name in given if lower.count(name.lower()) > 1)
        raise invalid(_path(twice), f"{twice} is given twice, in capitals and not.")
    return lower


def _what_is_wrong(name: str) -> str | None:
    if not _TOKEN.fullmatch(name):
        return f"A header name must be a token of 1 to 256 characters, got {short(name)}."
    lower = name.lower()
    if lower in _HOP_BY_HOP:
        return f"{name} is about one connection, and not the caller's to set."
    if lower in _OURS or lower.startswith(_OUR_PREFIX):
        return f"{name} is set by the service itself."
    return None


def _path(name: str) -> str:
    return f"headers.{name[:256]}"
