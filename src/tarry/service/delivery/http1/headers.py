"""Header lines of requests.

`encode_headers` is the last check against a header value that injects a line into the request.
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
"""Headers that belong to the connection or the message framing; a task must not set them."""
_DEFAULT_HEADERS = {
    "user-agent": f"tarry/{version('tarry')}",
    "accept": "*/*",
    "accept-encoding": "identity",
}


def is_token(text: str) -> bool:
    """Return whether a string is valid as a method or as a header name (RFC 9110, 5.6.2)."""
    return _TOKEN.fullmatch(text) is not None


def encode_headers(headers: list[tuple[str, str]]) -> str | None:
    """Return the header lines, default headers first; None if a header is not valid."""
    defaults = _default_lines(tuple([name for name, _ in headers]))
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    # Counting the line breaks of all lines at once is faster than a check of each value.
    count = len(headers)
    if (
        defaults is None
        or lines.count("\n") != count
        or lines.count("\r") != count
        or "\0" in lines
    ):
        return None
    return defaults + lines


@lru_cache(1024)  # the requests of one caller mostly have the same header names
def _default_lines(names: tuple[str, ...]) -> str | None:
    """Return the lines of default headers that are not in `names`; None if a name is invalid."""
    present = {name.lower() for name in names}
    if present & CONNECTION_HEADERS or not all(map(is_token, names)):
        return None
    return "".join(
        f"{name}: {value}\r\n" for name, value in _DEFAULT_HEADERS.items() if name not in present
    )
