"""The uvicorn protocol of the service: limits for each request, and a fast path for new tasks.

**Limits.** uvicorn limits neither the size of headers nor the time in which a request must arrive.
This protocol limits both. It also limits the number of clients, and disconnects clients that do not
read their responses.

**Fast path.** For each request uvicorn creates an asyncio task, which receives the body and sends
the response as ASGI messages. If the headers and the body of a `POST /retry-tasks` arrive in one
read, neither the asyncio task nor the messages are needed: the protocol calls the API with headers
and body, and the API calls back with the response once the new task is stored. Without the time of
the API, a request takes about 9 us instead of 30 us.

If the head of such a request equals the head of an earlier request on the connection, except for
the value of `Content-Length`, the head is not even parsed, see `RequestHead`.

uvicorn handles all other requests: other methods and paths, HTTP/1.0, `Connection: close`,
`Expect: 100-continue`, a body that arrives later, a pipelined request whose predecessor has no
response yet, and a request of a client that does not read its responses.

**Upgrades.** A request to switch to another protocol (WebSocket, or HTTP/2 as `h2c`) is handled as
a request without its `Upgrade` header, as RFC 9110, 7.8 allows.

`ServiceHttpProtocol` overrides parts of uvicorn that are not a public API.
`tests/service/http/test_protocol_internals.py` lists these parts and fails when one changes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
)
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tarry.service.api import problems
from tarry.service.api.messages import HEADER_FIELDS, IS_ABANDONED, encode_header_lines
from tarry.service.http.client_limit import admit
from tarry.service.http.request_head import RequestHead
from tarry.wire.http import PROBLEM_MEDIA_TYPE

if TYPE_CHECKING:
    from asyncio import BaseTransport, TimerHandle
    from collections.abc import Iterator, Mapping

    from tarry.service.api.messages import ApiResponse, BufferedRequestHandler
    from tarry.service.http.client_limit import ClientConnection
    from tarry.wire.http import Problem

_Awaited: TypeAlias = Literal["first", "headers", "body"]
"""What the client has to send next: its first request, the rest of the headers, or of the body."""

_logger = logging.getLogger("tarry.service")
_MAX_HEADER_BYTES = 65_536
_MAX_HEADERS = 256
_HEADERS_TOO_LARGE = problems.HEADERS_TOO_LARGE.problem(
    f"The request line and the headers may have at most {_MAX_HEADER_BYTES} bytes together. There "
    f"may be at most {_MAX_HEADERS} headers."
)
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]*)(?::[0-9]*)?[ \t]*")
_ABSOLUTE_URL = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)
_HTTP_VERSIONS = frozenset({"1.0", "1.1"})
_INVALID_HOST = problems.NOT_HTTP.problem(
    "The request must have exactly one Host header: a host, and optionally a port."
)
_INVALID_URL = problems.NOT_HTTP.problem("The URL in the request line is invalid.")
_NO_TUNNELS = problems.NOT_HTTP.problem("The method CONNECT is not supported.")
_INVALID_CODING = problems.NOT_HTTP.problem(
    "The last coding in Transfer-Encoding must be chunked, and HTTP/1.0 has no Transfer-Encoding."
)
_UNKNOWN_CODING = problems.NOT_HTTP.problem("Only the coding chunked is supported.", 501)
_UNKNOWN_VERSION = problems.NOT_HTTP.problem("Only HTTP/1.1 and HTTP/1.0 are supported.", 505)
_TOO_MANY_CLIENTS = problems.UNAVAILABLE.problem(
    "All connections that the service has file descriptors for are in use. Send the request again."
)
_TIMED_OUT = problems.TIMEOUT.problem("The rest of the request did not arrive in time.")
_HEALTH_CHECK_PATHS = frozenset({b"/healthz", b"/readyz"})
_UNSENT_RESPONSE_GRACE_S = 1.0
"""At shutdown, a connection is aborted if part of its response is not sent for this long."""
_STALL_TIMEOUT_S = 30.0
_MIN_READ_BYTES = 16_384
"""A client that does not read this much of its responses in `_STALL_TIMEOUT_S` is disconnected.
Otherwise its responses could occupy memory without a time limit."""
_MIN_PROGRESS_BYTES = 16_384
"""A client that sends or reads this much is not stalled. Single bytes do not keep a connection."""
_MAX_PARSED_BYTES, _MAX_PARSED_BODY_BYTES = 4_096, 16_384
"""How many received bytes are parsed at a time: in general, and within a body. The rest stays
unparsed while pipelined requests wait for their responses: a request of only 36 bytes takes 5 kB of
memory once it is parsed."""
_MAX_UNUSED_BODY_BYTES = 16 * 1_048_576
"""How many bytes of a body may arrive that no application reads: chunk headers, and the rest of a
body after the response. As much as the largest body that any path accepts, so that a client that
reads its response only after it has sent such a body gets the response."""
_SMALL_CHUNK_BYTES = 1024
"""Each smaller chunk counts as this many unused bytes. A chunk takes 1 us even if it has one byte:
with four clients that sent such chunks, /healthz took 8 s."""
_MAX_HEAD_CAPTURES = 4
"""Number of requests of a connection for which a `RequestHead` is created. It is limited because
some clients send a different head each time, for example with `traceparent`."""
_TOO_MANY_UNUSED_BYTES = problems.TOO_LARGE.problem(
    "The chunks of the body are too small, or their extensions are too long. Send larger chunks."
)
_INVALID_TRAILER = problems.NOT_HTTP.problem("Connection: close is not allowed in a trailer.")
_CONNECTION_FIELDS = frozenset({b"connection", b"proxy-connection"})


class _InvalidTrailer(ValueError):
    """A trailer that would make the parser ignore the next request."""


class _IgnoredTrailers:
    """A list of headers that stays empty.

    The parser reports trailers in the same way as headers, and a trailer must not become a header:
    authentication would accept an API key in a trailer.
    """

    def append(self, trailer: tuple[bytes, bytes]) -> None:
        """Ignore a trailer, except `Connection: close`, which is not allowed (RFC 9110, 6.5.1)."""
        name, value = trailer
        if name in _CONNECTION_FIELDS and b"close" in value.lower():
            raise _InvalidTrailer

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())


_IGNORED_TRAILERS: Any = _IgnoredTrailers()


class _FastPathCycle:
    """The state of a request on the fast path, instead of uvicorn's `RequestResponseCycle`."""

    more_body = True
    keep_alive = True
    disconnected = False
    response_started = False
    response_complete = False
    message_event = asyncio.Event()  # uvicorn sets it; nothing waits for it

    def __init__(
        self, path: bytes, headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]
    ) -> None:
        self.path = path
        self.headers = headers
        self.fields = fields
        self.body_parts: list[bytes] = []  # joined once: a body may have thousands of chunks


