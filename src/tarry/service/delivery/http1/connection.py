"""One HTTP/1.1 connection, and one request at a time on it.

What comes back is parsed by llhttp, strictly. The body is kept up to the excerpt and dropped up to
a bound; there the connection is closed, and the status counts, for it was sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from tarry.service.delivery.messages import DeliveryResult, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery.http1.connector import ConnectResult
    from tarry.service.delivery.http1.pending_request import PendingRequest

MAX_RESPONSE_HEADERS, MAX_RESPONSE_HEADER_BYTES = 200, 64 * 1024
"""Of an answer's headers, and of interim answers before it."""
_LARGE = 64 * 1024
"""Bytes of a body that is not copied to go out in one piece with its head."""
_GOODBYE_SECONDS = 1.0
"""How long a target has to end TLS in good order."""
_FIRST_FINAL = 200
_FRAMES = frozenset({"content-length", "transfer-encoding"})
_BODILESS = frozenset({204, 304})


class Home(Protocol):
    """Where a connection belongs."""

    max_body: int
    """Bytes of an answer's body that are read; the rest is not waited for."""

    def release(self, connection: Connection, now: float) -> None:
        """Take a connection back that can be used again."""
        ...

    def lost(self, connection: Connection) -> None:
        """Learn that a connection has ended."""
        ...

    def again(self, sending: PendingRequest) -> None:
        """Send what went out on a connection that had been closed in silence."""
        ...


