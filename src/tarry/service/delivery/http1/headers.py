"""Headers of requests, on their way to the wire.

This is the last place where a header can be stopped that would break out of its line.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import version

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
CONNECTION_HEADERS = frozenset(
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
_OURS = {"user-agent": f"tarry/{version('tarry')}", "accept": "*/*", "accept-encoding": "identity"}
"""What is said unless the caller says otherwise."""


def is_token(text: str) -> bool:
    """Whether a text can be a method or the name of a header (RFC 9110, 5.6.2)."""
    return _TOKEN.fullmatch(text) is not None


def encode_headers(headers: list[tuple[str, str]]) -> str | None:
    """Return the lines of a request's headers, and of our own; None when they cannot be sent."""
    ours = _lines_beside(tuple([name for name, _ in headers]))
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    count = len(headers)
    if ours is None or lines.count("\n") != count or lines.count("\r") != count or "\0" in lines:
        return None
    return ours + lines


@lru_cache(1024)  # most requests of a caller have the same headers
def _lines_beside(names: tuple[str, ...]) -> str | None:
    """Return our own lines beside these headers; None when one is not the caller's to set."""
    given = {name.lower() for name in names}
    if given & CONNECTION_HEADERS or not all(map(is_token, names)):
        return None
    return "".join(f"{name}: {value}\r\n" for name, value in _OURS.items() if name not in given)
