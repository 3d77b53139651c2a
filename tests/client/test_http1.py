"""The HTTP/1.1 transports of the clients return the same results as the transports of httpx."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from functools import wraps
from typing import Any, Self

import httpx
import pytest

from tarry.adapters.httpx import RetryTransport
from tarry.client import Client, http1
from tarry.client.http1 import (
    MAX_HEAD_BYTES,
    MAX_IDLE_CONNECTIONS,
    MAX_IDLE_S,
    AsyncHttp1Transport,
    Connection,
    Http1Transport,
    ResponseParser,
    parse_head,
)
from tarry.testing import VirtualClock
from tests.client.fake_service import FakeService
from tests.integration.hostile import hostile_targets

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class RawServer:
    """Sends scripted bytes as the responses to requests without content.

    `connections` has the responses of each connection; after the last, the connection is closed.
    """

    def __init__(self, connections: Sequence[Sequence[bytes]]) -> None:
        self._connections = connections
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(30)  # a test that opens too few connections fails
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/path?query"
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for responses in self._connections:
            connection, _ = self._listener.accept()
            with connection:
                for response in responses:
                    received = b""
                    while not received.endswith(b"\r\n\r\n"):
                        if not (data := connection.recv(1 << 16)):
                            return  # the client has closed the connection: its test fails
                        received += data
                    self.requests.append(received)
                    connection.sendall(response)

    def close(self) -> None:
        """Wait for the last connection, and close the listener."""
        self._thread.join()
        self._listener.close()


@contextmanager
def running_server(*connections: Sequence[bytes]) -> Iterator[RawServer]:
    """Run a raw server."""
    server = RawServer(connections)
    try:
        yield server
    finally:
        server.close()


def build_request(url: str, method: str = "GET", **options: Any) -> httpx.Request:
    """Return a request with timeouts of ten seconds."""
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), 10.0)
    return httpx.Request(method, url, extensions={"timeout": timeouts}, **options)


Result = tuple[int, list[tuple[bytes, bytes]], bytes] | type[Exception]
"""Status, headers and content of a response, or the class of the error."""


async def fetch_async(transport: httpx.AsyncBaseTransport, request: httpx.Request) -> Result:
    """Send a request on an event loop."""
    try:
        async with aclosing(await transport.handle_async_request(request)) as response:
            content = await response.aread()
    except httpx.TransportError as error:
        return type(error)
    return response.status_code, list(response.headers.raw), content


class AsyncFetcher:
    """Sends requests with `AsyncHttp1Transport` on its own event loop; see `Fetcher`."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.transport = AsyncHttp1Transport()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.transport.aclose())
        self._runner.close()

    def fetch(self, request: httpx.Request) -> Result:
        """Send a request."""
        return self._runner.run(fetch_async(self.transport, request))


class Fetcher:
    """Sends requests with `Http1Transport`."""

    def __init__(self) -> None:
        self.transport = Http1Transport()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def fetch(self, request: httpx.Request) -> Result:
        """Send a request."""
        return fetch(self.transport, request)


@pytest.fixture(params=[Fetcher, AsyncFetcher])
def fetcher(request: pytest.FixtureRequest) -> Iterator[Fetcher | AsyncFetcher]:
    """A fetcher for each of the two transports."""
    with request.param() as fetcher:
        yield fetcher


def fetch(transport: httpx.BaseTransport, request: httpx.Request) -> Result:
    """Send a request."""
    try:
        with closing(transport.handle_request(request)) as response:
            content = response.read()
    except httpx.TransportError as error:
        return type(error)
    return response.status_code, list(response.headers.raw), content


RESPONSES = {
    "length": OK,
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "until close": b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
    "no reason": b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok",
    "http/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"4\r\nwiki\r\nA;name=value\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n"
    ),
    "wrong trailer": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nno trailer\r\n\r\n"
    ),
    "informational": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK,
    "spaces": b"HTTP/1.1 200 OK\r\nContent-Length:  2 \r\nX-A:\t1 2\t\r\nX-B:\r\n\r\nok",
    "large": b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000,
    "nothing": b"",
    "cut head": b"HTTP/1.1 200 OK\r\nContent-",
    "cut content": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
    "cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
    "no last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    "wrong chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
    "no number": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nok\r\n0\r\n\r\n",
    "different lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
    "gzip": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "space in name": b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
    "null": b"HTTP/1.1 200 OK\r\nX-A: \0\r\nContent-Length: 2\r\n\r\nok",
    "long head": b"HTTP/1.1 200 OK\r\nX-A: " + b"x" * 2 * MAX_HEAD_BYTES,
}


