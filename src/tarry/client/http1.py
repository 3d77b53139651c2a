"""`Http1Transport`, an HTTP/1.1 transport of httpx for requests to one server.

A request takes half of the processor time that it takes with `httpx.HTTPTransport`. Proxies and
HTTP/2 are not supported; a program that needs them passes a transport of httpx to the client.
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import httpx

from tarry.runtime.clocks import environment  # clock, sleep and random numbers

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator, Iterator

MAX_IDLE_CONNECTIONS = 20
MAX_IDLE_S = 5.0
"""How long a connection without a request is kept open."""
MAX_HEAD_BYTES = 1 << 16
_MAX_CHUNK_LINE_BYTES = 1 << 12
_RECEIVE_BYTES = 1 << 16
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n\0]*)?\r\n")
_HEADER_LINES = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n)*\r\n")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_CONTENT_LENGTH = re.compile(rb"\d{1,15}")
_FRAMING_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_FIRST_FINAL_STATUS = 200
_STATUSES_WITHOUT_CONTENT = frozenset({204, 304})


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
        """Open connections without a request; the last was used last."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; the content of the response is received while it is read."""
        timeouts: dict[str, float] = request.extensions["timeout"]
        content, head = request.read(), _format_head(request)
        connection = self._take_idle_connection()
        if connection is None:
            connection = self._connect(request.url, timeouts["connect"])
        try:
            with _translate_errors(httpx.WriteTimeout, httpx.WriteError):
                connection.send(head + content, timeouts["write"])
            with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
                response_head = connection.receive_head(request.method, timeouts["read"])
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            response_head.status,
            headers=response_head.headers,
            stream=ContentStream(self, connection, response_head),
        )

    def close(self) -> None:
        """Close the connections that have no request."""
        while self._idle:
            self._idle.pop().close()

    def keep(self, connection: Connection) -> None:
        """Keep a connection, whose response was received completely, for the next request."""
        connection.idle_since = now = environment.now()
        self._idle.append(connection)
        with suppress(IndexError):  # another thread has taken the connections
            while len(self._idle) > MAX_IDLE_CONNECTIONS or self._idle[0].idle_since < (
                now - MAX_IDLE_S
            ):
                self._idle.popleft().close()

    def _take_idle_connection(self) -> Connection | None:
        if os.getpid() != self._process_id:  # after a fork: the parent process uses them
            self._process_id = os.getpid()
            self._idle.clear()
        while self._idle:
            with suppress(IndexError):  # another thread has taken the last one
                connection = self._idle.pop()
                is_fresh = connection.idle_since >= environment.now() - MAX_IDLE_S
                if is_fresh and not connection.is_readable():
                    return connection
                connection.close()
        return None

    def _connect(self, url: httpx.URL, timeout: float) -> Connection:
        host = url.raw_host.decode("ascii")
        port = url.port or (80 if self._ssl_context is None else 443)
        with _translate_errors(httpx.ConnectTimeout, httpx.ConnectError):
            sock = socket.create_connection((host, port), timeout)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._ssl_context is not None:
                    sock = self._ssl_context.wrap_socket(sock, server_hostname=host)
            except BaseException:
                sock.close()
                raise
        return Connection(sock)


