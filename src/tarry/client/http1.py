"""httpx transports for HTTP/1.1 requests to one server: `Http1Transport`, `AsyncHttp1Transport`.

A request takes half of the processor time that it takes with `httpx.HTTPTransport`. Proxies and
HTTP/2 are not supported; a program that needs them passes a `transport` of httpx to the client.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import httpx

from tarry.runtime.effects import effects
from tarry.runtime.event_loops import in_trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Generator, Iterator

MAX_CONNECTIONS = 500
"""Maximum number of requests at a time. Most systems let a process open 1,024 files."""
MAX_IDLE_CONNECTIONS = 20
MAX_IDLE_S = 5.0
"""How long a connection without a request is kept open."""
MAX_HEAD_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 18
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n\0]*)?\r\n")
_HEADER_LINES = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n)*\r\n")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_CONTENT_LENGTH = re.compile(rb"\d{1,15}")
_LENGTH_HEADERS = frozenset({b"content-length", b"transfer-encoding"})
_FIRST_FINAL_STATUS = 200
_STATUSES_WITHOUT_CONTENT = frozenset({204, 304})


class ResponseHead(NamedTuple):
    """Status, headers and framing of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content_length: int | None
    """None: the content is chunked, or ends with the connection."""
    is_chunked: bool
    keep_alive: bool
    """Whether the connection can be used again after the response."""