@pytest.mark.parametrize("name", RESPONSES)
def test_response_is_the_same_as_with_httpx(fetcher: Fetcher, name: str) -> None:
    """Status, headers and content, or the class of the error, are those of httpx."""
    with running_server([RESPONSES[name]]) as server:
        result = fetcher.fetch(build_request(server.url))
    with running_server([RESPONSES[name]]) as server, httpx.HTTPTransport() as transport:
        assert result == fetch(transport, build_request(server.url))


@pytest.mark.parametrize("name", RESPONSES)
def test_response_can_arrive_byte_by_byte(name: str) -> None:
    """The result does not depend on how the bytes are divided into packets."""

    def parse(parts: Iterator[bytes] | Sequence[bytes]) -> object:
        parser, content = ResponseParser("GET"), b""
        try:
            for part in parts:
                content += b"".join(parser.feed(part))
            if not parser.is_complete:
                content += b"".join(parser.feed(b""))
        except httpx.RemoteProtocolError as error:
            return type(error)
        return parser.head, content, parser.can_reuse_connection

    response = RESPONSES[name]
    assert parse([response]) == parse(response[n : n + 1] for n in range(len(response)))


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: 1\r\n 2\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
    ],
)
def test_ambiguous_head_is_an_error(head: bytes) -> None:
    """Heads that HTTP parsers read differently are errors, although httpx accepts some of them."""
    with pytest.raises(httpx.RemoteProtocolError):
        parse_head(head, "GET")


def test_framing_headers_are_case_insensitive() -> None:
    """The values of Transfer-Encoding and of several Connection headers may be in upper case."""
    lines = b"Transfer-Encoding: Chunked", b"Connection: a", b"Connection: Close", b"", b""
    head = b"\r\n".join([b"HTTP/1.1 200 OK", *lines])
    assert (True, False) == parse_head(head, "GET")[3:]


def test_request_has_its_headers_and_content(fetcher: Fetcher, service: FakeService) -> None:
    """The server receives method, path, headers and content of the request."""
    url, headers = f"{service.url}/retry-tasks?a=1", {"X-A": "1"}
    fetcher.fetch(build_request(url, "POST", content=b"{}", headers=headers))
    [received] = service.requests
    assert ("POST", "/retry-tasks", {"a": "1"}) == received[:3]
    assert b"{}" == received.body
    assert "1" == received.headers["x-a"]


def test_header_with_a_line_break_is_not_sent() -> None:
    """A header value with a line break raises a `LocalProtocolError`."""
    with Http1Transport() as transport, pytest.raises(httpx.LocalProtocolError, match="X-A"):
        transport.handle_request(build_request("http://127.0.0.1:9", headers={"X-A": "1\r\nB: 2"}))


def test_connection_is_used_again(fetcher: Fetcher) -> None:
    """Consecutive requests use one connection."""
    with running_server([OK, OK, OK]) as server:
        for _ in range(3):
            result = fetcher.fetch(build_request(server.url))
            assert (200, [(b"Content-Length", b"2")], b"ok") == result


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok, and more",
        b"HTTP/1.1 204 No Content\r\n\r\nunexpected",
    ],
)
def test_connection_that_cannot_be_used_again_is_closed(fetcher: Fetcher, first: bytes) -> None:
    """After a response that does not keep its connection alive, a new connection is opened."""
    with running_server([first], [OK]) as server:
        fetcher.fetch(build_request(server.url))
        result = fetcher.fetch(build_request(server.url))
        assert (200, [(b"Content-Length", b"2")], b"ok") == result


def test_connection_of_an_unread_response_is_closed() -> None:
    """If a response is closed before its content was read, its connection is closed."""
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234"
    with running_server([long], [OK]) as server, Http1Transport() as transport:
        transport.handle_request(build_request(server.url)).close()
        assert not transport._idle
        fetch(transport, build_request(server.url))


