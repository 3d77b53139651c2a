"""HTTP/1.1 connections, each with one request at a time, and the deadlines of pending requests.

llhttp parses the response in strict mode. The body is read up to a limit, and its beginning is kept
as the excerpt. A body above the limit is not an error: the connection is closed, and the result has
the status and the excerpt of the response.
"""

from __future__ import annotations

import asyncio
import logging
import select
import ssl
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import httptools
import msgspec

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.http1.connector import describe_tls_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery import DeliveryCallback, DeliveryRequest
    from tarry.service.delivery.http1.connector import ConnectResult

_logger = logging.getLogger("tarry.service")
Deadline: TypeAlias = list[Any]
"""`[due, tie_breaker, callback]`; the callback is None once the deadline is cancelled.
A list and not an object with `__lt__`: the heap compares often, and lists are compared in C."""
CALLBACK = 2  # the index of the callback in a Deadline
_MAX_CALLBACKS_PER_TURN = 4
"""Deadlines for which `DeadlineTimer` calls back in one turn of the event loop, in about 1 ms."""
_MIN_COMPACTION_SIZE = 512  # a heap with fewer deadlines is not compacted
MAX_RESPONSE_HEADERS, MAX_RESPONSE_HEADER_BYTES = 200, 64 * 1024
"""Limits for the headers of a response, including all interim (1xx) responses before it."""
_SMALL_PART_BYTES, _SMALL_PART_CHARGE = 64, 256
"""Each smaller part of a body, such as a chunk, counts as this many received bytes more. A part
takes 0.3 us even if it has one byte: five responses with 200,000 such chunks stopped the event loop
for 0.3 s. The limit of 1 MiB now allows 4,200 of them."""
_MAX_JOINED_BODY_BYTES = 64 * 1024
"""A body up to this size is copied behind the head, so that both are written in one call."""
_TLS_SHUTDOWN_TIMEOUT_S = 1.0
CLOSED_WITHOUT_RESPONSE = "The connection was closed without a response"
_FIRST_STATUS, _FIRST_FINAL_STATUS = 100, 200
_HTTP_VERSIONS = frozenset({"1.0", "1.1"})
_PROXY_AUTHENTICATION_REQUIRED = 407
_PROXY_PAUSE_S = 10.0  # before the next attempt after a 407
_FRAMING_HEADERS = frozenset({"content-length", "transfer-encoding"})
_STATUSES_WITHOUT_BODY = frozenset({204, 304})
METHODS_WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
"""Methods whose requests usually have no body (RFC 9110, 9.3). Some servers do not read one."""


class _Pool(Protocol):
    """The part of `ConnectionPool` that this module uses, without a circular import."""

    max_response_bytes: int
    url_prefix: str

    def release(self, connection: HttpConnection, now: float) -> None: ...
    def remove(self, connection: HttpConnection) -> None: ...
    def resend(self, pending: PendingRequest) -> None: ...
    def abort(self, pending: PendingRequest) -> None: ...
    def time_out(self, pending: PendingRequest) -> None: ...