class ResponseParser:
    """Parses the response to one request from the bytes that a connection receives."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._buffer = b""
        self.head: ResponseHead | None = None
        """The head of the final response; None until it is received."""
        self.is_complete: bool = False
        self._content: Generator[bytes | None] | None = None

    @property
    def can_reuse_connection(self) -> bool:
        """Whether the connection can be used for another request."""
        is_alive = self.head is not None and self.head.keep_alive
        return self.is_complete and is_alive and not self._buffer

    def feed(self, data: bytes) -> list[bytes]:
        """Parse received bytes, and return the parts of the content in them.

        `data` is empty if the server has closed the connection.
        """
        self._buffer += data
        while self.head is None:
            head = self._take_line(b"\r\n\r\n")
            if head is None:
                self._check_open(data)
                return []
            parsed_head = parse_head(head, self._method)
            if parsed_head.status >= _FIRST_FINAL_STATUS:
                self.head = parsed_head
                self._content = self._parse_content(parsed_head)
        parts: list[bytes] = []
        while not self.is_complete and self._content is not None:
            part = next(self._content, b"")
            if part is None:  # more bytes are needed
                if not data and (self.head.is_chunked or self.head.content_length is not None):
                    self._check_open(data)
                self.is_complete = not data
                break
            if part:
                parts.append(part)
            else:
                self.is_complete = True
        return parts

    def _parse_content(self, head: ResponseHead) -> Generator[bytes | None]:
        """Yield the parts of the content, and None if more bytes are needed."""
        if head.is_chunked:
            yield from self._parse_chunks()
        elif head.content_length is not None:
            yield from self._take_bytes(head.content_length)
        else:
            while True:
                part, self._buffer = self._buffer, b""
                yield part or None

    def _parse_chunks(self) -> Generator[bytes | None]:
        while True:
            while (line := self._take_line(b"\r\n")) is None:
                yield None
            match = _CHUNK_LINE.fullmatch(line)
            if match is None:
                raise httpx.RemoteProtocolError(f"invalid chunk size: {line[:100]!r}")
            length = int(match[1], 16)
            if not length:
                break
            yield from self._take_bytes(length)
            while (line := self._take_line(b"\r\n")) is None:
                yield None
            if line != b"\r\n":
                raise httpx.RemoteProtocolError("a chunk is longer than its chunk size")
        trailers = b""  # checked like headers, but ignored
        while line != b"\r\n":
            while (line := self._take_line(b"\r\n")) is None:
                yield None
            trailers += line
            if len(trailers) > MAX_HEAD_BYTES:
                break
        if not _HEADER_LINES.fullmatch(trailers):
            raise httpx.RemoteProtocolError(f"invalid trailers: {trailers[:100]!r}")

    def _take_bytes(self, length: int) -> Generator[bytes | None]:
        while length:
            part, self._buffer = self._buffer[:length], self._buffer[length:]
            length -= len(part)
            yield part or None

    def _take_line(self, line_end: bytes) -> bytes | None:
        """Remove and return the bytes up to the end of `line_end`; None: more bytes are needed."""
        index = self._buffer.find(line_end)
        if index < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise httpx.RemoteProtocolError(f"a line has more than {MAX_HEAD_BYTES} bytes")
            return None
        end = index + len(line_end)
        line, self._buffer = self._buffer[:end], self._buffer[end:]
        return line

    def _check_open(self, data: bytes) -> None:
        if not data:
            msg = "the server closed the connection before the end of the response"
            raise httpx.RemoteProtocolError(msg)


def parse_head(head: bytes, method: str) -> ResponseHead:
    """Parse the head of the response to a request with this method."""
    status_line = _STATUS_LINE.match(head)
    if status_line is None or not _HEADER_LINES.fullmatch(head, status_line.end()):
        raise httpx.RemoteProtocolError(f"not an HTTP/1.1 response: {head[:100]!r}")
    status = int(status_line[2])
    headers: list[tuple[bytes, bytes]] = []
    framing: dict[bytes, bytes] = {}
    for line in head[status_line.end() :].split(b"\r\n")[:-2]:
        name, _, value = line.partition(b":")
        value = value.strip(b" \t")
        headers.append((name, value))
        key = name.lower()
        if key == b"connection":
            framing[key] = framing.get(key, b"") + b"," + value.lower()
        elif key in _LENGTH_HEADERS and framing.setdefault(key, value.lower()) != value.lower():
            raise httpx.RemoteProtocolError(f"two different values of {name.decode()}")
    length, encoding = framing.get(b"content-length"), framing.get(b"transfer-encoding")
    if encoding not in {None, b"chunked"} or (encoding is not None and length is not None):
        msg = "Transfer-Encoding is not `chunked`, or is combined with Content-Length"
        raise httpx.RemoteProtocolError(msg)
    if length is not None and not _CONTENT_LENGTH.fullmatch(length):
        raise httpx.RemoteProtocolError(f"invalid Content-Length: {length!r}")
    content_length = None if length is None else int(length)
    if status in _STATUSES_WITHOUT_CONTENT or method == "HEAD":
        content_length, encoding = 0, None
    has_end = encoding is not None or content_length is not None
    has_close_option = b"close" in framing.get(b"connection", b"")
    keep_alive = has_end and status_line[1] == b"1" and not has_close_option
    return ResponseHead(status, headers, content_length, encoding is not None, keep_alive)


class Http1Transport(httpx.BaseTransport):
    """Sends requests to one server; threads may share it.

    `ssl_context` is None if the URL of the server begins with `http:`.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context
        if ssl_context is not None:
            ssl_context.set_alpn_protocols(["http/1.1"])
        self._process_id = os.getpid()
        self._idle: deque[Connection] = deque()
        """Open connections without a request, most recently used last."""
        self._slots = threading.Semaphore(MAX_CONNECTIONS)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; reading the stream of the response receives its content."""
        timeouts: dict[str, float] = request.extensions["timeout"]
        content, head = request.read(), format_head(request)
        self._clear_after_fork()
        if not self._slots.acquire(timeout=timeouts["pool"]):
            raise _pool_timeout()
        connection: Connection | None = None
        parser, parts = ResponseParser(request.method), []
        try:
            connection = self._take_idle_connection()
            if connection is None:
                connection = self._connect(request.url, timeouts["connect"])
            with _translate_errors(httpx.WriteTimeout, httpx.WriteError):
                connection.send(head + content, timeouts["write"])
            with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
                connection.socket.settimeout(timeouts["read"])
                while parser.head is None:
                    parts = parser.feed(connection.socket.recv(_RECEIVE_BYTES))
        except BaseException:
            self._slots.release()
            if connection is not None:
                connection.close()
            raise
        stream = ContentStream(self, connection, parser, parts)
        return httpx.Response(parser.head.status, headers=parser.head.headers, stream=stream)

    def close(self) -> None:
        """Close the connections that have no request."""
        while self._idle:
            self._idle.pop().close()

    def release(self, connection: Connection, *, can_reuse: bool) -> None:
        """End a request: keep its connection for the next request, or close the connection."""
        self._slots.release()
        if not can_reuse:
            connection.close()
            return
        connection.idle_since = now = effects.now()
        self._idle.append(connection)
        with suppress(IndexError):  # another thread has taken the connections
            while len(self._idle) > MAX_IDLE_CONNECTIONS or self._idle[0].idle_since < (
                now - MAX_IDLE_S
            ):
                self._idle.popleft().close()

    def _clear_after_fork(self) -> None:
        if os.getpid() != self._process_id:  # the parent process uses the connections
            self._process_id = os.getpid()
            self._idle.clear()
            self._slots = threading.Semaphore(MAX_CONNECTIONS)

    def _take_idle_connection(self) -> Connection | None:
        while self._idle:
            with suppress(IndexError):  # another thread has taken the last connection
                connection = self._idle.pop()
                is_fresh = connection.idle_since >= effects.now() - MAX_IDLE_S
                if is_fresh and not is_readable(connection.socket):
                    return connection
                connection.close()
        return None

    def _connect(self, url: httpx.URL, timeout: float) -> Connection:
        host = url.raw_host.decode("ascii")
        with _translate_errors(httpx.ConnectTimeout, httpx.ConnectError):
            sock = socket.create_connection((host, port_of(url)), timeout)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._ssl_context is not None:
                    sock = self._ssl_context.wrap_socket(sock, server_hostname=host)
            except BaseException:
                sock.close()
                raise
        return Connection(sock)


class Connection:
    """An open connection of `Http1Transport`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.idle_since: float = 0.0

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def send(self, data: bytes, timeout: float) -> None:
        """Send a request."""
        self.socket.settimeout(timeout)
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # A server may reject a request before it has received all of it, and close the
            # connection. If it has sent no response, receiving raises an error, too.
            if not is_readable(self.socket):
                raise


