"""Headers of requests and answers, between our pairs and libcurl's lines.

This is the last place where a header can be stopped that would break out of its line.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
FRAMING = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that belong to the connection: never the caller's to set."""


def is_token(text: str) -> bool:
    """Whether a text can be a method or the name of a header (RFC 9110, 5.6.2)."""
    return _TOKEN.fullmatch(text) is not None


@lru_cache(1024)
def _lower(name: str) -> str:
    """Return the name of a header in lower case; nothing when it is not the caller's to set."""
    lower = name.lower()
    return "" if not is_token(name) or lower in FRAMING else lower


def lines_of(headers: list[tuple[str, str]]) -> list[str] | list[bytes] | None:
    """Return the headers as libcurl takes them; None when they cannot be sent."""
    names = [_lower(name) for name, _ in headers]
    # `Name;` is how libcurl is told of an empty value; `Name:` takes away one of its own headers.
    lines = [f"{name}: {value}" if value.strip() else f"{name};" for name, value in headers]
    whole = "".join(lines)
    if "" in names or "\n" in whole or "\r" in whole or "\0" in whole:
        return None
    if "accept-encoding" not in names:
        lines.append("Accept-Encoding: identity")
    if "content-type" not in names:
        lines.append("Content-Type:")
    lines.append("Expect:")
    if whole.isascii():
        return lines
    try:
        return [line.encode() for line in lines]
    except UnicodeEncodeError:
        return None


def headers_of(lines: Iterable[bytes]) -> list[tuple[str, str]] | None:
    """Return the headers of the last answer, not of interim ones, nor trailers; None: no end."""
    headers: list[tuple[str, str]] = []
    is_open = False
    for line in lines:
        if line.startswith(b"HTTP/"):
            headers.clear()
            is_open = True
        elif is_open:
            name, colon, value = line.decode("latin-1").partition(":")
            if colon:
                headers.append((name.strip().lower(), value.strip()))
            else:
                is_open = False
    return None if is_open else headers
