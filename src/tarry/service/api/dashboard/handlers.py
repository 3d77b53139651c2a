"""Handlers of the dashboard's page (`/`) and of its static files (`/dashboard/...`).

The files are part of the package and contain no data. The page reads the data through the API, with
the API key that the user has entered, so the files themselves need no API key.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from tarry.service.api import problems

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from tarry.service.api.messages import ApiRequest
    from tarry.service.api.routing import Handler
    from tarry.wire.http import Receive, Send

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_API_KEYS_PLACEHOLDER = b'data-api-keys="optional"'
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
"""`require-trusted-types-for` makes the browser reject text that a script would use as HTML."""
_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    # Cached, but compared with the service before each use: an upgrade applies at once.
    (b"cache-control", b"no-cache"),
]


class StaticFile:
    """A file of the dashboard as a response; also the response 304 if the client has the file."""

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


def dashboard_handlers(role: str, *, require_api_keys: bool) -> dict[str, dict[str, Handler]]:
    """Return the handlers of the page and its static files, by path and method.

    A process with the role `worker` has no API for the page, so it rejects requests for the page.
    """
    if role == "worker":
        return {"/": {"GET": _reject_for_role}}
    handlers: dict[str, dict[str, Handler]] = {}
    for file in files("tarry.service.api.dashboard").joinpath("assets").iterdir():
        path = "/" if file.name == _INDEX else f"/dashboard/{file.name}"
        handlers[path] = {"GET": _build_handler(file, require_api_keys=require_api_keys)}
    return handlers


def _build_handler(file: Traversable, *, require_api_keys: bool) -> Handler:
    body = file.read_bytes()
    if file.name == _INDEX and require_api_keys:
        body = body.replace(_API_KEYS_PLACEHOLDER, b'data-api-keys="required"')
    media_type = _MEDIA_TYPES["." + file.name.rpartition(".")[2]]
    etag = b'"%b"' % sha256(body).hexdigest()[:32].encode()
    headers = [(b"content-type", media_type), (b"etag", etag), *_HEADERS]
    return partial(_get_file, body, headers)


async def _get_file(
    body: bytes, headers: list[tuple[bytes, bytes]], request: ApiRequest
) -> StaticFile:
    return StaticFile(request, body, headers)


async def _reject_for_role(_: ApiRequest) -> StaticFile:
    raise problems.WRONG_ROLE.error(
        "This process only delivers tasks (role worker). Open the dashboard of a process with the "
        "role api or all."
    )