def test_idle_connections_are_closed() -> None:
    """A connection that was idle for long is closed; the number of idle connections is limited."""
    with VirtualClock() as clock, Http1Transport() as transport:
        with running_server([OK], [OK]) as server:
            fetch(transport, build_request(server.url))
            clock.advance(MAX_IDLE_S + 0.1)
            fetch(transport, build_request(server.url))
        with running_server(*([OK],) * (MAX_IDLE_CONNECTIONS + 1)) as server:
            responses = [
                transport.handle_request(build_request(server.url))
                for _ in range(MAX_IDLE_CONNECTIONS + 1)
            ]
            for response in responses:
                response.read()
                response.close()
        assert MAX_IDLE_CONNECTIONS == len(transport._idle)


def test_connections_of_the_parent_process_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork, the child process opens its own connections."""
    with running_server([OK], [OK]) as server, Http1Transport() as transport:
        fetch(transport, build_request(server.url))
        parent_connections = [*transport._idle]
        process_id = os.getpid() + 1
        monkeypatch.setattr("tarry.client.http1.os.getpid", lambda: process_id)
        fetch(transport, build_request(server.url))
        for connection in parent_connections:
            connection.close()


def test_unreachable_server_is_a_connect_error(fetcher: Fetcher) -> None:
    """A refused connection and an unknown host name raise a `ConnectError`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert httpx.ConnectError is fetcher.fetch(build_request(f"http://127.0.0.1:{port}"))
    assert httpx.ConnectError is fetcher.fetch(build_request("http://name.invalid"))


def test_missing_response_is_a_read_timeout(fetcher: Fetcher) -> None:
    """If the server does not respond in time, a `ReadTimeout` is raised."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request = build_request(f"http://127.0.0.1:{listener.getsockname()[1]}")
        request.extensions["timeout"]["read"] = 0.01
        assert httpx.ReadTimeout is fetcher.fetch(request)


def test_request_that_is_not_received_is_a_write_timeout(fetcher: Fetcher) -> None:
    """If the server does not receive a long request in time, a `WriteTimeout` is raised."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        request = build_request(url, "POST", content=bytes(32 << 20))
        request.extensions["timeout"]["write"] = 0.05
        assert httpx.WriteTimeout is fetcher.fetch(request)


def test_long_content_is_sent_and_received(fetcher: Fetcher) -> None:
    """Content that is longer than all buffers is sent and received completely."""
    length = 8 << 20
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as received:
                while received.readline() != b"\r\n":
                    pass
                content = received.read(length)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
                connection.sendall(content)

        thread = threading.Thread(target=echo)
        thread.start()
        url, content = f"http://127.0.0.1:{listener.getsockname()[1]}", os.urandom(length)
        result = fetcher.fetch(build_request(url, "POST", content=content))
        thread.join()
    assert not isinstance(result, type)
    assert content == result[2]


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the transports that a test creates to one request at a time."""
    monkeypatch.setattr(http1, "MAX_CONNECTIONS", 1)


@pytest.mark.usefixtures("one_connection")
def test_number_of_requests_is_limited() -> None:
    """A request that finds no free connection within the `pool` timeout is a `PoolTimeout`."""
    with running_server([OK, OK]) as server, Http1Transport() as transport:
        request = build_request(server.url)
        request.extensions["timeout"]["pool"] = 0.01
        with closing(transport.handle_request(request)) as response:
            assert httpx.PoolTimeout is fetch(transport, request)
            response.read()
        assert isinstance(fetch(transport, request), tuple)


@pytest.mark.usefixtures("one_connection")
def test_number_of_asynchronous_requests_is_limited() -> None:
    """The limit also applies to `AsyncHttp1Transport`, on each of its event loops."""

    async def main(transport: AsyncHttp1Transport, url: str) -> None:
        request = build_request(url)
        request.extensions["timeout"]["pool"] = 0.01
        async with aclosing(await transport.handle_async_request(request)) as response:
            assert httpx.PoolTimeout is await fetch_async(transport, request)
            await response.aread()
        waits = [fetch_async(transport, build_request(url)) for _ in range(2)]
        results = await asyncio.gather(*waits)
        assert all(isinstance(result, tuple) for result in results)
        await transport.aclose()

    transport = AsyncHttp1Transport()
    with running_server([OK] * 3, [OK] * 3) as server:
        asyncio.run(main(transport, server.url))
        asyncio.run(main(transport, server.url))


@pytest.mark.usefixtures("one_connection")
def test_failed_request_does_not_count(fetcher: Fetcher) -> None:
    """After requests that failed, another request can be sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refused_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert httpx.ConnectError is fetcher.fetch(build_request(refused_url))
    with running_server([b""], [OK]) as server:
        assert httpx.RemoteProtocolError is fetcher.fetch(build_request(server.url))
        assert isinstance(fetcher.fetch(build_request(server.url)), tuple)


