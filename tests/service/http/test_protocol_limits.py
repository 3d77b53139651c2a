"""Limits and timers of connections whose requests uvicorn handles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.service.http.protocol import _MAX_UNUSED_BODY_BYTES, _UNSENT_RESPONSE_GRACE_S
from tests.service.http.harness import (
    CHUNKED,
    GET,
    KEEP_ALIVE_S,
    POST,
    ConnectionHarness,
    FastRoute,
)

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"2")]


async def respond_ok(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
    """Respond immediately."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_requests_in_one_read_are_answered_in_order() -> None:
    """Pipelined requests get their responses in the order of the requests."""

    async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    connection = ConnectionHarness(app)
    paths = [b"/1", b"/2", b"/3"]
    written = await connection.send(b"".join(GET.replace(b"/x", path) for path in paths))
    assert paths == [part[:2] for part in written.split(b"\r\n\r\n")[1:]]
    assert 3 == connection.state.total_requests


@pytest.mark.parametrize("reads", [1, 3])
async def test_pipelined_requests_are_parsed_a_few_at_a_time(reads: int) -> None:
    """Requests wait as bytes, and reading is paused, until those before them have a response."""
    waiting: list[int] = []

    may_respond = asyncio.Event()

    async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        waiting.append(len(connection.protocol.pipeline))
        await may_respond.wait()
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    connection = ConnectionHarness(app)
    paths = [b"/%04d" % number for number in range(3_000)]
    data = b"".join(GET.replace(b"/x", path) for path in paths)
    size = len(data) // reads + 1
    for start in range(0, len(data), size):
        connection.protocol.data_received(data[start : start + size])
    assert connection.protocol.flow.read_paused
    may_respond.set()
    await connection.wait_until_served()
    written = b"".join(connection.transport.written)
    assert paths == [part[:5] for part in written.split(b"\r\n\r\n")[1:]]
    assert max(waiting) < 4_096 // len(GET) + 1
    assert not connection.protocol.flow.read_paused
    assert not connection.protocol._unparsed


async def test_an_idle_connection_is_closed() -> None:
    """The keep-alive timeout starts at the last response; a connection has one timer."""
    connection = ConnectionHarness(respond_ok)
    for _ in range(3):
        await connection.send()
        connection.loop.sleep(KEEP_ALIVE_S - 1)
        assert 1 == connection.loop.pending
    assert not connection.transport.is_closed
    connection.loop.sleep(1)
    assert connection.transport.is_closed
    assert 0 == connection.loop.pending


async def test_a_connection_with_a_running_request_is_not_idle() -> None:
    """The keep-alive timeout does not end a slow request."""
    may_respond = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await may_respond.wait()
        await respond_ok(scope, receive, send)

    connection = ConnectionHarness(app)
    await connection.send()
    connection.protocol.data_received(GET.replace(b"/x", b"/slow"))
    connection.loop.sleep(2 * KEEP_ALIVE_S)
    assert (False, 0) == (connection.transport.is_closed, connection.loop.pending)
    may_respond.set()
    await connection.wait_until_served()
    assert 1 == connection.loop.pending
    connection.loop.sleep(KEEP_ALIVE_S)
    assert connection.transport.is_closed


async def test_the_scope_has_the_request() -> None:
    """The ASGI scope has path, query, method, version and headers of its request."""
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope)
        await respond_ok(scope, receive, send)

    connection = ConnectionHarness(app)
    await connection.send()
    await connection.send(b"PUT /%2Fy?z=1 HTTP/1.0\r\nX-A: 1\r\nx-a: 2\r\n\r\n")
    first, second = seen
    assert ("GET", "/x", b"", "1.1") == _request_line(first)
    assert ("PUT", "//y", b"z=1", "1.0") == _request_line(second)
    assert [(b"host", b"h")] == first["headers"]
    assert [(b"x-a", b"1"), (b"x-a", b"2")] == second["headers"]


async def test_the_application_is_notified_of_a_disconnect() -> None:
    """The running request gets `http.disconnect`, and pipelined requests are dropped."""
    disconnected: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.append(scope["path"])
        await respond_ok(scope, receive, send)

    connection = ConnectionHarness(app)
    connection.protocol.data_received(GET + GET.replace(b"/x", b"/y") * 2)
    connection.protocol.connection_lost(None)
    async with asyncio.timeout(30):
        await connection.wait_until_served()
    assert (["/x"], []) == (disconnected, connection.transport.written)