class ContentStream(httpx.SyncByteStream):
    """The content of a response, which is received while it is iterated over.

    `parts` were received with the head.
    """

    def __init__(
        self,
        transport: Http1Transport,
        connection: Connection,
        parser: ResponseParser,
        parts: list[bytes],
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._parser = parser
        self._parts = parts
        self._is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        while not self._parser.is_complete:
            with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
                data = self._connection.socket.recv(_RECEIVE_BYTES)
            yield from self._parser.feed(data)

    def close(self) -> None:
        """Release the connection if the response is complete; otherwise close the connection."""
        if not self._is_closed:
            self._is_closed = True
            can_reuse = self._parser.can_reuse_connection
            self._transport.release(self._connection, can_reuse=can_reuse)


class AsyncHttp1Transport(httpx.AsyncBaseTransport):
    """Sends requests to one server on asyncio; on trio, `httpx.AsyncHTTPTransport` sends them."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context
        if ssl_context is not None:
            ssl_context.set_alpn_protocols(["http/1.1"])
        self._process_id = os.getpid()
        self._idle: list[AsyncConnection] = []
        """Open connections without a request, most recently used last."""
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of `_slots`."""
        self._trio_transport: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; reading the stream of the response receives its content."""
        if in_trio():
            if self._trio_transport is None:
                verify = False if self._ssl_context is None else self._ssl_context
                self._trio_transport = httpx.AsyncHTTPTransport(verify=verify)
            return await self._trio_transport.handle_async_request(request)
        timeouts: dict[str, float] = request.extensions["timeout"]
        content, head = await request.aread(), format_head(request)
        slots = await self._acquire_slot(timeouts["pool"])
        connection: AsyncConnection | None = None
        parser, parts = ResponseParser(request.method), []
        try:
            connection = self._take_idle_connection()
            if connection is None:
                connection = await self._connect(request.url, timeouts["connect"])
            connection.slots = slots
            connection.read_timeout = timeouts["read"]
            with _translate_errors(httpx.WriteTimeout, httpx.WriteError):
                await connection.send(head + content, timeouts["write"])
            with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
                while parser.head is None:
                    parts = parser.feed(await connection.receive())
        except BaseException:
            slots.release()
            if connection is not None:
                connection.close()
            raise
        stream = AsyncContentStream(self, connection, parser, parts)
        return httpx.Response(parser.head.status, headers=parser.head.headers, stream=stream)

    async def aclose(self) -> None:
        """Close the connections that have no request."""
        if self._trio_transport is not None:
            await self._trio_transport.aclose()
        while self._idle:
            self._idle.pop().close()

    def release(self, connection: AsyncConnection, *, can_reuse: bool) -> None:
        """End a request: keep its connection for the next request, or close the connection."""
        if connection.slots is not None:
            connection.slots.release()
        if not can_reuse:
            connection.close()
            return
        connection.idle_since = now = effects.now()
        self._idle.append(connection)
        while len(self._idle) > MAX_IDLE_CONNECTIONS or self._idle[0].idle_since < now - MAX_IDLE_S:
            self._idle.pop(0).close()

    async def _acquire_slot(self, timeout: float) -> asyncio.Semaphore:
        """Wait until fewer than `MAX_CONNECTIONS` requests run; return the semaphore to release."""
        if os.getpid() != self._process_id:  # after a fork: the parent process uses the connections
            self._process_id = os.getpid()
            self._idle.clear()
            self._loop = None
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a semaphore can be used by one loop only
            self._loop, self._slots = loop, asyncio.Semaphore(MAX_CONNECTIONS)
        slots = self._slots
        if not slots.locked():
            await slots.acquire()  # returns at once
            return slots
        try:
            async with asyncio.timeout(timeout):
                await slots.acquire()
        except TimeoutError:
            raise _pool_timeout() from None
        return slots

    def _take_idle_connection(self) -> AsyncConnection | None:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            is_fresh = connection.idle_since >= effects.now() - MAX_IDLE_S
            if is_fresh and connection.loop is loop and connection.is_reusable():
                return connection
            connection.close()
        return None

    async def _connect(self, url: httpx.URL, timeout: float) -> AsyncConnection:
        host, loop = url.raw_host.decode("ascii"), asyncio.get_running_loop()
        # An address that does not respond must not use up the timeout. uvloop lacks the option.
        has_option = isinstance(loop, asyncio.BaseEventLoop)
        options: dict[str, Any] = {"happy_eyeballs_delay": 0.25} if has_option else {}
        with _translate_errors(httpx.ConnectTimeout, httpx.ConnectError):
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(
                    AsyncConnection, host, port_of(url), ssl=self._ssl_context, **options
                )
        return connection


class AsyncConnection(asyncio.Protocol):
    """An open connection of `AsyncHttp1Transport`."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.idle_since: float = 0.0
        self.read_timeout: float | None = None
        self.slots: asyncio.Semaphore | None = None
        """Released at the end of the current request."""
        self._received = b""
        self._at_eof = False
        self._error: Exception | None = None
        self._can_write = True
        self._waiter: asyncio.Future[None] | None = None
        """Completed when bytes arrive or can be written, or when the connection closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when the connection is open."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called with received bytes."""
        self._received += data
        if len(self._received) > _RECEIVE_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Called when the server has closed its side of the connection."""
        self._at_eof = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed."""
        self._at_eof = self._can_write = True
        self._error = exc
        self._wake()

    def pause_writing(self) -> None:
        """Called when many bytes wait to be sent."""
        self._can_write = False

    def resume_writing(self) -> None:
        """Called when most of the waiting bytes have been sent."""
        self._can_write = True
        self._wake()

    def close(self) -> None:
        """Close the connection."""
        if not self.loop.is_closed():  # otherwise its socket is closed when it is deleted
            self._transport.abort()

    def is_reusable(self) -> bool:
        """Return whether the server has neither closed the connection nor sent bytes.

        Checks the socket, too, because the event loop may not have read it yet.
        """
        if self._at_eof or self._received or self._transport.is_closing():
            return False
        return not is_readable(self._transport.get_extra_info("socket"))

    async def send(self, data: bytes, timeout: float) -> None:
        """Send a request."""
        self._transport.write(data)
        if not self._can_write:
            async with asyncio.timeout(timeout):
                while not self._can_write:
                    await self._wait()

    async def receive(self) -> bytes:
        """Return the next received bytes; empty if the server has closed the connection."""
        if not self._received and not self._at_eof:
            async with asyncio.timeout(self.read_timeout):
                while not self._received and not self._at_eof:
                    await self._wait()
        if not self._received and self._error is not None:
            raise self._error
        received, self._received = self._received, b""
        if len(received) > _RECEIVE_BYTES:
            self._transport.resume_reading()
        return received

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncContentStream(httpx.AsyncByteStream):
    """The asynchronous version of `ContentStream`."""

    def __init__(
        self,
        transport: AsyncHttp1Transport,
        connection: AsyncConnection,
        parser: ResponseParser,
        parts: list[bytes],
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._parser = parser
        self._parts = parts
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        while not self._parser.is_complete:
            with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
                data = await self._connection.receive()
            for part in self._parser.feed(data):
                yield part

    async def aclose(self) -> None:
        """Release the connection if the response is complete; otherwise close the connection."""
        if not self._is_closed:
            self._is_closed = True
            can_reuse = self._parser.can_reuse_connection
            self._transport.release(self._connection, can_reuse=can_reuse)


def format_head(request: httpx.Request) -> bytes:
    """Return the request line and the headers of a request."""
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    for name, value in request.headers.raw:
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise httpx.LocalProtocolError(f"invalid value of the header {name.decode()}")
        lines.append(b"%b: %b" % (name, value))
    lines += (b"", b"")
    return b"\r\n".join(lines)


def is_readable(sock: socket.socket) -> bool:
    """Return whether bytes have arrived, or the server has closed the connection."""
    if not hasattr(select, "poll"):  # on Windows
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def port_of(url: httpx.URL) -> int:
    """Return the port of a URL, or the default port of its scheme."""
    return url.port or (443 if url.scheme == "https" else 80)


def _pool_timeout() -> httpx.PoolTimeout:
    return httpx.PoolTimeout(f"{MAX_CONNECTIONS} requests of this client are running")


@contextmanager
def _translate_errors(
    timeout_error: type[httpx.TimeoutException], network_error: type[httpx.NetworkError]
) -> Generator[None]:
    """Raise httpx errors instead of socket errors."""
    try:
        yield
    except TimeoutError as error:
        raise timeout_error(str(error)) from error
    except OSError as error:
        raise network_error(str(error)) from error
