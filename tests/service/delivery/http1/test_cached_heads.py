from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.service.delivery import DeliveryResult
from tarry.service.delivery.http1.connection import (
    Connection,
    DeadlineTimer,
    ResponseHead,
    create_pending_request,
)
from tarry.service.delivery.http1.connector import ConnectResult
from tests.integration.hostile import OK
from tests.service.delivery.harness import new_request

OK_HEAD = OK.partition(b"\r\n\r\n")[0]


class StubTransport(asyncio.Transport):
    """A transport that sends nothing; the test passes the received bytes to the protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.is_closed = False

    def is_closing(self) -> bool:
        """Return whether the transport was aborted."""
        return self.is_closed

    def write(self, data: Any) -> None:
        """Drop the data."""
        del data

    def get_write_buffer_size(self) -> int:
        """Return 0: all data was sent."""
        return 0

    def abort(self) -> None:
        """Record that the connection is closed."""
        self.is_closed = True


class StubPool:
    """A pool that records which connections are released."""

    max_response_bytes = 20

    def __init__(self, url_prefix: str = "") -> None:
        self.url_prefix = url_prefix
        self.cached_heads: dict[bytes, ResponseHead] = {}
        self.uncached_responses = 0
        self.released: list[Connection] = []

    def release(self, released: Connection, now: float) -> None:
        """Record a connection that can be used again."""
        del now
        self.released.append(released)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not expected")


class Exchange:
    """Passes responses to new connections of a pool, on an event loop that does not run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._sockets = socket.socketpair()
        self._deadlines = DeadlineTimer(lambda: 0.0)
        self._deadlines._timer = cast("Any", object())  # never due
        self._deadlines._timer_due = -1.0

    def close(self) -> None:
        """Close the loop and the sockets."""
        self._loop.close()
        for sock in self._sockets:
            sock.close()

    def respond(
        self, pool: StubPool, *parts: bytes, **fields: Any
    ) -> tuple[DeliveryResult | None, bool]:
        """Return the result, None if incomplete, and whether the connection was released."""
        transport = StubTransport(self._sockets[0])
        used = Connection(cast("Any", pool), lambda: 0.0)
        used.start(ConnectResult(transport, transport, "192.0.2.1", None, 0.0))
        request = new_request("http://a.example/", **fields)
        pending = create_pending_request(
            self._loop, cast("Any", pool), request, b"", 0.0, self._deadlines
        )
        used.send(pending, 0.0)
        for part in parts:
            if not transport.is_closed:
                used.data_received(part)
        if not pending.done():
            return None, False
        is_released = used in pool.released
        assert is_released != transport.is_closed
        return pending.result(), is_released


@pytest.fixture(scope="module")
def exchange() -> Iterator[Exchange]:
    """Return an exchange, which is closed after the tests."""
    opened = Exchange()
    yield opened
    opened.close()


header_lines = st.sampled_from(
    [
        b"X: y",
        b"x:  y ",
        b"X:",
        b"X : y",
        b" folded",
        b"Content-Length: 2",
        b"Connection: close",
        b"Connection: keep-alive",
        b"Connection: upgrade\r\nUpgrade: h2c",
        b"Transfer-Encoding: chunked",
        b"X: \xe4",
        b"X: a\x01",
        b"a:\r\n" * 250 + b"b:",
    ]
)


