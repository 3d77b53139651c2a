"""One connection, as uvicorn serves it, with bounds, and with less to do for each request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tarry.service.api import problem_types
from tarry.service.http.fast_path import FastPathProtocol
from tarry.wire.problem import MEDIA_TYPE

if TYPE_CHECKING:
    from asyncio import BaseTransport, TimerHandle

    from tarry.wire.problem import Problem

_Part: TypeAlias = Literal["first", "head", "body"]
"""What a connection still owes: anything at all, the rest of a head, the rest of a body."""

_MOST_HEAD = 65_536
_TOO_LONG = problem_types.HEAD_TOO_LARGE.problem(
    f"The request line and the headers may have {_MOST_HEAD} bytes together."
)
_GRACE = 1.0
"""Seconds that a client has at the end to read what is left for it."""
_TOO_LATE = problem_types.TIMEOUT.problem("The rest of the request did not arrive in time.")


class LimitedHttpProtocol(FastPathProtocol):
    """Reads no head, body or trailers without end, in size or in time: uvicorn would.

    A request that comes in one piece, as most do, needs no timer. The one of an idle connection is
    left alone when a request comes, and looked at late.
    """

    _head = 0
    """Bytes that came since the request began, or since the last of them that were its body."""
    _piece = _first = 0
    """Bytes of the last read, and of the one in which the request began: not all may be its own."""
    _is_long = False
    _owes: _Part | None = "first"
    _timed: _Part | None = None
    """What the timer is about."""
    _timer: TimerHandle | None = None
    _idle_since: float | None = None
    _served: Any = None
    """The request whose turn it is, where others wait or waited behind it."""

    def __init__(self, *args: Any, head_timeout: float, body_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = {"first": head_timeout, "head": head_timeout, "body": body_timeout}

    def connection_made(self, transport: BaseTransport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more, and let nobody write on."""
        self._owes = None
        self._set_timer()
        super()._unset_keepalive_if_required()
        if self._served is not None:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection; a request that is still on its way may take too long."""
        super().shutdown()
        if self._owes is not None and not self.transport.is_closing():
            self._late()
        self._cut_off(is_late=False)

    def _cut_off(self, *, is_late: bool) -> None:
        """Do not let a client that does not read its answer hold up the end."""
        if self not in self.connections:
            return
        is_unread = self.transport.get_write_buffer_size() > 0
        if is_unread and is_late:
            self.transport.abort()
        else:
            self.loop.call_later(_GRACE, partial(self._cut_off, is_late=is_unread))

    def data_received(self, data: bytes) -> None:
        """Read on; a head that is too long is refused."""
        self._piece = len(data)
        self._head += self._piece
        super().data_received(data)
        if self._head > _MOST_HEAD and not self.transport.is_closing():
            self._is_long = True
            self.send_400_response("")
        if self._owes != self._timed:
            self._set_timer()

    def on_message_begin(self) -> None:
        """Expect the rest of a head."""
        self._head, self._first = 0, self._piece
        self._owes = "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Let the request be served, and expect the rest of its body."""
        if self._first + self._head > _MOST_HEAD:  # a body may have come with it, so look
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            self._is_long = size > _MOST_HEAD
            if self._is_long:
                raise ValueError  # the parser stops, and the request is refused before it is served
        self._head = 0
        self._owes = "body"
        before = self.cycle
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self._served = before

    def on_body(self, body: bytes) -> None:
        """Pass on a part of a body."""
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect nothing more."""
        self._owes = None
        if self._timed is not None:  # the next request may begin in the same piece
            self._set_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Serve the request that waits, or be idle."""
        if self.pipeline or self.transport.is_closing():
            self._served = self.pipeline[-1][0] if self.pipeline else None
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_after(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has been idle for as long as it may."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._look_after(left)
        else:
            super().timeout_keep_alive_handler()

    def _look_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong in the words of the API, and hang up."""
        self._refuse(_TOO_LONG if self._is_long else problem_types.NOT_HTTP.problem(msg))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timed = owes = self._owes
        self._timer = (
            None if owes is None else self.loop.call_later(self._seconds[owes], self._late)
        )

    def _late(self) -> None:
        """Give up on a request that does not arrive, unless it is we who do not read it."""
        owes, cycle = self._owes, self.cycle  # an older one, or None, while a head comes
        is_answering = bool(cycle) and not cycle.response_complete
        if self.pipeline or self.flow.read_paused or (is_answering and owes == "head"):
            self._set_timer()
        elif owes == "first" or (owes == "body" and cycle.response_started):
            self.transport.close()
        else:
            self._refuse(_TOO_LATE)
            if is_answering:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self, problem: Problem) -> None:
        body = problem.to_json()
        head = (
            f"HTTP/1.1 {problem.status} {problem.title}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