class DeadlineTimer:
    """Calls back when deadlines pass. They share one timer, because most are cancelled early.

    Hundreds of requests to targets that hang may time out in the same second. They are handled in
    slices: API requests would otherwise wait until all of them have timed out, for 0.2 s and more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[Deadline] = []
        self._tie_breaker = count()
        self._compaction_size = _MIN_COMPACTION_SIZE  # the heap size at which it is compacted
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0

    def add(self, due: float, callback: Callable[[], None]) -> Deadline:
        """Call `callback` at the time `due`. Cancel this with `deadline[CALLBACK] = None`."""
        heap, deadline = self._heap, [due, next(self._tie_breaker), callback]
        if len(heap) >= self._compaction_size:
            heap[:] = [each for each in heap if each[CALLBACK] is not None]
            heapify(heap)
            self._compaction_size = max(_MIN_COMPACTION_SIZE, 2 * len(heap))
        heappush(heap, deadline)
        if self._timer is None or due < self._timer_due:
            self._set_timer(due)
        return deadline

    def close(self) -> None:
        """Cancel all deadlines."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        delay = max(0.0, due - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        # A timer may fire early (uvloop's by up to 1.4 ms). The clock decides which deadlines have
        # passed, and the timer is set again for the other deadlines.
        self._timer = None
        heap, now, loop = self._heap, self._clock(), asyncio.get_running_loop()
        callback_count = 0
        while heap and (heap[0][0] <= now or heap[0][CALLBACK] is None):
            if callback_count == _MAX_CALLBACKS_PER_TURN:
                self._timer_due = heap[0][0]
                self._timer = loop.call_soon(self._on_timer)
                return
            callback = heappop(heap)[CALLBACK]
            if callback is not None:
                # Not called directly, so that an error in one callback does not affect the others.
                loop.call_soon(callback)
                callback_count += 1
        if heap:
            self._set_timer(heap[0][0])


class PendingRequest(msgspec.Struct, eq=False):
    """A request without a response yet.

    Its result is passed to a callback, for speed: a future would call its callbacks only in the
    next iteration of the event loop, and a coroutine would be resumed for each step of the
    exchange.
    """

    pool: _Pool
    request: DeliveryRequest
    head: bytes  # the request line and the header lines
    started_at: float
    on_done: DeliveryCallback | None  # None once the request is complete or cancelled
    deadline: Deadline | None = None
    connect_task: asyncio.Task[DeliveryResult | None] | None = None
    """Opens a connection for the request."""
    connection: HttpConnection | None = None  # on which the request was sent
    is_resent: bool = False  # whether it was sent before, on a connection that was closed

    def complete(self, result: DeliveryResult | BaseException, now: float) -> None:
        """Call `on_done` with a result or an unexpected error, unless the request is complete.

        The callback may send the next request, so the connection must be released before this call.
        """
        on_done, deadline = self.on_done, self.deadline
        if on_done is None:
            return
        self.on_done = None
        if deadline is not None:
            deadline[CALLBACK] = None
        if isinstance(result, DeliveryResult):
            result.duration_ms = (now - self.started_at) * 1000
        try:
            on_done(result)
        except Exception:  # the caller may have to complete other requests, too
            _logger.exception("callback of a delivery failed, delivery=%r", result)

    def on_deadline(self) -> None:
        """Fail the request, unless it is complete."""
        if self.on_done is not None:
            self.pool.time_out(self)

    def cancel(self) -> None:
        """Cancel the request and free its connection."""
        if self.on_done is not None:
            self.pool.abort(self)
            self.complete(asyncio.CancelledError(), self.started_at)


