from __future__ import annotations

import asyncio
import gc
import ssl

import pytest

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.http1 import connection
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connection import HttpConnection, PendingRequest
from tests.integration.hostile import OK, HostileTargets
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    new_request,
    run,
    send_all,
    wait_for,
    wait_until_empty,
)
from tests.service.delivery.scripted_server import (
    ScriptedServer,
    read_request,
    respond_with,
    run_server,
)

pytestmark = pytest.mark.usefixtures("each_loop")

STATUS_LINE = b"HTTP/1.1 200 OK\r\n"
CHUNKED = STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n"


def send_to_server_with(
    *parts: bytes, method: str = "POST", times: int = 1
) -> tuple[list[DeliveryResult], int]:
    """Send to a server that responds with `parts`; return the results and its connections."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.001)  # so that the parts arrive separately

    async def main() -> tuple[list[DeliveryResult], int]:
        async with run_server(handler) as server:
            sent = [new_request(server.url, method=method, body=b"")] * times
            return await send_all(HttpDeliveryClient(LOOPBACK_GUARD), *sent), server.connections

    return run(main())


@pytest.mark.parametrize(
    "response",
    [
        OK,
        STATUS_LINE + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        CHUNKED + b"2;a=b\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" + OK,
        STATUS_LINE + b"Content-Length: 4\r\n\r\nok\r\n",
    ],
)
def test_connection_is_reused_after_a_framed_response(response: bytes) -> None:
    """A connection is reused after each kind of framing; trailers are not in the headers."""
    result, connections = send_to_server_with(response, times=3)
    assert 1 == connections
    assert [result[0].headers] * 3 == [each.headers for each in result]
    assert "x-trailer" not in dict(result[0].headers)
    assert [result[0].excerpt] * 3 == [each.excerpt for each in result]


@pytest.mark.parametrize(
    ("response", "method"),
    [
        (OK + b"surplus", "POST"),
        (OK + OK, "POST"),
        (OK + b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad", "POST"),
        (OK + b"H", "POST"),
        (OK + b"\r\n", "POST"),
        (OK + b"\n", "POST"),
        (STATUS_LINE + b"Content-Length: 0\r\n\r\n\r\n", "POST"),
        (b"HTTP/1.1 204 No Content\r\n\r\n\r", "POST"),
        (CHUNKED + b"2\r\nok\r\n0\r\n\r\n\r\n", "POST"),
        (
            CHUNKED.replace(b"1.1 200 OK\r\n", b"1.0 200 OK\r\nConnection: keep-alive\r\n")
            + b"2\r\nok\r\n0\r\n\r\n",
            "POST",
        ),
        (OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), "POST"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "POST"),
        (STATUS_LINE + b"Content-Length: 100\r\n\r\n", "HEAD"),
        (STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n", "HEAD"),
        (OK, "HEAD"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", "HEAD"),
    ],
)
def test_connection_in_an_unknown_state_is_not_reused(response: bytes, method: str) -> None:
    """Surplus data, `Connection: close`, HTTP/1.0 and HEAD close the connection."""
    result, connections = send_to_server_with(response, method=method, times=2)
    assert 2 == connections
    for each in result:
        assert each.status in {200, 204}
        assert each.fault is None
        assert each.excerpt in ({b""} if method == "HEAD" else {b"ok", b""})


async def test_unsolicited_data_closes_the_connection() -> None:
    """Data that arrives on an idle connection is not parsed as the next response."""
    async with run_server() as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        statuses = []
        for _ in range(2):
            sent = delivery.send(new_request(server.url))
            received = await server.received.get()
            received.respond()
            statuses.append((await sent).status)
            received.respond(b"HTTP/1.1 500 Planted\r\nContent-Length: 0\r\n\r\n")
            await wait_until_empty(delivery)
        await delivery.close()
        result = (statuses, server.connections)
    assert ([200, 200], 2) == result


async def test_unread_data_closes_the_connection() -> None:
    """Data that arrived before the request, but was not read yet, is not parsed as the response."""
    async with run_server() as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        sent = [delivery.send(new_request(server.url))]
        received = await server.received.get()
        received.respond()
        await sent[0]
        received.write_at_once(b"HTTP/1.1 500 Planted\r\nContent-Length: 0\r\n\r\n")
        sent.append(delivery.send(new_request(server.url)))
        (await server.received.get()).respond()
        statuses = [(await each).status for each in sent]
        await delivery.close()
        result = (statuses, server.connections)
    assert ([200, 200], 2) == result


async def test_data_before_the_request_is_not_a_response() -> None:
    """Data that the server sends before the request is not parsed as the response."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await reader.read(1)
        await reader.read()

    async with run_server(greet) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=3)
        result = await delivery.send(new_request(server.url, timeout=5.0))
        free_slots = await close_and_wait(delivery)
    assert 3 == free_slots
    assert result.fault in {
        Fault.RESET,
        None,
    }  # None: the data arrived after the request was written


