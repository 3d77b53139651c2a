"""Rules for the request line, headers and trailers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.http.harness import (
    CHUNKED,
    GET,
    HEAD,
    POST,
    ConnectionHarness,
    FastRoute,
    created_response,
)

PATHS = pytest.mark.parametrize("path", [b"/hot", b"/other"], ids=["fast path", "uvicorn"])
HTTP_1_0 = b"POST /hot HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello"
TOO_MANY_HEADERS = b"a:\r\n" * 16_000


def with_header(line: bytes) -> bytes:
    """Return a request with a further header line."""
    return POST.replace(b"X-A: 1", line)


@PATHS
@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (400, POST.replace(b"Host: h\r\n", b"")),
        (400, with_header(b"Host: h")),
        (400, with_header(b"Host: other")),
        (400, HTTP_1_0.replace(b"Content", b"Host: a\r\nHost: b\r\nContent")),
        (400, POST.replace(b"Host: h", b"Host: a b")),
        (400, POST.replace(b"Host: h", b"Host: a, b")),
        (400, POST.replace(b"Host: h", b"Host: user@a")),
        (400, POST.replace(b"Host: h", b"Host: http://a")),
        (400, POST.replace(b"Host: h", b"Host: a:b")),
        (400, POST.replace(b"Host: h", b"Host: \xff")),
        (400, POST.replace(b"POST /", b"POST http:///")),
        (400, POST.replace(b"POST /", b"POST http://user@a/")),
        (400, POST.replace(b"POST /", b"POST ftp://a/")),
        (400, CHUNKED.replace(b"chunked", b"chunked, chunked")),
        (400, CHUNKED.replace(b"chunked", b"gzip")),
        (400, CHUNKED.replace(b"chunked", b"chunked, gzip")),
        (400, CHUNKED.replace(b"chunked", b"x-chunked")),
        (400, CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0")),
        (501, CHUNKED.replace(b"chunked", b"gzip, chunked")),
        (501, CHUNKED.replace(b"X-A: 1", b"Transfer-Encoding: gzip")),
        (505, POST.replace(b"HTTP/1.1", b"HTTP/2.0")),
        (505, POST.replace(b"HTTP/1.1", b"HTTP/0.9")),
        (431, POST.replace(b"X-A: 1\r\n", b"a:\r\n" * 255)),
        (431, POST.replace(b"X-A: 1\r\n", TOO_MANY_HEADERS)),
        (431, POST.replace(b"X-A: 1\r\n", b"a: %b\r\n" % (b"a" * 253) * 255)),
    ],
)
async def test_an_invalid_request_is_rejected(path: bytes, status: int, request_: bytes) -> None:
    """The application is not called, and the connection is closed."""
    route = FastRoute()
    route.receive(request_.replace(b"/hot", path))
    await route.respond_to_all()
    assert [status] == route.statuses
    assert ([], []) == (route.requests, route.bodies)
    assert route.connection.transport.is_closed


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://a.example:80/x?y HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET HTTP://a.example:80/x?y HTTP/1.1\r\nX-A: 1\r\nHost: b.example\r\n\r\n",
        b"GET http://a.example:80/x?y HTTP/1.0\r\n\r\n",
    ],
)
async def test_the_host_of_an_absolute_url_replaces_the_host_header(request_: bytes) -> None:
    """The checks of the Host header then apply to it (RFC 9112, 3.2.2)."""
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], _: Any, send: Any) -> None:
        seen.append(scope)
        await created_response(b"ok").send(scope, send)

    await ConnectionHarness(app).send(request_)
    (scope,) = seen
    assert ("/x", b"y") == (scope["path"], scope["query_string"])
    assert [b"a.example:80"] == [value for name, value in scope["headers"] if name == b"host"]


@PATHS
@pytest.mark.parametrize(
    "request_",
    [
        HTTP_1_0,
        POST.replace(b"Host: h", b"Host:"),
        POST.replace(b"Host: h", b"Host:\th.example_1.:8080 "),
        POST.replace(b"Host: h", b"Host: [::ffff:1.2.3.4]:80"),
        CHUNKED.replace(b": chunked", b":  Chunked "),
        POST.replace(b"X-A: 1\r\n", b"a: b\r\n" * 254),
        POST.replace(b"X-A: 1\r\n", b"a: %b\r\n" % (b"a" * 251) * 254),
    ],
)
async def test_a_valid_request_is_served(path: bytes, request_: bytes) -> None:
    """HTTP/1.0 needs no Host; names of codings ignore case; limits may be reached."""
    route = FastRoute()
    route.receive(request_.replace(b"/hot", path))
    await route.respond_to_all()
    assert ([201], 1) == (route.statuses, len(route.requests) + len(route.bodies))


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"2")]], ids=["stream", "length"])
@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_a_response_to_http_1_0_is_not_chunked(
    headers: list[tuple[bytes, bytes]], connection: bytes
) -> None:
    """The response ends when the connection closes, with or without a length (RFC 9112, 6.1)."""

    async def stream(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    harness = ConnectionHarness(stream)
    response = await harness.send(b"GET /x HTTP/1.0\r\nConnection: %b\r\n\r\n" % connection)
    assert response.endswith(b"connection: close\r\n\r\nab")
    assert b"transfer-encoding" not in response
    assert harness.transport.is_closing()


async def test_incomplete_headers_are_limited() -> None:
    """The limits apply before the end of the headers."""
    for lines in (TOO_MANY_HEADERS, b"a: %b\r\n" % (b"a" * 2_000) * 100):
        route = FastRoute()
        route.receive(HEAD + lines)
        assert ([431], True) == (route.statuses, route.connection.transport.is_closed)


@PATHS
@pytest.mark.parametrize("trailer", [b"Connection: Close", b"Proxy-Connection: x, close"])
async def test_a_trailer_that_closes_the_connection_is_rejected(
    path: bytes, trailer: bytes
) -> None:
    """`Connection: close` in a trailer gets a 400: the parser would ignore the next request."""
    route = FastRoute()
    route.receive(CHUNKED.replace(b"/hot", path)[:-2] + trailer + b"\r\n\r\n" + GET)
    await route.respond_to_all()
    assert ([400], True) == (route.statuses, route.connection.transport.is_closed)
    assert b"trailer" in route.written


@PATHS
@pytest.mark.parametrize("cut", [-30, -16, -4, None])
async def test_trailers_are_ignored(path: bytes, cut: int | None) -> None:
    """A trailer is not a header, so that an API key in a trailer authenticates no request."""
    request = CHUNKED[:-2] + b"X-API-Key: secret\r\n\r\n"

    route = FastRoute()
    scopes: list[dict[str, Any]] = []
    respond = route.connection.protocol.app

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(scope, receive, send)
        scopes.append(scope)

    route.connection.protocol.app = app
    route.receive(request.replace(b"/hot", path)[:cut])
    if cut is not None:
        route.receive(request[cut:])
    await route.respond_to_all()
    [scope] = [*scopes, *(scope for scope, _ in route.requests)]
    assert [b"host", b"x-a", b"transfer-encoding"] == [name for name, _ in scope["headers"]]
    assert not route.connection.protocol.headers