class HttpConnection(asyncio.Protocol):
    """A connection to one origin, directly or through a proxy."""

    def __init__(self, pool: _Pool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._raw_transport: asyncio.Transport | None = None  # the transport below TLS
        self._parser: httptools.HttpResponseParser | None = None
        self._connect_result: ConnectResult | None = None
        """The durations of the connect phases. None once the result of the first request has them:
        later requests reuse the connection."""
        self._poll: Callable[[int], object] | None = None  # polls the socket in `is_reusable`
        self._remote = ""
        self._is_secure = False
        self._shutdown_timer: asyncio.TimerHandle | None = None
        self.pending: PendingRequest | None = None
        self.opened_at: float = 0.0
        self.idle_since: float = 0.0
        self._sent_at = self._first_byte_at = 0.0
        self._received_bytes = self._body_bytes = self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._excerpt = self._last_body_part = b""
        self._has_headers = self._is_complete = False
        self._is_chunked = self._can_keep_alive = False

    def start(self, connect_result: ConnectResult) -> None:
        """Use the transport of an established connection."""
        self._connect_result, self._remote = connect_result, connect_result.remote
        self._is_secure = connect_result.tls_ms is not None
        self._transport = connect_result.transport
        self._raw_transport = connect_result.raw_transport
        self.opened_at = self._clock()
        if self.is_open:
            self._parser = httptools.HttpResponseParser(self)
            poll = select.poll()
            poll.register(self._raw_transport.get_extra_info("socket").fileno(), select.POLLIN)
            self._poll = poll.poll

    @property
    def is_open(self) -> bool:
        """Whether the connection is open; a close by the server may not have been noticed yet."""
        return self._transport is not None and not self._transport.is_closing()

    def is_reusable(self) -> bool:
        """Return whether the connection is open, and nothing was received after the last response.

        Checks the socket, because the event loop may not have read it yet. Bytes that arrive before
        a request is sent would otherwise be parsed as the response to this request. A close by the
        server is noticed here, too. This takes about 0.4 us.
        """
        transport, poll = self._transport, self._poll
        if transport is None or poll is None or transport.is_closing():
            return False
        return not poll(0)

    def send(self, pending: PendingRequest, now: float) -> None:
        """Send a request."""
        transport = self._transport
        assert transport is not None  # noqa: S101 - the connection is established
        pending.connection = self
        self.pending = pending
        self._sent_at = now
        # `data_received` and `on_headers_complete` reset the other fields of the response, except
        # `_last_body_part`, which is read only after `on_body` has set it.
        self._received_bytes = 0
        body = pending.request.body
        if len(body) > _MAX_JOINED_BODY_BYTES:
            transport.write(pending.head)
            transport.write(body)
        else:
            transport.write(pending.head + body)

    def abort(self) -> None:
        """Close the connection at once, without completing its request."""
        self.pending = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection; send a TLS close_notify (RFC 9112, 9.8) if all data was sent."""
        transport, raw_transport = self._transport, self._raw_transport
        assert transport is not None  # noqa: S101 - the connection is established
        assert raw_transport is not None  # noqa: S101 - likewise
        is_flushed = not (transport.is_closing() or raw_transport.get_write_buffer_size())
        if self._is_secure and is_flushed:
            transport.close()
            loop = asyncio.get_running_loop()
            self._shutdown_timer = loop.call_later(_TLS_SHUTDOWN_TIMEOUT_S, transport.abort)
        else:
            transport.abort()

    # --- callbacks of the event loop --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; a TLS handshake may follow."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response."""
        parser, now = self._parser, self._clock()
        if self.pending is None or parser is None:
            self.abort()  # no request was sent, so this cannot be a response
            return
        if not self._received_bytes:
            self._first_byte_at = now
            self._headers = []
            self._has_headers = self._is_complete = self._can_keep_alive = False
            if data[:1] != b"H":  # the parser also accepts RTSP/1.0 and ICE/1.0
                self._fail_request(Fault.PROTOCOL, "The response does not begin with HTTP/1")
                return
        self._received_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._can_keep_alive = False
            if not self._is_complete:
                self._fail_request(Fault.PROTOCOL, self._describe_parser_error(error))
                return
        if self._is_complete:
            can_keep_alive = self._can_keep_alive and self._is_at_end(data)
            self._complete_request(now, can_keep_alive=can_keep_alive)
        elif not self._has_headers:
            if (
                self._received_bytes > MAX_RESPONSE_HEADER_BYTES
                or len(self._headers) > MAX_RESPONSE_HEADERS
            ):
                self._fail_request(Fault.PROTOCOL, "The response has too many or too long headers")
        elif self._received_bytes > self._pool.max_response_bytes + MAX_RESPONSE_HEADER_BYTES:
            self._complete_request(now, can_keep_alive=False)

    def _is_at_end(self, data: bytes) -> bool:
        """Return whether a complete response ends with the end of `data`.

        The parser reports other surplus bytes, but skips line breaks. If `data` alone does not
        show whether line breaks are surplus, return False.
        """
        if self._is_chunked or not self._body_bytes:
            return data.endswith(b"\r\n\r\n") and data[-5:-4] not in {b"", b"\n"}
        last_part = self._last_body_part
        return data.endswith(last_part) and not last_part.isspace()

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete, fail or resend the request that was sent on this connection."""
        self._parser = None
        if self._shutdown_timer is not None:
            self._shutdown_timer.cancel()
        pending, is_reused = self.pending, self._connect_result is None
        if pending is not None and is_reused and not (self._received_bytes or pending.is_resent):
            # The target closed the connection while it was idle, which this side noticed only when
            # it sent a request (RFC 9112, 9.3.1). The target has most likely not read the request;
            # if it has, it recognises the idempotency key, which every request has (RFC 9110,
            # 9.2.2). A request is resent only once.
            self.pending = pending.connection = None
            pending.is_resent = True
            self._pool.resend(pending)
        # After `resend`, because an empty pool is dropped. Before the request calls back, which may
        # start another one: at the limit, that would close an idle connection of another pool.
        self._pool.remove(self)
        if self.pending is not None:
            self._end_request(exc)

    def _end_request(self, exc: Exception | None) -> None:
        if not self._received_bytes and isinstance(exc, ssl.SSLError):
            # With TLS 1.3, the target checks a client certificate after the handshake of this side.
            self._fail_request(Fault.TLS, describe_tls_error(exc))
        elif not self._received_bytes:
            self._fail_request(Fault.RESET, CLOSED_WITHOUT_RESPONSE)
        elif self._has_headers and not self._is_framed() and exc is None:
            # The close marks the end of the body.
            self._complete_request(self._clock(), can_keep_alive=False)
        else:
            part = "body" if self._has_headers else "headers"
            self._fail_request(Fault.RESET, f"The connection was closed within the {part}")

    def _is_framed(self) -> bool:
        """Return whether the headers, not the close of the connection, mark the end of the body."""
        return self._status in _STATUSES_WITHOUT_BODY or any(
            name in _FRAMING_HEADERS for name, _ in self._headers
        )

    # --- callbacks of the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a response, which may follow an interim one (1xx)."""
        if self._is_complete:
            raise ValueError("it is followed by a second response")
        if self._headers:
            self._headers = []  # drop the headers of the interim response

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers are ignored."""
        if not self._has_headers:
            header = name.decode("latin-1").lower(), value.strip().decode("latin-1")
            self._headers.append(header)

    def on_headers_complete(self) -> None:
        """Check the headers, and prepare for the body of a final response."""
        parser, pending = self._parser, self.pending
        assert parser is not None  # noqa: S101 - the parser calls this method
        assert pending is not None  # noqa: S101 - data without a request is not parsed
        self._status = status = parser.get_status_code()
        version = parser.get_http_version()
        if version not in _HTTP_VERSIONS or status < _FIRST_STATUS:
            raise ValueError(f"its version is {version}, and its status {status}")
        if status < _FIRST_FINAL_STATUS:
            return
        self._has_headers = True
        self._excerpt = b""
        self._body_bytes = 0
        self._is_chunked = False
        for name, value in self._headers:
            if name == "transfer-encoding":
                self._is_chunked = True
                if value.lower() != "chunked":
                    raise ValueError("its Transfer-Encoding is not chunked")
        if pending.request.method == "HEAD":
            # A response to HEAD has no body, but the parser would wait for one.
            self._is_complete = True

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, up to the size of the excerpt."""
        pending, excerpt = self.pending, self._excerpt
        assert pending is not None  # noqa: S101 - data without a request is not parsed
        if self._is_complete:  # a response to HEAD, which has no body
            return
        self._last_body_part = body
        self._body_bytes += len(body)
        if len(body) < _SMALL_PART_BYTES:
            self._received_bytes += _SMALL_PART_CHARGE
        remaining = min(pending.request.max_excerpt, self._pool.max_response_bytes) - len(excerpt)
        if remaining > 0:
            self._excerpt = excerpt + body[:remaining]

    def on_message_complete(self) -> None:
        """Record that a final response is complete."""
        parser = self._parser
        assert parser is not None  # noqa: S101 - the parser calls this method
        if self._has_headers and not self._is_complete:
            self._is_complete = True
            # HTTP/1.0 has no Transfer-Encoding, so the framing is not certain (RFC 9112, 6.1).
            is_certain = not self._is_chunked or parser.get_http_version() == "1.1"
            self._can_keep_alive = is_certain and parser.should_keep_alive()

    # --- completing the request -------------------------------------------------------------------

    def _complete_request(self, now: float, *, can_keep_alive: bool) -> None:
        """Complete the request with the response, and release or close the connection."""
        headers, status = self._headers, self._status
        if len(headers) > MAX_RESPONSE_HEADERS or (
            self._received_bytes > MAX_RESPONSE_HEADER_BYTES
            and sum(len(name) + len(value) + 4 for name, value in headers)
            > MAX_RESPONSE_HEADER_BYTES
        ):
            self._fail_request(Fault.PROTOCOL, "The response has too many or too long headers")
            return
        if status == _PROXY_AUTHENTICATION_REQUIRED and self._pool.url_prefix:
            # Only this lane waits, because the target can send this status through the proxy, too.
            message = f"The egress proxy refused the request: status {status}"
            self._fail_request(Fault.INTERNAL, message, pause_s=_PROXY_PAUSE_S)
            return
        pending, raw_transport, excerpt = self.pending, self._raw_transport, self._excerpt
        assert pending is not None  # noqa: S101 - the response belongs to it
        assert raw_transport is not None  # noqa: S101 - the response came from it
        result = DeliveryResult(
            status=status,
            headers=headers,
            excerpt=excerpt,
            truncated=self._body_bytes > len(excerpt),
            remote=self._remote,
            first_byte_ms=(self._first_byte_at - self._sent_at) * 1000,
        )
        if (phases := self._connect_result) is not None:
            self._add_connect_phases(phases, result)
        self.pending = pending.connection = None
        request = pending.request
        if (
            can_keep_alive
            # While the request is still being written, the next one cannot be sent.
            and not raw_transport.get_write_buffer_size()
            # A server that has not read a body would parse it as the next request.
            and not (request.method in METHODS_WITHOUT_BODY and request.body)
        ):
            self._pool.release(self, now)
        else:
            self.close()
        pending.complete(result, now)

    def _fail_request(self, fault: Fault, message: str, pause_s: float | None = None) -> None:
        pending = self.pending
        assert pending is not None  # noqa: S101 - only a request can fail
        result = self.fault_result(fault, message)
        result.pause_s = pause_s
        self.abort()
        pending.connection = None
        pending.complete(result, self._clock())

    def fault_result(self, fault: Fault, message: str) -> DeliveryResult:
        """Return the result of a request that got no complete, valid response."""
        result = DeliveryResult(fault=fault, error=message, remote=self._remote)
        if (phases := self._connect_result) is not None:
            self._add_connect_phases(phases, result)
        return result

    def _add_connect_phases(self, phases: ConnectResult, result: DeliveryResult) -> None:
        """Add the durations of the connect phases to the first result of the connection."""
        self._connect_result = None
        result.dns_ms, result.connect_ms = phases.dns_ms, phases.connect_ms
        result.tls_ms = phases.tls_ms

    def _describe_parser_error(self, error: Exception) -> str:
        if isinstance(error, httptools.HttpParserUpgrade):
            return f"The status {self._status} is not valid for this request"
        cause = error.__context__ if isinstance(error.__context__, ValueError) else error
        return f"The response is not valid HTTP: {str(cause)[:200]}"