@pytest.mark.parametrize("path", [b"/hot", b"/other"], ids=["fast path", "uvicorn"])
async def test_a_client_may_close_its_sending_half(path: bytes) -> None:
    """Complete requests get their responses before the connection is closed (RFC 9112, 9.6)."""
    route = FastRoute()
    protocol, transport = route.connection.protocol, route.connection.transport
    route.receive(POST.replace(b"/hot", path) * 2)
    assert not protocol.is_abandoned()
    assert protocol.eof_received()
    assert protocol.is_abandoned()
    await route.respond_to_all()
    assert ([201, 201], True) == (route.statuses, transport.is_closed)


async def test_a_client_may_close_its_sending_half_after_pipelined_requests() -> None:
    """The responses to earlier pipelined requests do not count as the response that is awaited."""
    route = FastRoute()
    route.receive(GET * 2)
    await route.connection.wait_until_served()
    route.receive(POST)
    assert route.connection.protocol.eof_received()


@pytest.mark.parametrize("data", [b"", GET[:-2], POST[:-1], POST + GET[:-2]])
async def test_an_idle_or_incomplete_connection_is_closed_by_the_client(data: bytes) -> None:
    """The connection does not stay open: there is no complete request to respond to."""
    route = FastRoute()
    route.receive(data)
    assert not route.connection.protocol.eof_received()