class ResponseHead(NamedTuple):
    """Status, headers and framing of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content_length: int | None
    """None: the length is not known in advance."""
    is_chunked: bool
    keep_alive: bool
    """Whether the connection can be used again after the response."""


class Connection:
    """An open connection, and the bytes that were received but not read yet."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""
        self.idle_since: float = 0.0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def is_readable(self) -> bool:
        """Return whether the server has closed the connection, or sent bytes without a request."""
        if self._received:
            return True
        if not hasattr(select, "poll"):  # on Windows
            return bool(select.select([self._socket], [], [], 0)[0])
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, data: bytes, timeout: float) -> None:
        """Send a request."""
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # A server may reject a request before it has received all of it, and close the
            # connection. Without a response, the next read raises an error.
            if not self.is_readable():
                raise

    def receive_head(self, method: str, timeout: float) -> ResponseHead:
        """Receive the status line and the headers of the final response."""
        self._socket.settimeout(timeout)
        while True:
            head = self._receive_until(b"\r\n\r\n", MAX_HEAD_BYTES)
            response_head = _parse_head(head, method)
            if response_head.status >= _FIRST_FINAL_STATUS:
                return response_head

    def iterate_content(self, head: ResponseHead) -> Iterator[bytes]:
        """Yield the content of a response as it arrives."""
        if head.is_chunked:
            yield from self._iterate_chunks()
        elif head.content_length is not None:
            yield from self._receive_exactly(head.content_length)
        else:
            while data := self._take_received() or self._socket.recv(_RECEIVE_BYTES):
                yield data

    def _iterate_chunks(self) -> Iterator[bytes]:
        while True:
            line = self._receive_until(b"\r\n", _MAX_CHUNK_LINE_BYTES)
            match = _CHUNK_LINE.fullmatch(line)
            if match is None:
                raise httpx.RemoteProtocolError(f"invalid length of a chunk: {line[:100]!r}")
            length = int(match[1], 16)
            if not length:
                break
            yield from self._receive_exactly(length)
            if self._receive_until(b"\r\n", _MAX_CHUNK_LINE_BYTES) != b"\r\n":
                raise httpx.RemoteProtocolError("a chunk is longer than its length")
        while self._receive_until(b"\r\n", MAX_HEAD_BYTES) != b"\r\n":
            pass  # trailers are ignored

    def _receive_exactly(self, length: int) -> Iterator[bytes]:
        while length:
            data = self._take_received(length) or self._receive(min(length, _RECEIVE_BYTES))
            length -= len(data)
            yield data

    def _receive_until(self, separator: bytes, max_bytes: int) -> bytes:
        """Return the bytes up to and with a separator."""
        while (index := self._received.find(separator)) < 0:
            if len(self._received) > max_bytes:
                raise httpx.RemoteProtocolError(f"the head has more than {max_bytes} bytes")
            self._received += self._receive(_RECEIVE_BYTES)
        return self._take_received(index + len(separator))

    def _take_received(self, length: int | None = None) -> bytes:
        taken = self._received if length is None else self._received[:length]
        self._received = self._received[len(taken) :]
        return taken

    def _receive(self, max_bytes: int) -> bytes:
        data = self._socket.recv(max_bytes)
        if not data:
            raise httpx.RemoteProtocolError("the server closed the connection without a response")
        return data


class ContentStream(httpx.SyncByteStream):
    """The content of a response, which is received while it is iterated over."""

    def __init__(
        self, transport: Http1Transport, connection: Connection, head: ResponseHead
    ) -> None:
        self._transport = transport
        self._connection: Connection | None = connection
        self._head = head
        self._is_complete = False

    def __iter__(self) -> Iterator[bytes]:
        assert self._connection is not None  # noqa: S101 - the response is not closed
        with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
            yield from self._connection.iterate_content(self._head)
        self._is_complete = True

    def close(self) -> None:
        """Keep the connection if the response is complete; otherwise close it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._is_complete and self._head.keep_alive:
                self._transport.keep(connection)
            else:
                connection.close()


def _format_head(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    for name, value in request.headers.raw:
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise httpx.LocalProtocolError(f"invalid value of the header {name!r}")
        lines.append(b"%b: %b" % (name, value))
    lines += (b"", b"")
    return b"\r\n".join(lines)


def _parse_head(head: bytes, method: str) -> ResponseHead:
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
        if key in _FRAMING_HEADERS and framing.setdefault(key, value) != value:
            raise httpx.RemoteProtocolError(f"two different values of {name.decode()}")
    length, encoding = framing.get(b"content-length"), framing.get(b"transfer-encoding")
    if encoding not in {None, b"chunked"} or (encoding is not None and length is not None):
        raise httpx.RemoteProtocolError("the transfer encoding is not supported")
    if length is not None and not _CONTENT_LENGTH.fullmatch(length):
        raise httpx.RemoteProtocolError(f"invalid Content-Length: {length!r}")
    content_length = None if length is None else int(length)
    if status in _STATUSES_WITHOUT_CONTENT or method == "HEAD":
        content_length, encoding = 0, None
    has_end = encoding is not None or content_length is not None
    wants_close = b"close" in framing.get(b"connection", b"").lower()
    keep_alive = has_end and status_line[1] == b"1" and not wants_close
    return ResponseHead(status, headers, content_length, encoding is not None, keep_alive)


@contextmanager
def _translate_errors(
    timeout_error: type[httpx.TimeoutException], network_error: type[httpx.NetworkError]
) -> Generator[None]:
    """Raise errors of httpx instead of those of sockets."""
    try:
        yield
    except TimeoutError as error:
        raise timeout_error(str(error)) from error
    except OSError as error:
        raise network_error(str(error)) from error