@st.composite
def heads(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return the head of a response, and the length of the body in it."""
    version = draw(st.sampled_from([b"1", b"1", b"1", b"0"]))
    status = draw(st.sampled_from([b"200", b"200", b"204", b"304", b"407", b"101"]))
    length = draw(st.integers(0, 4))
    lines = draw(st.lists(header_lines, max_size=1) | st.lists(header_lines, max_size=3))
    if draw(st.integers(0, 9)):
        name = draw(st.sampled_from([b"Content-Length: ", b"content-length:0"]))
        lines.append(name + str(length).encode())
    line_break = draw(st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"]))
    return line_break.join([b"HTTP/1.%b %b Reason" % (version, status), *lines, b"", b""]), length


@st.composite
def responses(draw: st.DrawFn, possible_heads: list[tuple[bytes, int]]) -> bytes:
    """Return a response with one of these heads, and a body that often has the right length."""
    head, length = draw(st.sampled_from(possible_heads))
    is_chunked = b"chunked" in head and draw(st.booleans())
    size = draw(st.sampled_from([length, length, length, 0, 6]))
    body = "".join(draw(st.lists(st.sampled_from("a0\r\n"), min_size=size, max_size=size)))
    interim = draw(st.sampled_from([b"", b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n"]))
    return interim + head + (b"1\r\na\r\n0\r\n\r\n" if is_chunked else body.encode())


requests = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["POST", "POST", "POST", "GET", "HEAD"]),
        "body": st.sampled_from([b"", b"{}"]),
        "max_excerpt": st.sampled_from([2048, 2048, 0, 1]),
    }
)


@given(data=st.data(), url_prefix=st.sampled_from(["", "http://a.example"]))
def test_cached_heads_do_not_change_results(
    exchange: Exchange, data: st.DataObject, url_prefix: str
) -> None:
    """Results and reuse of connections are the same with and without cached heads."""
    pool = StubPool(url_prefix)
    sent = responses(data.draw(st.lists(heads(), min_size=1, max_size=2)))
    for response, fields in data.draw(st.lists(st.tuples(sent, requests), min_size=2, max_size=8)):
        parser_result = exchange.respond(StubPool(url_prefix), response, **fields)
        assert parser_result == exchange.respond(pool, response, **fields)


def status_of(response: tuple[DeliveryResult | None, bool]) -> int | str | None:
    """Return the status of a response."""
    assert response[0] is not None
    return response[0].status


def pool_with_cached_head() -> StubPool:
    """Return a pool with the cached head of OK, but a status that the parser does not return."""
    pool = StubPool()
    pool.cached_heads[OK_HEAD] = ResponseHead(299, [("content-length", "2")], 2)
    return pool


def test_head_is_parsed_once(exchange: Exchange) -> None:
    """The parsed head of an earlier response is used for a response with another body."""
    pool = StubPool()
    assert 200 == status_of(exchange.respond(pool, OK))
    assert {OK_HEAD: ResponseHead(200, [("content-length", "2")], 2)} == pool.cached_heads
    assert 299 == status_of(exchange.respond(pool_with_cached_head(), OK[:-2] + b"no"))


@pytest.mark.parametrize(
    ("parts", "fields"),
    [
        ([OK[:-1], OK[-1:]], {}),
        ([OK + b"x"], {}),
        ([OK[:-2] + b"\r\n"], {}),
        ([OK], {"max_excerpt": 1}),
        ([OK], {"method": "GET"}),
        ([OK], {"method": "HEAD", "body": b""}),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], {}),
    ],
)
def test_parser_handles_other_responses(
    exchange: Exchange, parts: list[bytes], fields: dict[str, Any]
) -> None:
    """A cached head is used only for a complete response in one packet to a usual request."""
    pool = pool_with_cached_head()
    assert 200 == status_of(exchange.respond(pool, *parts, **fields))


@pytest.mark.parametrize(
    "parts",
    [
        [OK[:-1], OK[-1:]],
        [OK[:20], OK[20:]],
        [b"HTTP/1.1 100 Continue\r\n\r\n" + OK],
        [OK + b"\r\n"],
        [OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)],
        [OK.replace(b"2\r\n\r\nok", b"21\r\n\r\n" + bytes(21))],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    ],
)
def test_other_heads_are_not_cached(exchange: Exchange, parts: list[bytes]) -> None:
    """A head is cached only if it has the body length, and the connection is kept alive."""
    pool = StubPool()
    assert 200 == status_of(exchange.respond(pool, *parts))
    assert {} == pool.cached_heads


def ok_with_id(number: int) -> bytes:
    """Return OK with one more header."""
    return OK.replace(b"\r\n", b"\r\nX-Id: %d\r\n" % number, 1)


def test_pool_with_many_different_heads_caches_none(exchange: Exchange) -> None:
    """The 17th head clears the cache; heads are cached again 256 responses later."""
    pool = StubPool()
    for number in range(16):
        exchange.respond(pool, ok_with_id(number))
    assert 16 == len(pool.cached_heads)
    for _ in range(256):
        exchange.respond(pool, ok_with_id(16))
        assert {} == pool.cached_heads
    exchange.respond(pool, ok_with_id(16))
    assert 1 == len(pool.cached_heads)


def test_heads_of_long_responses_are_not_cached(exchange: Exchange) -> None:
    """The head of a response with more than 1,024 bytes is not cached."""
    pool = StubPool()
    for size, expected in ((900, 1), (1024, 1)):
        exchange.respond(pool, OK.replace(b"\r\n", b"\r\nX-Long: %b\r\n" % (size * b"a"), 1))
        assert expected == len(pool.cached_heads)
