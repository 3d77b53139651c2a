"""Handlers of static files, which contain no data and therefore need no API key."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.api.messages import ApiRequest
    from tarry.service.api.routing import Handler
    from tarry.wire.http import Receive, Send

_MEDIA_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_HEADERS = [
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    # Cached, but compared with the service before each use: an upgrade applies at once.
    (b"cache-control", b"no-cache"),
]


class StaticFile:
    """A file as a response; also the response 304 if the client has the file."""

    def __init__(
        self, request: ApiRequest, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._request = request
        self._body = body
        self._headers = headers

    async def run(self, receive: Receive, send: Send) -> None:  # noqa: ARG002 - a ResponseStream
        """Send the file. The response to a HEAD request has no body."""
        etag = dict(self._headers)[b"etag"]
        known_etags = b",".join(self._request.header_values(b"if-none-match")).split(b",")
        is_known = etag in {known.strip().removeprefix(b"W/") for known in known_etags}
        headers, body = self._headers, self._body
        if not is_known:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        if is_known or self._request.scope["method"] == "HEAD":
            body = b""
        status = 304 if is_known else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def build_file_handler(
    name: str, read: Callable[[], bytes], content_security_policy: bytes
) -> Handler:
    """Return the handler of a file; `read` is called for the first request, then cached."""
    media_type = _MEDIA_TYPES["." + name.rpartition(".")[2]]

    @cache
    def load() -> tuple[bytes, list[tuple[bytes, bytes]]]:
        body = read()
        headers = [
            (b"content-type", media_type),
            (b"etag", b'"%b"' % sha256(body).hexdigest()[:32].encode()),
            (b"content-security-policy", content_security_policy),
            *_HEADERS,
        ]
        return body, headers

    async def get_file(request: ApiRequest) -> StaticFile:
        return StaticFile(request, *load())

    return get_file
