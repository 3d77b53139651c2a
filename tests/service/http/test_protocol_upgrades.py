"""Requests that ask for another protocol. The service ignores the `Upgrade` header."""

from __future__ import annotations

import asyncio

import pytest

from tests.service.http.harness import CHUNKED, POST, FastRoute

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIA"
WEBSOCKET = b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
BODIES = [b"first", b"again", b"third"]


async def receive_and_respond(route: FastRoute, *parts: bytes) -> None:
    """Pass data to the connection in several reads, and respond to its requests."""
    for part in parts:
        route.receive(part)
        while route.responders:
            route.respond()
        await asyncio.sleep(0)
    await route.connection.wait_until_served()


@pytest.mark.parametrize("request_", [POST, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
async def test_an_upgrade_is_ignored(request_: bytes, upgrade: bytes) -> None:
    """The body belongs to the request, however the bytes are split, and is not another request."""
    data = request_.replace(b"X-A: 1", upgrade)

    for cut in range(len(data)):
        route = FastRoute()
        await receive_and_respond(route, data[:cut], data[cut:], POST)
        bodies = [body for _, body in route.requests] + route.bodies
        assert (cut, [b"hello"] * 2) == (cut, bodies)
        assert 2 == route.written.count(b"HTTP/1.1 ") == route.written.count(b"HTTP/1.1 201 ")
        assert b"upgrade:" not in route.written
        assert not route.connection.transport.is_closed


async def test_an_upgrade_takes_the_fast_path() -> None:
    """The headers are passed on without `Upgrade`."""
    route = FastRoute()
    route.receive(POST.replace(b"X-A: 1", H2C))
    [(scope, body)] = route.requests
    assert b"hello" == body
    names = [name for name, _ in scope["headers"]]
    assert [b"host", b"connection", b"http2-settings", b"content-length"] == names


async def test_pipelined_upgrades_are_ignored() -> None:
    """Each of three requests in one read is received once."""
    route = FastRoute()
    first, *others = (POST.replace(b"X-A: 1", H2C).replace(b"hello", body) for body in BODIES)
    route.receive(b"".join((first, *others)))
    route.respond()
    await route.connection.wait_until_served()
    assert (BODIES[:1], BODIES[1:]) == ([body for _, body in route.requests], route.bodies)


@pytest.mark.parametrize("trailer", [b"Upgrade: h2c", b"Connection: upgrade\r\nUpgrade: h2c"])
async def test_an_upgrade_in_a_trailer_is_ignored(trailer: bytes) -> None:
    """The connection is usable for another request."""
    route = FastRoute()
    request = CHUNKED.replace(b"X-A: 1", b"Connection: upgrade")[:-2] + trailer + b"\r\n\r\n"
    await receive_and_respond(route, request, POST)
    assert 2 == len(route.requests)
    assert 2 == route.written.count(b"HTTP/1.1 201 ")


async def test_connect_is_rejected() -> None:
    """A CONNECT request, after which the bytes are not HTTP, closes the connection."""
    route = FastRoute()
    await receive_and_respond(route, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + POST)
    assert route.written.startswith(b"HTTP/1.1 400 ")
    assert ([], []) == (route.requests, route.bodies)
    assert route.connection.transport.is_closed