class Connection(asyncio.Protocol):
    """A connection."""

    def __init__(self, home: Home, clock: Callable[[], float]) -> None:
        self._home = home
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._socket: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._opened: ConnectResult | None = None
        """How it was opened, until its first answer tells."""
        self._remote = ""
        self._is_secure = False
        self._goodbye: asyncio.TimerHandle | None = None
        self.sending: PendingRequest | None = None
        self.opened_at: float = 0.0
        self.free_since: float = 0.0
        self._is_fresh = True
        self._begin(0.0)

    def stand(self, opened: ConnectResult) -> None:
        """Learn that it was opened."""
        self._opened, self._remote = opened, opened.remote
        self._is_secure = opened.tls_ms is not None
        self._transport, self._socket = opened.transport, opened.socket
        self.opened_at = self._clock()
        if self.is_open:
            self._parser = httptools.HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent on it, as far as is known here."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, sending: PendingRequest, now: float) -> None:
        """Send a request."""
        assert self._transport is not None  # noqa: S101 - it stands
        sending.connection = self
        self.sending = sending
        self._begin(now)
        body = sending.request.body
        if len(body) > _LARGE:
            self._transport.write(sending.head)
            self._transport.write(body)
        else:
            self._transport.write(sending.head + body)

    def _begin(self, now: float) -> None:
        self._sent_at = self._first_at = now
        self._headers: list[tuple[str, str]] = []
        self._excerpt = b""
        self._received = self._size = self._status = 0
        self._is_headed = self._is_framed = self._is_complete = self._is_reusable = False

    def drop(self) -> None:
        """Close it at once; whoever waits for an answer is told by others."""
        self.sending = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close it; TLS says so (RFC 9112, 9.8). What did not go out yet is not waited for."""
        transport, socket = self._transport, self._socket
        assert transport is not None  # noqa: S101 - it stands
        assert socket is not None  # noqa: S101 - it stands
        is_done = not (transport.is_closing() or socket.get_write_buffer_size())
        if self._is_secure and is_done:
            transport.close()
            loop = asyncio.get_running_loop()
            self._goodbye = loop.call_later(_GOODBYE_SECONDS, transport.abort)
        else:
            transport.abort()

    # --- called by the loop -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Learn that the target was reached; TLS may follow."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take what the target sends."""
        if self.sending is None or self._parser is None:
            self.drop()  # nobody has asked
            return
        if not self._received:
            self._first_at = self._clock()
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._is_reusable = False
            if not self._is_complete:
                self._fail(Fault.PROTOCOL, self._what_is_wrong(error))
                return
        if self._is_complete:
            self._answer()
        elif not self._is_headed:
            if (
                self._received > MAX_RESPONSE_HEADER_BYTES
                or len(self._headers) > MAX_RESPONSE_HEADERS
            ):
                self._fail(Fault.PROTOCOL, "The answer has too many headers")
        elif self._received > self._home.max_body + MAX_RESPONSE_HEADER_BYTES:
            self._answer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Learn that it has ended, in the middle of an answer or after it."""
        sending, self._parser = self.sending, None
        if self._goodbye is not None:
            self._goodbye.cancel()
        self._home.lost(self)
        if sending is None:
            return
        if self._is_headed and not self._is_framed and exc is None:
            self._answer()  # its end is the end of the body
        elif not self._received and not self._is_fresh and not sending.was_sent:
            # It had been closed in silence, which is found out by using it (RFC 9112, 9.3.1): the
            # target has most likely seen nothing, and the key covers the rest. Once is enough.
            self.sending = sending.connection = None
            sending.was_sent = True
            self._home.again(sending)
        else:
            self._fail(Fault.RESET, self._how_it_ended())

    # --- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins; what comes after the last is not looked at."""
        if self._is_complete:
            raise ValueError("a second answer")
        if self._headers:
            self._headers = []  # of an interim answer

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or pass over a trailer."""
        if not self._is_headed:
            line = name.decode("latin-1").lower(), value.strip().decode("latin-1")
            self._headers.append(line)

    def on_headers_complete(self) -> None:
        """Look at what is to follow."""
        assert self._parser is not None  # noqa: S101 - it calls
        assert self.sending is not None  # noqa: S101 - somebody has asked
        self._status = status = self._parser.get_status_code()
        if status < _FIRST_FINAL:
            return
        self._is_headed = True
        self._is_framed = status in _BODILESS
        for name, value in self._headers:
            if name in _FRAMES:
                self._is_framed = True
                if name == "transfer-encoding" and value.lower() != "chunked":
                    raise ValueError("a Transfer-Encoding other than chunked")
        if self.sending.request.method == "HEAD":
            self._is_complete = True  # the parser waits for a body that will not come

    def on_body(self, body: bytes) -> None:
        """Keep as much as is asked for."""
        assert self.sending is not None  # noqa: S101 - somebody has asked
        kept = len(self._excerpt)
        self._size += len(body)
        most = min(self.sending.request.max_excerpt, self._home.max_body)
        if kept < most:
            more = body[: most - kept]
            self._excerpt = self._excerpt + more if kept else more

    def on_message_complete(self) -> None:
        """An answer has ended."""
        assert self._parser is not None  # noqa: S101 - it calls
        if self._is_headed and not self._is_complete:
            self._is_complete = True
            self._is_reusable = self._parser.should_keep_alive()

    # --- what came of it --------------------------------------------------------------------------

    def _answer(self) -> None:
        if len(self._headers) > MAX_RESPONSE_HEADERS or (
            self._received > MAX_RESPONSE_HEADER_BYTES
            and _size_of(self._headers) > MAX_RESPONSE_HEADER_BYTES
        ):
            self._fail(Fault.PROTOCOL, "The answer has too many headers")
            return
        sending, socket, now = self.sending, self._socket, self._clock()
        assert sending is not None  # noqa: S101 - its answer
        assert socket is not None  # noqa: S101 - it came here
        delivered = DeliveryResult(
            status=self._status,
            headers=self._headers,
            excerpt=self._excerpt,
            truncated=self._size > len(self._excerpt),
            remote=self._remote,
            first_byte_ms=(self._first_at - self._sent_at) * 1000,
        )
        if self._opened is not None:
            self._tell_phases(delivered)
        self.sending = sending.connection = None
        self._is_fresh = False
        sending.end(delivered, now)
        if self._is_complete and self._is_reusable and not socket.get_write_buffer_size():
            self._home.release(self, now)
        else:
            self.close()

    def _fail(self, fault: Fault, words: str) -> None:
        sending = self.sending
        assert sending is not None  # noqa: S101 - it fails
        delivered = self.failed(fault, words)
        self.drop()
        sending.connection = None
        sending.end(delivered, self._clock())

    def failed(self, fault: Fault, words: str) -> DeliveryResult:
        """Return what a request came to that got no answer here."""
        delivered = DeliveryResult(fault=fault, error=words, remote=self._remote)
        if self._opened is not None:
            self._tell_phases(delivered)
        return delivered

    def _tell_phases(self, delivered: DeliveryResult) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            delivered.dns_ms, delivered.connect_ms = opened.dns_ms, opened.connect_ms
            delivered.tls_ms = opened.tls_ms

    def _what_is_wrong(self, error: Exception) -> str:
        if isinstance(error, httptools.HttpParserUpgrade):
            return f"{self._status} is no answer to this request"
        cause = error.__context__ if isinstance(error.__context__, ValueError) else error
        return f"The answer is no proper HTTP: {str(cause)[:200]}"

    def _how_it_ended(self) -> str:
        if not self._received:
            return "The connection ended without an answer"
        return f"The connection ended within the {'body' if self._is_headed else 'headers'}"


def _size_of(headers: list[tuple[str, str]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