class ServiceHttpProtocol(HttpToolsProtocol):
    """A connection with limits for the size of headers and trailers, and for the time to send them.

    A complete `POST` request is passed to the handler in `fast_routes` for its path. To save time,
    no timer is set for a request that arrives in one read, as most do, and a request does not
    cancel the keep-alive timer: the handler of that timer checks how long the connection was idle.
    With TLS, the connection replaces `handshake` among the clients of the server.
    """

    cycle: Any
    parser: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    expect_100_continue: bool
    _candidate: _FastPathCycle | None = None
    """A request that takes the fast path if its body is complete after the current read."""
    _header_bytes_after_first_read = 0
    """Bytes of headers (or trailers) that arrived after the read in which they began. An upper
    bound: body bytes of the same read are included until the parser reports them."""
    _read_bytes = 0
    """Size of the part of a read that is being parsed."""
    _first_read_bytes = 0
    """Size of the part in which the request began; may include bytes of the previous request."""
    _unused_body_bytes = 0
    """Bytes of the current body that no application reads. Of the read in which the body began,
    only the part after the headers is counted."""
    _unparsed = b""
    """Received bytes that are parsed when the pipelined requests before them have responses."""
    _problem: Problem | None = None
    """Why a callback stopped the parser."""
    _rejection: Problem | None = None
    """The response to an invalid request. It is sent after the responses to earlier requests, and
    the connection is then closed. Bytes received after an invalid request are ignored."""
    _awaited: _Awaited | None = "first"
    _timer_for: _Awaited | None = None
    """The value of `_awaited` for which the running timer was set."""
    _timer: TimerHandle | None = None
    _stall_timer: TimerHandle | None = None
    """Runs while writing is paused, and after the connection was closed with unsent bytes."""
    _awaited_since = _writing_paused_since = 0.0
    """Event loop times when the running timer was set, and when writing was paused, or of the last
    progress since then: `_MIN_PROGRESS_BYTES` of the body or the response."""
    _progress_bytes = 0
    """Received bytes of the body since `_awaited_since`."""
    _paused_bytes = 0
    """Size of the write buffer at `_writing_paused_since`."""
    _last_head: RequestHead | None = None
    """The head of an earlier request on the fast path."""
    _head_captures_left = _MAX_HEAD_CAPTURES
    _last_host: bytes | None = None
    """The last valid `Host` header. Most clients always send the same one."""
    _default_headers: list[tuple[bytes, bytes]] | None = None
    """The default headers that `_default_lines` encodes."""
    _default_lines = b""
    idle_since: float = 0.0  # the time of the last response, or when the connection was opened
    _is_input_ended = False
    """Whether the client has closed the connection, or its sending half."""
    is_for_health_checks: bool = False  # whether it was accepted above the limit of clients
    _served_cycle: Any = None
    """None until the client pipelines requests. Then the cycle (uvicorn's state of a request) of
    the request that is being served, while `cycle` belongs to the newest request."""

    def __init__(
        self,
        *args: Any,
        headers_timeout_s: float,
        body_timeout_s: float,
        fast_routes: Mapping[bytes, BufferedRequestHandler],
        max_clients: int,
        handshake: ClientConnection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._handshake = handshake
        self._fast_routes = fast_routes
        self._max_clients = max_clients
        self._timeouts_s = {
            "first": headers_timeout_s,
            "headers": headers_timeout_s,
            "body": body_timeout_s,
        }

    def connection_made(self, transport: BaseTransport) -> None:
        """Start the timer for the first request, and apply the limit of clients."""
        super().connection_made(transport)  # type: ignore[arg-type]  # it is an asyncio.Transport
        self.idle_since = self.loop.time()
        clients: set[Any] = self.connections
        clients.discard(self._handshake)
        self._handshake = None
        if not admit(self, clients, self._max_clients, self.idle_since):
            self.transport.abort()
        self._update_timer()

    @property
    def is_idle(self) -> bool:
        """Whether the headers of no request are complete, or all requests have a response."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def stalled_since(self) -> float | None:
        """Since when the client neither reads its response nor sends the rest of a body.

        Only a progress of `_MIN_PROGRESS_BYTES` counts.
        """
        if self.flow.write_paused:
            # A transport does not report what it has sent, so the size is compared with the last.
            size = self.transport.get_write_buffer_size()
            if self._paused_bytes - size >= _MIN_PROGRESS_BYTES:
                self._paused_bytes, self._writing_paused_since = size, self.loop.time()
            return self._writing_paused_since
        is_delayed = self.pipeline or self.flow.read_paused
        return self._awaited_since if self._timer_for == "body" and not is_delayed else None

    def abort(self) -> None:
        """Close the connection at once. `close` would wait for a client that does not read."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and report the disconnect to the request that is being served."""
        self._is_input_ended = True
        self._awaited = None
        self._update_timer()
        self._unset_keepalive_if_required()
        self._cancel_stall_timer()
        if self._served_cycle is not None:
            self._served_cycle.disconnected = True
            self._served_cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn declares None
        """Return whether to send the responses to complete requests before the connection closes.

        A client may close its sending half after a request (RFC 9112, 9.6). Most clients that do so
        have closed the connection, so no request waits for a result any longer, and a response that
        has begun, such as an event stream, is not continued.
        """
        self._is_input_ended = True
        cycle = self._served_cycle or self.cycle
        return self._awaited is None and cycle is not None and not cycle.response_started

    def is_abandoned(self) -> bool:
        """Return whether the client may have disconnected: its requests need not wait any more."""
        return self._is_input_ended

    def shutdown(self) -> None:
        """Close the connection once no request is running. Reject an incomplete request."""
        super().shutdown()
        if self._awaited is not None and not self.transport.is_closing():
            self._reject_incomplete()
        self._abort_if_unsent(was_unsent=False)

    def _abort_if_unsent(self, *, was_unsent: bool) -> None:
        """Abort the connection if a response is still unsent since the last check."""
        if self not in self.connections:
            return
        is_unsent = self.transport.get_write_buffer_size() > 0
        if is_unsent and was_unsent:
            self.transport.abort()
        else:
            check = partial(self._abort_if_unsent, was_unsent=is_unsent)
            self.loop.call_later(_UNSENT_RESPONSE_GRACE_S, check)

    def pause_writing(self) -> None:
        """Start the stall timer. Called when the write buffer is full."""
        super().pause_writing()
        self._writing_paused_since = self.loop.time()
        self._paused_bytes = self.transport.get_write_buffer_size()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Cancel the stall timer. Called when most of the write buffer is sent."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_stall_timer()

    def _start_stall_timer(self) -> None:
        self._cancel_stall_timer()
        check = partial(self._abort_if_stalled, self.transport.get_write_buffer_size())
        self._stall_timer = self.loop.call_later(_STALL_TIMEOUT_S, check)

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _abort_if_stalled(self, previous_bytes: int) -> None:
        """Abort the connection if the client has read too little since the last check."""
        if previous_bytes - self.transport.get_write_buffer_size() < _MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._start_stall_timer()

    def _close(self) -> None:
        """Close the connection after its responses are sent, or after the stall timeout."""
        self.transport.close()
        self._limit_closing_time()

    def _limit_closing_time(self) -> None:
        """Start the stall timer if the connection was closed with unsent bytes."""
        if self._stall_timer is None and self.transport.get_write_buffer_size() > 0:
            self._start_stall_timer()

    def data_received(self, data: bytes) -> None:
        """Parse the data, serve a request on the fast path if it is complete, apply the limits."""
        if self._rejection is not None:
            return
        if self._unparsed:
            self._unparsed += data
            return
        if self._last_head is None or not self._serve_repeated(self._last_head, data):
            self._parse_and_serve(data)

    def _serve_repeated(self, head: RequestHead, data: bytes) -> bool:
        """Serve a request with this head; return False if the data is not such a request."""
        # The conditions of the fast path that do not depend on the head. If `_awaited` is None, the
        # data begins a new request.
        cycle = self.cycle
        if (
            self._awaited is not None
            or cycle is None
            or not cycle.response_complete
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return False
        parsed = head.parse(data)
        if parsed is None:
            return False
        fields, body = parsed
        self.cycle = cycle = _FastPathCycle(head.path, list(fields.items()), fields)
        cycle.more_body = False
        self._serve(cycle, body)
        return True

    def _parse_and_serve(self, data: bytes) -> None:
        """Parse the data, and serve a complete request that takes the fast path."""
        problem = None
        begins_here = self._awaited in {None, "first"}  # not the rest of a request
        try:
            # Most requests arrive in one short read, which is parsed at once.
            if self._awaited != "body" and len(data) <= _MAX_PARSED_BYTES:
                self._parse_part(data)
            else:
                self._parse_in_parts(data)
        except HttpParserCallbackError as error:
            is_trailer = isinstance(error.__context__, _InvalidTrailer)
            problem = self._problem or (_INVALID_TRAILER if is_trailer else _INVALID_URL)
        except HttpParserError as error:
            problem = problems.NOT_HTTP.problem(f"{error}.")
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            body, candidate.body_parts = b"".join(candidate.body_parts), []  # frees the body
            if not candidate.more_body:
                if self._head_captures_left and begins_here and not self.is_for_health_checks:
                    self._capture_head(data, candidate, body)
                self._serve(candidate, body)
            elif problem is None:  # the rest of the body has not arrived yet
                self.cycle = None
                self._continue_with_uvicorn(
                    candidate.path, candidate.headers, expects_continue=False
                )
                if body:
                    super().on_body(body)
        self._apply_limits(data, problem)

    def _capture_head(self, data: bytes, cycle: _FastPathCycle, body: bytes) -> None:
        self._head_captures_left -= 1
        head = RequestHead.from_request(data, body, cycle.path, cycle.headers, cycle.fields)
        self._last_head = head or self._last_head

    def _apply_limits(self, data: bytes, problem: Problem | None) -> None:
        """Reject a request that is too large or has a `problem`, and update the timer."""
        if self._header_bytes_after_first_read > _MAX_HEADER_BYTES or (
            self._awaited == "headers" and self._are_headers_too_large()
        ):
            problem = problem or _HEADERS_TOO_LARGE
        if self._has_too_many_unused_bytes:
            problem = problem or _TOO_MANY_UNUSED_BYTES
        if problem is not None:
            self._reject(problem)
        if self._awaited != self._timer_for:
            self._update_timer()
        elif self._awaited == "body":
            self._progress_bytes += len(data)
            if self._progress_bytes >= _MIN_PROGRESS_BYTES:
                self._progress_bytes, self._awaited_since = 0, self.loop.time()

    @property
    def _has_too_many_unused_bytes(self) -> bool:
        return self._awaited == "body" and self._unused_body_bytes > _MAX_UNUSED_BODY_BYTES

    def _parse_in_parts(self, data: bytes) -> None:
        """Parse data; stop early if pipelined requests wait for their responses."""
        start = 0
        while True:
            is_body = self._awaited == "body"
            max_bytes = _MAX_PARSED_BODY_BYTES if is_body else _MAX_PARSED_BYTES
            part = data[start : start + max_bytes]  # not a copy if the data is short
            if is_body:  # `on_body` subtracts the bytes that the application reads
                self._unused_body_bytes += len(part)
            self._parse_part(part)
            start += max_bytes
            if start >= len(data) or self._has_too_many_unused_bytes:
                return
            if self.pipeline:
                self.flow.pause_reading()
                self._unparsed = data[start:]
                return

    def _parse_unparsed(self) -> None:
        """Parse more of the received bytes; read again when all are parsed."""
        if self.pipeline or not self._unparsed:  # this call was scheduled twice
            return
        data, self._unparsed = self._unparsed, b""
        if not self.transport.is_closing():
            self.data_received(data)
        if not (self._unparsed or self.pipeline or self.transport.is_closing()):
            self._wait_for_request()

    def _parse_part(self, data: bytes) -> None:
        self._read_bytes = size = len(data)
        self._header_bytes_after_first_read += size
        unparsed: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(unparsed)
            except HttpParserUpgrade as stop:
                unparsed = memoryview(unparsed)[stop.args[0] :]
                self._parse_headers_without_upgrade()
            else:
                return

    def _parse_headers_without_upgrade(self) -> None:
        """Parse the current headers again without `Upgrade`, so that the body is parsed, too.

        httptools has no option to ignore an upgrade: it stops after the headers.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"\r\n".join((*lines, b"", b"")))

    def on_message_begin(self) -> None:
        """Start a request. The scope is built later: the fast path does not need it."""
        self._header_bytes_after_first_read, self._first_read_bytes = 0, self._read_bytes
        self._awaited = "headers"
        self.url, self.headers = b"", []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or check a trailer."""
        # uvicorn compares each name with `Expect`; `on_headers_complete` looks it up once instead.
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Choose between the fast path and uvicorn, and wait for the body."""
        # The headers are not larger than the reads in which they arrived, which are usually small.
        read_bytes = self._first_read_bytes + self._header_bytes_after_first_read
        is_small = read_bytes <= _MAX_HEADER_BYTES and len(self.headers) <= _MAX_HEADERS
        if not is_small and self._are_headers_too_large():
            self._stop_parser(_HEADERS_TOO_LARGE)
        parser: Any = self.parser
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                self._stop_parser(_NO_TUNNELS)
            return  # `_parse_part` parses the headers again
        version = parser.get_http_version()
        fields = dict(self.headers)
        self._check_headers(version, fields)
        if (
            self.is_for_health_checks
            and len(self.connections) > self._max_clients
            and self.url not in _HEALTH_CHECK_PATHS
        ):
            self._stop_parser(_TOO_MANY_CLIENTS)
        self._header_bytes_after_first_read = self._unused_body_bytes = 0
        cycle = self.cycle
        if (
            self.url in self._fast_routes
            and (cycle is None or cycle.response_complete)
            and parser.get_method() == b"POST"
            and version == "1.1"
            and parser.should_keep_alive()
            and b"expect" not in fields
            and not self.flow.write_paused
        ):
            self.cycle = self._candidate = _FastPathCycle(self.url, self.headers, fields)
            self.headers = _IGNORED_TRAILERS
        else:  # raises an error if the URL is invalid
            expects_continue = b"expect" in fields and any(
                name == b"expect" and value.lower() == b"100-continue"
                for name, value in self.headers
            )
            self._continue_with_uvicorn(self.url, self.headers, expects_continue=expects_continue)
        self._awaited = "body"
        if len(self.pipeline) == 1:
            self._served_cycle = cycle

    def _are_headers_too_large(self) -> bool:
        """Return whether the headers so far exceed a limit."""
        if len(self.headers) > _MAX_HEADERS:
            return True
        # The sum may include body bytes of the same read. If it is too large, measure exactly.
        if self._first_read_bytes + self._header_bytes_after_first_read <= _MAX_HEADER_BYTES:
            return False
        separators = len(self.headers) * len(b": \r\n")
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        return size + separators > _MAX_HEADER_BYTES

    def _check_headers(self, version: str, fields: dict[bytes, bytes]) -> None:
        """Stop the parser if another server could parse the request differently.

        Otherwise a proxy could forward as one request what the service parses as two (request
        smuggling, RFC 9112, 11.2). `fields` are the headers, each with its last value.
        """
        if version not in _HTTP_VERSIONS:
            self._stop_parser(_UNKNOWN_VERSION)
        host = fields.get(b"host")
        if host is None:
            if version == "1.1":
                self._stop_parser(_INVALID_HOST)
        elif host != self._last_host:
            if not _HOST.fullmatch(host):
                self._stop_parser(_INVALID_HOST)
            self._last_host = host
        if (
            len(fields) < len(self.headers)
            and [name for name, _ in self.headers].count(b"host") > 1
        ):
            self._stop_parser(_INVALID_HOST)
        if self.url[:1] != b"/" and self.url != b"*":
            fields[b"host"] = self._use_host_of_url()
        if b"transfer-encoding" in fields:
            values = [value for name, value in self.headers if name == b"transfer-encoding"]
            codings = b",".join(values).lower().split(b",")
            if version == "1.0" or codings[-1].strip() != b"chunked":
                self._stop_parser(_INVALID_CODING)
            if len(codings) > 1:
                self._stop_parser(_UNKNOWN_CODING)

    def _use_host_of_url(self) -> bytes:
        """Replace the Host header by the host of the URL (RFC 9112, 3.2.2), and return it."""
        match = _ABSOLUTE_URL.match(self.url)
        if match is None or not _HOST.fullmatch(match[1]):
            self._stop_parser(_INVALID_URL)
        self.headers = [header for header in self.headers if header[0] != b"host"]
        self.headers.append((b"host", match[1]))
        return match[1]

    def _stop_parser(self, problem: Problem) -> NoReturn:
        """Reject the current request. Called by callbacks of the parser."""
        self._problem = problem
        raise ValueError  # the parser then raises HttpParserCallbackError

    def on_body(self, body: bytes) -> None:
        """Collect or pass on a part of a body."""
        self._header_bytes_after_first_read = 0
        size, candidate = len(body), self._candidate
        if size < _SMALL_CHUNK_BYTES:
            self._unused_body_bytes += _SMALL_CHUNK_BYTES
        if candidate is not None and self.cycle is candidate:
            self._unused_body_bytes -= size
            candidate.body_parts.append(body)
        else:
            if not self.cycle.response_complete:
                self._unused_body_bytes -= size
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the wait for the body."""
        if self._awaited == "headers":  # an upgrade, for which the parser skips the body
            return
        self._awaited = None
        if self._timer_for is not None:
            # Cancel the timer now: the next request may begin in the same read and inherit it.
            self._update_timer()
        candidate = self._candidate
        if candidate is not None and self.cycle is candidate:
            candidate.more_body = False
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Serve the next pipelined request, or wait for a request with the keep-alive timeout."""
        if self.pipeline or self.transport.is_closing():
            self._served_cycle = self.pipeline[-1][0] if self.pipeline else None
            super().on_response_complete()
            if self.transport.is_closing():
                self._limit_closing_time()
            else:  # uvicorn has resumed reading, but the pipeline has to be served first
                self.flow.pause_reading()
                if self._unparsed and not self.pipeline and self._awaited == "body":
                    # The rest of the body of the request that is served now.
                    self.loop.call_soon(self._parse_unparsed)
            return
        self._served_cycle = None
        self.server_state.total_requests += 1
        if self._rejection is not None:
            self._send_rejection(self._rejection)
            return
        if self._unparsed:
            self.loop.call_soon(self._parse_unparsed)
        else:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        if self._is_input_ended and self.is_idle:
            self._close()
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        self.idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._check_idle_after(self.timeout_keep_alive)

    def _continue_with_uvicorn(
        self, url: bytes, headers: list[tuple[bytes, bytes]], *, expects_continue: bool
    ) -> None:
        """Pass a request whose headers are complete to uvicorn."""
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, _IGNORED_TRAILERS, expects_continue
        self.scope["headers"] = headers
        # A key of the API, which uvicorn's type of the scope does not have.
        self.scope[IS_ABANDONED] = self.is_abandoned  # type: ignore[literal-required]
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(_send_without_chunks, self.cycle, self.cycle.send)

    def _serve(self, cycle: _FastPathCycle, body: bytes) -> None:
        scope = {
            "method": "POST",
            "path": cycle.path.decode(),
            "headers": cycle.headers,
            HEADER_FIELDS: cycle.fields,
            IS_ABANDONED: self.is_abandoned,
        }
        task = self._fast_routes[cycle.path](scope, body, partial(self._respond, cycle))
        if task is not None:  # the server waits for it at shutdown
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _respond(self, cycle: _FastPathCycle, response: ApiResponse) -> None:
        if self.transport.is_closing():
            return
        cycle.response_started = cycle.response_complete = True
        default_headers = self.server_state.default_headers
        if default_headers is not self._default_headers:  # uvicorn replaces them every second
            self._default_headers = default_headers
            self._default_lines = encode_header_lines(default_headers)
        try:
            lines = self._default_lines
            if not cycle.keep_alive:
                lines += b"connection: close\r\n"
            self.transport.write(STATUS_LINE[response.status] + response.encode_http1(lines))
        except ValueError:
            _logger.exception("response not sent: invalid header, path=%s", cycle.path)
            cycle.keep_alive = False
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for too long, else check again later."""
        self.timeout_keep_alive_task = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # `on_response_complete` sets the timer again
        seconds_left = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if self._awaited is not None:  # a request is arriving, for which there is another timer
            seconds_left = self.timeout_keep_alive
        if seconds_left > 0:
            self._check_idle_after(seconds_left)
        elif not self.transport.is_closing():
            self._close()

    def _check_idle_after(self, seconds: float) -> None:
        check = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(seconds, check)

    def _update_timer(self) -> None:
        """Set the timer for what the client has to send next; cancel it if nothing is awaited."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_for = awaited = self._awaited
        if awaited is not None:
            self._progress_bytes, self._awaited_since = 0, self.loop.time()
            self._timer = self.loop.call_later(self._timeouts_s[awaited], self._reject_incomplete)

    def _reject_incomplete(self) -> None:
        """Reject an incomplete request after a timeout or at shutdown.

        Wait longer if the service itself delays the request. Close the connection without a
        response if the client has not begun a request, or if the response has already begun.
        """
        # While headers arrive, `cycle` belongs to the previous request (None if there is none).
        is_responding = self.cycle is not None and not self.cycle.response_complete
        is_delayed = self.pipeline or self.flow.read_paused
        if is_delayed or (is_responding and self._awaited == "headers"):
            self._update_timer()
        elif self._awaited == "first":
            self.transport.close()
        else:
            self._reject(_TIMED_OUT)

    def _reject(self, problem: Problem) -> None:
        """Reject the newest request, which is invalid or incomplete.

        Earlier requests get their responses first: a client expects responses in order, and would
        mistake the rejection for the response to an earlier request, whose task may be stored.
        """
        if self.transport.is_closing():
            return
        _logger.debug("request rejected, client=%s: %s", self.client, problem.detail)
        if self._awaited == "body":
            rejected = self.cycle
            if rejected.response_started:
                self._close()
                return
            rejected.disconnected = True
            rejected.message_event.set()
            if self.pipeline:  # the newest request is the first, the next one to serve is the last
                self.pipeline.popleft()
                self.cycle = self.pipeline[0][0] if self.pipeline else self._served_cycle
            else:
                self.cycle = None
        self._awaited = None
        self._rejection = problem
        if self.cycle is None or self.cycle.response_complete:
            self._send_rejection(problem)

    def _send_rejection(self, problem: Problem) -> None:
        body = problem.to_json()
        head = (
            f"content-type: {PROBLEM_MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        if problem is _TOO_MANY_CLIENTS:
            head = f"retry-after: 1\r\n{head}"
        self.transport.write(STATUS_LINE[problem.status] + head.encode() + body)
        self._close()


async def _send_without_chunks(cycle: Any, send: Any, message: Any) -> None:
    """Send an ASGI message to a client of HTTP/1.0, which cannot read chunks (RFC 9112, 6.1).

    If the response has no Content-Length, it ends when uvicorn closes the connection.
    """
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
