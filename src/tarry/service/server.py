"""The process around the service: a socket, an event loop, signals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tarry.service.api import kinds
from tarry.wire.problem import MEDIA_TYPE

if TYPE_CHECKING:
    from asyncio import BaseTransport, TimerHandle
    from collections.abc import Callable
    from socket import socket

    from tarry.service.app import Service
    from tarry.wire.problem import Problem

_Part: TypeAlias = Literal["first", "head", "body"]
"""What a connection still owes: anything at all, the rest of a head, the rest of a body."""

_BACKLOG = 2048
_KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than balancers keep theirs, usually for 60."""
_MOST_HEAD = 65_536
_TOO_LONG = kinds.HEAD_TOO_LARGE.problem(
    f"The request line and the headers may have {_MOST_HEAD} bytes together."
)
_TOO_LATE = kinds.TIMEOUT.problem("The rest of the request did not arrive in time.")


class Server:
    """Serves over HTTP until a signal ends it; `patience`: seconds for open connections then."""

    def __init__(self, service: Service, *, patience: float) -> None:
        self._service = service
        settings = service.settings
        http: Any = partial(
            _Bounded,
            head_timeout=settings.head_timeout_ms / 1000,
            body_timeout=settings.body_timeout_ms / 1000,
        )
        self._config = uvicorn.Config(
            service,
            host=settings.host,
            port=settings.port,
            http=http,
            access_log=False,
            backlog=_BACKLOG,
            lifespan="on",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(patience) + 1,
            timeout_keep_alive=_KEEP_ALIVE,
        )

    def run(self, ready: Callable[[str], None]) -> int:
        """Serve; `ready` is told the address when it is there. Returns the exit code."""
        server = _Announced(self._config, ready, self._service.leave)
        server.run()
        return 0 if server.started else 1


class _Announced(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, ready: Callable[[str], None], leave: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._leave = leave

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._ready(f"http://{shown}:{port}")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._leave()
        await super().shutdown(sockets)


class _Bounded(HttpToolsProtocol):
    """Reads no head, body or trailers without end, in size or in time: uvicorn would.

    A request that comes in one piece, as most do, needs no timer.
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

    def __init__(self, *args: Any, head_timeout: float, body_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = {"first": head_timeout, "head": head_timeout, "body": body_timeout}

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owes = None
        self._set_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection; a request that is still on its way may take too long."""
        super().shutdown()
        if self._owes is not None and not self.transport.is_closing():
            self._late()

    def data_received(self, data: bytes) -> None:
        self._piece = len(data)
        self._head += self._piece
        super().data_received(data)
        if self._head > _MOST_HEAD and not self.transport.is_closing():
            self._is_long = True
            self.send_400_response("")
        if self._owes != self._timed:
            self._set_timer()

    def on_message_begin(self) -> None:
        self._head, self._first = 0, self._piece
        self._owes = "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._first + self._head > _MOST_HEAD:  # a body may have come with it, so look
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            self._is_long = size > _MOST_HEAD
            if self._is_long:
                raise ValueError  # the parser stops, and the request is refused before it is served
        self._head = 0
        self._owes = "body"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._owes = None
        if self._timed is not None:  # the next request may begin in the same piece
            self._set_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong in the words of the API, and hang up."""
        self._refuse(_TOO_LONG if self._is_long else kinds.NOT_HTTP.problem(msg))

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