@pytest.mark.usefixtures("one_connection")
def test_cancelled_request_closes_its_connection() -> None:
    """The server sees that the connection is closed, and another request can be sent."""

    async def main(url: str) -> None:
        transport = AsyncHttp1Transport()
        running = asyncio.create_task(fetch_async(transport, build_request(url)))
        await asyncio.to_thread(is_received.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert isinstance(await fetch_async(transport, build_request(url)), tuple)
        await transport.aclose()

    is_received = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                is_received.set()
                with suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(OK)

        thread = threading.Thread(target=serve)
        thread.start()
        asyncio.run(main(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()


def test_connection_that_was_idle_for_long_is_not_used_again() -> None:
    """An asynchronous connection is closed after `MAX_IDLE_S` without a request."""

    async def main(clock: VirtualClock, url: str) -> None:
        transport = AsyncHttp1Transport()
        for _ in range(2):
            assert isinstance(await fetch_async(transport, build_request(url)), tuple)
            clock.advance(MAX_IDLE_S + 1)
        await transport.aclose()

    with VirtualClock() as clock, running_server([OK], [OK]) as server:
        asyncio.run(main(clock, server.url))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_connections_of_another_event_loop_are_not_used() -> None:
    """A transport that is used on a second event loop opens its own connections there."""
    transport = AsyncHttp1Transport()
    with running_server([OK], [OK]) as server:
        for _ in range(2):
            asyncio.run(fetch_async(transport, build_request(server.url)))
        asyncio.run(transport.aclose())
    gc.collect()  # the event loop of the first connection was closed without closing it


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b""])
def test_bytes_that_arrive_before_a_request_are_not_its_response(surplus: bytes) -> None:
    """A connection that was closed, or received bytes, while the loop was busy is not reused."""

    async def main(url: str) -> None:
        transport = AsyncHttp1Transport()
        await fetch_async(transport, build_request(url))
        is_surplus_sent.wait()  # blocks the event loop
        assert (200, [(b"Content-Length", b"2")], b"ok") == await fetch_async(
            transport, build_request(url)
        )
        await transport.aclose()

    is_surplus_sent = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for late_bytes in (surplus, b""):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(OK)
                    if late_bytes:
                        threading.Event().wait(0.05)  # so that it is not received with OK
                        connection.sendall(late_bytes)
                is_surplus_sent.set()

        thread = threading.Thread(target=serve)
        thread.start()
        asyncio.run(main(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()


def test_early_response_is_read() -> None:
    """A response that the server sends before it closes the connection is not lost."""
    server, client = socket.socketpair()
    with server:
        server.sendall(OK)
    connection = Connection(client)
    connection.send(b"a request that the server does not receive", 10.0)
    assert OK == connection.socket.recv(100)
    connection.close()


def test_certificate_is_verified() -> None:
    """A trusted certificate is accepted; an untrusted certificate is an error without a retry."""
    with hostile_targets() as targets:
        trusted = ssl.create_default_context(cafile=targets.ca_file)
        url = targets.tls_urls["good"] + "ok"
        with (
            Http1Transport(trusted) as transport,
            closing(transport.handle_request(build_request(url))) as response,
        ):
            assert 200 == response.status_code
        retry = RetryTransport(Http1Transport(httpx.create_ssl_context()))
        with retry, pytest.raises(httpx.ConnectError, match="certificate verify failed") as raised:
            retry.handle_request(build_request(url))
    assert "attempts" not in "".join(getattr(raised.value, "__notes__", []))


def test_replaced_method_of_httpx_is_called(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client calls `handle_request` of httpx if it is replaced, as by OpenTelemetry."""
    sent_urls: list[str] = []
    send = httpx.HTTPTransport.handle_request

    @wraps(send)
    def record(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        sent_urls.append(str(request.url))
        return send(self, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", record)
    with Client(service.url) as client:
        client.enqueue("https://example.com/hook", key="key-1")
    assert [f"{service.url}/retry-tasks"] == sent_urls
