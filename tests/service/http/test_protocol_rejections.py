"""Invalid and incomplete requests, and the order of responses on their connection."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.http.harness import (
    CHUNKED,
    GET,
    KEEP_ALIVE_S,
    POST,
    REQUEST_TIMEOUT_S,
    FastRoute,
)

OTHER_POST = POST.replace(b"/hot", b"/other")
CLOSE = GET.replace(b"Host", b"Connection: close\r\nHost")
INVALID_CHUNK = CHUNKED.replace(b"2\r\nlo", b"xyz\r\nlo")
INVALID = {
    "method": b"nonsense\r\n\r\n",
    "header": b"GET /x HTTP/1.1\r\nHost : h\r\n\r\n",
    "url": b"GET http:///x HTTP/1.1\r\nHost: h\r\n\r\n",
    "chunk": INVALID_CHUNK,
    "chunk on another path": INVALID_CHUNK.replace(b"/hot", b"/other"),
    "too large": b"GET /x HTTP/1.1\r\nHost: h\r\nX-A: " + b"a" * 65_536 + b"\r\n\r\n",
}
invalid_requests = pytest.mark.parametrize("invalid", INVALID.values(), ids=INVALID)


@pytest.mark.parametrize("invalid", [b"\x16\x03\x01\r\n", GET.replace(b"Host: h\r\n", b"")])
async def test_an_invalid_request_is_logged(
    invalid: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the reason, at a level that clients cannot flood by default."""
    with caplog.at_level(logging.DEBUG, "tarry.service"):
        FastRoute().receive(invalid)
    (record,) = caplog.records
    assert ("DEBUG", "request rejected") == (record.levelname, record.getMessage()[:16])


@invalid_requests
async def test_an_invalid_request_is_not_served(invalid: bytes) -> None:
    """The response has an error status, and the connection is closed."""
    route = FastRoute()
    route.receive(invalid)
    await route.respond_to_all()
    assert [431 if len(invalid) > 65_536 else 400] == route.statuses
    assert ([], []) == (route.requests, route.bodies)
    assert (True, 0) == (route.connection.transport.is_closed, route.connection.loop.pending)


@invalid_requests
@pytest.mark.parametrize("valid", [POST, OTHER_POST], ids=["fast path", "uvicorn"])
@pytest.mark.parametrize("count", [1, 3])
async def test_valid_requests_before_it_get_their_response(
    valid: bytes, invalid: bytes, count: int
) -> None:
    """Each valid request has its response; the last response rejects the invalid request."""
    route = FastRoute()
    route.receive(valid * count + invalid)
    assert [] == route.statuses
    assert not route.connection.transport.is_closed
    route.receive(POST)  # ignored
    await route.respond_to_all()
    assert [*[201] * count, 431 if len(invalid) > 65_536 else 400] == route.statuses
    assert count == len(route.requests) + len(route.bodies)
    assert (True, 0) == (route.connection.transport.is_closed, route.connection.loop.pending)


async def test_a_lost_connection_gets_no_rejection() -> None:
    """Nothing is written if the connection is lost before the response to the valid request."""
    route = FastRoute()
    route.receive(POST + INVALID["method"])
    route.connection.transport.close()
    route.connection.protocol.connection_lost(None)
    await route.respond_to_all()
    assert ([], 0) == (route.statuses, route.connection.loop.pending)


async def test_a_response_that_has_begun_is_not_followed_by_a_rejection() -> None:
    """The body is invalid, but its request has a response already. The connection is closed."""
    route = FastRoute()
    route.connection.protocol.app = respond_without_reading
    route.receive(INVALID_CHUNK[:-20].replace(b"/hot", b"/other"))
    await route.respond_to_all()
    route.receive(b"zz\r\n")
    assert ([200], True) == (route.statuses, route.connection.transport.is_closed)


async def test_shutdown_during_a_rejection() -> None:
    """The running request gets its response, and the connection is closed."""
    route = FastRoute()
    route.receive(POST + INVALID["method"])
    route.connection.protocol.shutdown()
    await route.respond_to_all()
    assert ([201], True) == (route.statuses, route.connection.transport.is_closed)
    assert b"\r\nconnection: close\r\n" in route.written


@given(
    st.lists(st.sampled_from([POST, OTHER_POST, CHUNKED, GET, CLOSE, *INVALID.values()])),
    st.lists(st.integers(1, 200)),
    st.lists(st.booleans()),
)
def test_responses_have_the_order_of_the_requests(
    requests: list[bytes], sizes: list[int], waits: list[bool]
) -> None:
    """Each request before the first invalid one has a response, however requests are split."""
    expected: list[int] = []
    for request in requests:
        is_invalid = request in INVALID.values()
        expected.append((431 if len(request) > 65_536 else 400) if is_invalid else 201)
        if is_invalid or request == CLOSE:
            break

    async def run() -> None:
        route, data = FastRoute(), b"".join(requests)
        for number, size in enumerate([*sizes, len(data)]):
            if not route.connection.transport.is_closed:
                route.receive(data[:size])
            data = data[size:]
            if route.responders:
                route.respond()
            if number < len(waits) and waits[number]:
                await asyncio.sleep(0)
        await route.respond_to_all()
        assert expected == route.statuses
        assert expected.count(201) == len(route.requests) + len(route.bodies)

    asyncio.run(run())


@pytest.mark.parametrize("first", [POST, OTHER_POST], ids=["fast path", "uvicorn"])
async def test_line_breaks_do_not_keep_a_connection_open(first: bytes) -> None:
    """The keep-alive timeout starts at the last response, not at line breaks after it."""
    route = FastRoute()
    route.receive(first)
    await route.respond_to_all()
    for _ in range(4):
        route.receive(b"\r\n")
        route.connection.loop.sleep(KEEP_ALIVE_S / 4)
    assert (True, 0) == (route.connection.transport.is_closed, route.connection.loop.pending)


async def test_the_keep_alive_timeout_does_not_end_a_request() -> None:
    """A slow request that begins before the previous response is served."""
    route = FastRoute()
    route.receive(POST + POST[:9])
    route.respond()
    route.connection.loop.sleep(REQUEST_TIMEOUT_S / 2)
    route.receive(POST[9:])
    route.connection.loop.sleep(2 * KEEP_ALIVE_S)
    assert not route.connection.transport.is_closed
    route.respond()
    assert [201, 201] == route.statuses
    route.connection.loop.sleep(KEEP_ALIVE_S)
    assert route.connection.transport.is_closed


async def test_an_early_response_does_not_stop_the_keep_alive_timer() -> None:
    """An idle connection is closed, also if the body of its request arrived after the response."""
    route = FastRoute()
    route.connection.protocol.app = respond_without_reading
    route.receive(OTHER_POST[:-1])
    await route.respond_to_all()
    route.connection.protocol.timeout_keep_alive_handler()
    assert not route.connection.transport.is_closed
    route.receive(OTHER_POST[-1:])
    route.connection.loop.sleep(KEEP_ALIVE_S)
    assert ([200], True) == (route.statuses, route.connection.transport.is_closed)


async def respond_without_reading(_scope: object, _receive: object, send: object) -> None:
    """Respond with 200 before the body of the request has arrived."""
    assert callable(send)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})