def test_response_can_arrive_byte_by_byte() -> None:
    """Headers, chunks and trailers can be split between any two bytes."""
    response = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-Empty:\r\nX-Long: a b c \r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    (result,), _ = send_to_server_with(*[response[at : at + 1] for at in range(len(response))])
    assert (200, b"ok") == (result.status, result.excerpt)
    assert [("x-empty", ""), ("x-long", "a b c"), ("transfer-encoding", "chunked")] == (
        result.headers
    )


def test_header_values_are_stripped_of_ascii_whitespace() -> None:
    """The byte 0xA0 is a space in Latin-1, but part of a UTF-8 character, and is kept."""
    response = (
        STATUS_LINE + "X-Word: \t voilà \t\r\nX-None:  \r\n".encode() + b"Content-Length: 0\r\n\r\n"
    )
    headers = dict(send_to_server_with(response)[0][0].headers)
    assert ("voilà", "") == (headers["x-word"].encode("latin-1").decode(), headers["x-none"])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nnonsense\r\n\r\n", "not valid HTTP"),
        (
            STATUS_LINE + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
            "Transfer-Encoding is not chunked",
        ),
        (CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n"), "not valid HTTP"),
        (
            b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            "The status 101 is not valid",
        ),
        (STATUS_LINE + b"X: a\rb\r\nContent-Length: 0\r\n\r\n", "not valid HTTP"),
        (STATUS_LINE + b"a:\r\n" * 300, "too many or too long headers"),
        (b"RTSP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", "does not begin with HTTP/1"),
        (b"\r\n" + OK, "does not begin with HTTP/1"),
        (b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n", "its version is 2.0"),
        (b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n", "its version is 0.9"),
        (b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n", "its status 0"),
        (b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n", "its status 99"),
    ],
)
def test_error_describes_an_invalid_response(response: bytes, message: str) -> None:
    """The error describes how the response violates HTTP."""
    (result,), _ = send_to_server_with(response)
    assert Fault.PROTOCOL is result.fault
    assert message in (result.error or "")


@pytest.mark.parametrize(
    ("first", "repeated", "expected"),
    [
        (STATUS_LINE, b"a:\r\n", Fault.PROTOCOL),
        (STATUS_LINE + b"a: ", b"xxxxxxxx", Fault.PROTOCOL),
        (STATUS_LINE + b"a", b"aaaaaaaa", Fault.PROTOCOL),
        (b"HTTP/1.1 200 ", b"xxxxxxxx", Fault.PROTOCOL),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", Fault.PROTOCOL),
        (b"", b"\r\n", Fault.PROTOCOL),
        (CHUNKED + b"2;a", b"aaaaaaaa", 200),
        (CHUNKED, b"1\r\nx\r\n", 200),
        (CHUNKED + b"0\r\n", b"a: b\r\n", 200),
        (CHUNKED + b"0\r\na: ", b"xxxxxxxx", 200),
        (STATUS_LINE + b"\r\n", b"xxxxxxxx", 200),
    ],
)
async def test_response_size_is_bounded(
    first: bytes, repeated: bytes, expected: int | Fault
) -> None:
    """Every part of a response has a size limit, at which the connection is closed."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(first)
        while not writer.is_closing():
            writer.write(repeated * 500)
            await writer.drain()

    async with run_server(handler) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_response_bytes=50_000, max_connections=3)
        result = await delivery.send(new_request(server.url))
        await wait_for(lambda: not server.open)
        free_slots = await close_and_wait(delivery)
    assert (expected, 3) == (result.fault or result.status, free_slots)


def test_number_of_small_chunks_is_bounded() -> None:
    """Many chunks of one byte are a response above the limit, because each takes time to parse."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"1\r\nx\r\n" * 8_000)
        await reader.read()  # until the connection is closed

    async def main() -> DeliveryResult:
        async with run_server(handler) as server:
            delivery = HttpDeliveryClient(LOOPBACK_GUARD)
            try:
                return await delivery.send(new_request(server.url, timeout=5))
            finally:
                await delivery.close()

    result = run(main())
    assert (200, None, True) == (result.status, result.fault, result.truncated)


async def _respond_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Respond after reading only the head of a request."""
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(OK)
    await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["plain", "tls"])
async def test_response_before_the_body_is_sent_is_accepted(
    hostile: HostileTargets, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that arrives early is the result, and the rest of the body is not sent."""
    monkeypatch.setattr(connection, "_TLS_SHUTDOWN_TIMEOUT_S", 0.01)
    tls = hostile.tls_contexts["good"] if kind == "tls" else None

    async with run_server(_respond_early, tls) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file, max_connections=3)
        body = bytes(32 * 1024 * 1024)
        result = await delivery.send(new_request(server.url, body=body))
        free_slots = await wait_until_empty(delivery)
    assert (200, b"ok", 3) == (result.status, result.excerpt, free_slots)


async def test_tls_shutdown_has_a_timeout(
    hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection whose target ignores close_notify is aborted, which frees its slot."""
    monkeypatch.setattr(connection, "_TLS_SHUTDOWN_TIMEOUT_S", 0.01)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        await writer.drain()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async with run_server(handler, hostile.tls_contexts["good"]) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file, max_connections=3)
        result = await delivery.send(new_request(server.url))
        free_slots = await wait_until_empty(delivery)
    assert (200, 3) == (result.status, free_slots)


async def test_tls_connections_are_closed_with_close_notify(hostile: HostileTargets) -> None:
    """The server reads the end of the stream, and no connection error."""
    reads: list[bytes | Exception] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        try:
            reads.append(await reader.read())
        except OSError as error:
            reads.append(error)

    async with run_server(handler, hostile.tls_contexts["good"]) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file)
        result = await delivery.send(new_request(server.url))
        await wait_until_empty(delivery)
        await wait_for(lambda: reads)
        await delivery.close()
        value = result
    assert 200 == value.status
    assert [b""] == reads


@pytest.mark.parametrize("tls", [False, True])
async def test_no_reference_cycles(hostile: HostileTargets, tls: bool) -> None:
    """Connections and requests are freed without the garbage collector."""

    async def use(server: ScriptedServer, url: str) -> None:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file)
        for path in ("ok", "ok", "http10", "not-http", "close-before-response", "million-headers"):
            await delivery.send(new_request(url + path))
        await delivery.send(new_request("http://does-not-exist.invalid/"))
        await delivery.send(new_request("http://127.0.0.1:1/"))
        cancelled = delivery.send(new_request(server.url))
        await server.received.get()
        cancelled.cancel()
        await close_and_wait(delivery)

    async with run_server() as server:
        gc.collect()
        gc.disable()
        try:
            await use(server, hostile.tls_urls["good"] if tls else hostile.url)
            await asyncio.sleep(0)
            leaked = [each for each in gc.get_objects() if _is_tracked(each)]
        finally:
            gc.enable()
        result = [type(each) for each in leaked]
    assert [] == result


def _is_tracked(each: object) -> bool:
    return type(each) in {HttpConnection, PendingRequest}


def test_second_response_does_not_affect_the_excerpt() -> None:
    """`excerpt` and `truncated` depend on the first response only."""
    (result,), _ = send_to_server_with(
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nanother!!"
    )
    assert (b"ok", False) == (result.excerpt, result.truncated)


def test_old_tls_versions_are_disabled(hostile: HostileTargets) -> None:
    """TLS 1.1 and older are disabled, and certificates are required."""
    delivery = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file)
    assert delivery._tls is not None
    assert delivery._tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert (True, ssl.CERT_REQUIRED) == (delivery._tls.check_hostname, delivery._tls.verify_mode)


async def test_end_of_the_connection_ends_a_body_without_a_length(hostile: HostileTargets) -> None:
    results = []
    for response in (STATUS_LINE + b"\r\nall", STATUS_LINE + b"Content-Length: 4\r\n\r\nall"):
        async with run_server(respond_with(response)) as server:
            results += await send_all(HttpDeliveryClient(LOOPBACK_GUARD), new_request(server.url))
    complete, incomplete = results
    assert (200, b"all") == (complete.status, complete.excerpt)
    assert Fault.RESET is incomplete.fault
    assert "The connection was closed within the body" == incomplete.error
