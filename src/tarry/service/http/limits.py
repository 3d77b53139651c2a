"""The uvicorn protocol with limits on the size and the duration of each request.

uvicorn itself has neither limit. The class overrides parts of uvicorn that are not a public API.
`tests/service/http/test_uvicorn_internals.py` lists them and fails when one of them changes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tarry.service.api import problems
from tarry.service.http.fast_path import FastPathProtocol
from tarry.wire.http import PROBLEM_MEDIA_TYPE

if TYPE_CHECKING:
    from asyncio import BaseTransport, TimerHandle

    from tarry.wire.http import Problem


_Awaited: TypeAlias = Literal["first", "headers", "body"]
"""What the client has to send next: its first request, or the rest of headers or of a body."""

_MAX_HEADER_BYTES = 65_536
_HEADERS_TOO_LARGE = problems.HEADERS_TOO_LARGE.problem(
    f"The request line and the headers may have at most {_MAX_HEADER_BYTES} bytes together."
)
_TIMED_OUT = problems.TIMEOUT.problem("The rest of the request did not arrive in time.")
_UNREAD_RESPONSE_GRACE_S = 1.0
"""Time that a client has at shutdown to read its response."""


class LimitedHttpProtocol(FastPathProtocol):
    """A connection that limits the size of headers and trailers, and the time of each request.

    A request that arrives in one read, as most do, sets no timer. The keep-alive timer is not
    cancelled by each request; when it fires, it checks how long the connection has been idle.
    """

    _header_bytes = 0
    """Bytes received since the request began, or since the last part of its body."""
    _read_bytes = _first_read_bytes = 0
    """Bytes of the last read, and of the read in which the request began.

    The latter may include bytes of the previous request.
    """
    _is_too_large = False
    _awaited: _Awaited | None = "first"
    _timer_for: _Awaited | None = None
    """The value of `_awaited` for which the running timer was set."""
    _timer: TimerHandle | None = None
    _idle_since: float | None = None
    _served_cycle: Any = None
    """The request that is being served while others are pipelined behind it."""

    def __init__(
        self, *args: Any, header_timeout_s: float, body_timeout_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._timeouts_s = {
            "first": header_timeout_s,
            "headers": header_timeout_s,
            "body": body_timeout_s,
        }

    def connection_made(self, transport: BaseTransport) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and end the request that is being served."""
        self._awaited = None
        self._set_timer()
        super()._unset_keepalive_if_required()
        if self._served_cycle is not None:
            self._served_cycle.disconnected = True
            self._served_cycle.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection. A request that has not arrived completely is rejected."""
        super().shutdown()
        if self._awaited is not None and not self.transport.is_closing():
            self._on_timeout()
        self._abort_if_unread(is_second_check=False)

    def _abort_if_unread(self, *, is_second_check: bool) -> None:
        """Abort a connection whose client does not read its response, which delays the shutdown."""
        if self not in self.connections:
            return
        is_unread = self.transport.get_write_buffer_size() > 0
        if is_unread and is_second_check:
            self.transport.abort()
        else:
            check = partial(self._abort_if_unread, is_second_check=is_unread)
            self.loop.call_later(_UNREAD_RESPONSE_GRACE_S, check)

    def data_received(self, data: bytes) -> None:
        """Parse the data; reject headers or trailers that are too large."""
        self._read_bytes = len(data)
        self._header_bytes += self._read_bytes
        super().data_received(data)
        if self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            self._is_too_large = True
            self.send_400_response("")
        if self._awaited != self._timer_for:
            self._set_timer()

    def on_message_begin(self) -> None:
        """Start a request: wait for its headers."""
        self._header_bytes, self._first_read_bytes = 0, self._read_bytes
        self._awaited = "headers"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start to serve the request, and wait for its body."""
        # The count may include a large body that arrived in the same read, so count exactly.
        if self._first_read_bytes + self._header_bytes > _MAX_HEADER_BYTES:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            self._is_too_large = size > _MAX_HEADER_BYTES
            if self._is_too_large:
                raise ValueError  # stops the parser, which calls send_400_response
        self._header_bytes = 0
        self._awaited = "body"
        previous_cycle = self.cycle
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self._served_cycle = previous_cycle

    def on_body(self, body: bytes) -> None:
        """Pass on a part of a body."""
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the wait for the body."""
        self._awaited = None
        if self._timer_for is not None:  # the next request may begin in the same read
            self._set_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Serve the next pipelined request, or become idle."""
        if self.pipeline or self.transport.is_closing():
            self._served_cycle = self.pipeline[-1][0] if self.pipeline else None
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._check_idle_after(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        # uvicorn cancels the keep-alive timer here and sets a new one after each response. Both
        # cost time on the hot path, so the timer stays and only this flag changes.
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for too long, else check again later."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        seconds_left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if seconds_left > 0:
            self._check_idle_after(seconds_left)
        else:
            super().timeout_keep_alive_handler()

    def _check_idle_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def send_400_response(self, msg: str) -> None:
        """Send a problem for bytes that are not a valid request, and close the connection."""
        self._reject(_HEADERS_TOO_LARGE if self._is_too_large else problems.NOT_HTTP.problem(msg))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_for = awaited = self._awaited
        self._timer = (
            None
            if awaited is None
            else self.loop.call_later(self._timeouts_s[awaited], self._on_timeout)
        )

    def _on_timeout(self) -> None:
        """Reject a request that has not arrived in time, unless this side has paused reading."""
        # While headers arrive, `cycle` belongs to the previous request, or is None.
        awaited, cycle = self._awaited, self.cycle
        is_responding = bool(cycle) and not cycle.response_complete
        if self.pipeline or self.flow.read_paused or (is_responding and awaited == "headers"):
            self._set_timer()
        elif awaited == "first" or (awaited == "body" and cycle.response_started):
            self.transport.close()
        else:
            self._reject(_TIMED_OUT)
            if is_responding:
                cycle.disconnected = True
                cycle.message_event.set()

    def _reject(self, problem: Problem) -> None:
        body = problem.to_json()
        head = (
            f"HTTP/1.1 {problem.status} {problem.title}\r\ncontent-type: {PROBLEM_MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