async def test_a_response_that_has_begun_ends_with_the_client() -> None:
    """An event stream ends when its client closes the connection, not only at the next event."""

    async def app(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    connection = ConnectionHarness(app)
    connection.protocol.data_received(GET)
    await asyncio.sleep(0.001)
    assert not connection.protocol.eof_received()
    for task in connection.state.tasks:
        task.cancel()


async def test_shutdown_aborts_a_connection_with_an_unread_response() -> None:
    """Shutdown aborts such a connection after a grace period."""
    connection = ConnectionHarness(respond_ok)
    await connection.send()
    connection.transport.write_buffer_size = 9
    connection.protocol.shutdown()
    assert (True, False) == (connection.transport.is_closed, connection.transport.is_aborted)
    connection.loop.sleep(_UNSENT_RESPONSE_GRACE_S / 2)
    assert not connection.transport.is_aborted
    connection.loop.sleep(_UNSENT_RESPONSE_GRACE_S / 2)
    assert connection.transport.is_aborted


async def test_the_grace_period_starts_with_the_response() -> None:
    """The grace period starts when a response is written and ends when the connection closes."""
    may_respond = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await may_respond.wait()
        await respond_ok(scope, receive, send)

    connection = ConnectionHarness(app)
    connection.protocol.data_received(GET)
    connection.protocol.shutdown()
    connection.loop.sleep(3 * _UNSENT_RESPONSE_GRACE_S)
    may_respond.set()
    await connection.wait_until_served()
    connection.transport.write_buffer_size = 9
    connection.loop.sleep(_UNSENT_RESPONSE_GRACE_S)
    assert (True, False) == (connection.transport.is_closed, connection.transport.is_aborted)
    connection.protocol.connection_lost(None)
    connection.loop.sleep(_UNSENT_RESPONSE_GRACE_S)
    assert (False, 0) == (connection.transport.is_aborted, connection.loop.pending)


def _request_line(scope: dict[str, Any]) -> tuple[str, str, bytes, str]:
    return scope["method"], scope["path"], scope["query_string"], scope["http_version"]


@pytest.mark.parametrize(
    "chunk",
    [
        b"10000\r\n" + b"a" * 65_536 + b"\r\n",
        b"1\r\na\r\n" * 8_192,
        b"1;" + b"e" * 60_000 + b"\r\na\r\n",
    ],
    ids=["large chunks", "small chunks", "chunk extensions"],
)
async def test_a_body_that_is_not_read_is_limited(chunk: bytes) -> None:
    """After its response, a client can send no more than the largest body that a path accepts."""
    connection = ConnectionHarness(respond_ok)
    head = GET.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert (await connection.send(head)).startswith(b"HTTP/1.1 200 ")
    sent = 0
    while not connection.transport.is_closed and sent < 2 * _MAX_UNUSED_BODY_BYTES:
        connection.protocol.data_received(chunk)
        sent += len(chunk)
    assert sent <= _MAX_UNUSED_BODY_BYTES + len(chunk)
    assert connection.transport.is_closed


async def test_small_chunks_after_the_response_are_limited() -> None:
    """Chunks that take more time than their size suggests are limited in number."""
    connection = ConnectionHarness(respond_ok)
    await connection.send(GET.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"))
    connection.protocol.data_received(b"1\r\na\r\n" * 8_000)
    assert not connection.transport.is_closed
    connection.protocol.data_received(b"1\r\na\r\n" * 10_000)
    assert connection.transport.is_closed


@pytest.mark.parametrize("path", [b"/hot", b"/x"])
async def test_small_chunks_before_the_response_are_limited(path: bytes) -> None:
    """The request is rejected early, also if its body arrives in one read."""
    for reads in (1, 20):
        route = FastRoute()
        head = b"POST " + path + b" HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"1\r\na\r\n" * 1_000 * (20 // reads)
        route.receive(head + chunks)
        for _ in range(reads - 1):
            route.receive(chunks)
        route.receive(b"0\r\n\r\n")
        await route.respond_to_all()
        assert [413] == route.statuses
        assert not route.requests
        assert not route.bodies


@pytest.mark.parametrize("path", [b"/hot", b"/x"])
@pytest.mark.parametrize("size", [1, 100, 1_000, 16_000])
async def test_a_body_of_many_chunks_is_read(path: bytes, size: int) -> None:
    """Its parts are joined, whatever their size, and the next request has a limit of its own."""
    body = bytes(index % 251 for index in range(10_000 if size == 1 else 160_000))
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = b"POST " + path + b" HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"

    for reads in (1, 7):
        route = FastRoute()
        for _ in range(3):
            data = head + coded
            for start in range(0, len(data), len(data) // reads + 1):
                route.receive(data[start : start + len(data) // reads + 1])
                await asyncio.sleep(0)
            await route.respond_to_all()
        assert [201] * 3 == route.statuses
        assert [body] * 3 == [*(each for _, each in route.requests), *route.bodies]


@pytest.mark.parametrize("path", [b"/hot", b"/x"])
@pytest.mark.parametrize("size", [500, 1_800, 3_000, 3_600, 3_900, 5_000, 20_000])
@pytest.mark.parametrize("count", [2, 3, 5])
async def test_pipelined_bodies_of_any_size_are_parsed(path: bytes, size: int, count: int) -> None:
    """A body that is divided between two parts of a read arrives while its request is served."""
    request = b"POST " + path + b" HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size

    route = FastRoute()
    route.receive((request + b"a" * size) * count)
    await asyncio.wait_for(route.respond_to_all(), 5)
    await asyncio.sleep(0)
    await asyncio.wait_for(route.respond_to_all(), 5)
    assert [201] * count == route.statuses
    bodies = [*(each for _, each in route.requests), *route.bodies]
    assert [b"a" * size] * count == bodies
    assert b"" == route.connection.protocol._unparsed


async def test_pipelined_bodies_are_skipped_after_an_early_response() -> None:
    """A connection whose requests were refused before their bodies is closed when it is idle."""
    request = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3000\r\n\r\n" + b"a" * 3_000

    connection = ConnectionHarness(respond_ok)
    for _ in range(2):
        await connection.send(request * 3)
        for _ in range(10):
            await asyncio.sleep(0)
            await connection.wait_until_served()
        assert 3 == b"".join(connection.transport.written).count(b"HTTP/1.1 200 ")
    connection.loop.sleep(KEEP_ALIVE_S)
    connection.loop.sleep(KEEP_ALIVE_S)
    assert connection.transport.is_closed


async def test_a_body_within_the_limit_is_skipped() -> None:
    """The connection stays open for the next request, whose count starts at zero."""
    connection = ConnectionHarness(respond_ok)
    size = _MAX_UNUSED_BODY_BYTES - 1
    head = GET.replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % size)
    for _ in range(2):
        assert (await connection.send(head)).startswith(b"HTTP/1.1 200 ")
        connection.protocol.data_received(b"a" * size)
        assert not connection.transport.is_closed


def test_chunk_headers_of_a_body_are_limited() -> None:
    """A body that is read may be larger than the limit, but not its chunk headers."""

    async def run(extension: bytes, statuses: list[int]) -> None:
        route = FastRoute()
        route.receive(CHUNKED.split(b"3\r\n")[0])
        await asyncio.sleep(0)
        chunk = b"8000%b\r\n%b\r\n" % (extension, b"a" * 32_768)
        for _ in range(_MAX_UNUSED_BODY_BYTES // 32_768 + 1):
            if not route.connection.transport.is_closed:
                route.receive(chunk)
                await asyncio.sleep(0)
        if not route.connection.transport.is_closed:
            route.receive(b"0\r\n\r\n")
        await route.respond_to_all()
        assert statuses == route.statuses

    asyncio.run(run(b"", [201]))
    asyncio.run(run(b";" + b"e" * 32_768, [413]))
