"""The process around the service: a socket, an event loop, signals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tarry.wire.problem import MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from tarry.service.app import Service

_BACKLOG = 2048
_MOST_HEAD = 65_536
_TOO_LONG = Problem(
    431,
    "Request Header Fields Too Large",
    f"The request line and the headers may have {_MOST_HEAD} bytes together.",
)


class Server:
    """Serves over HTTP until a signal ends it; `patience`: seconds for open connections then."""

    def __init__(self, service: Service, *, patience: float) -> None:
        self._service = service
        settings = service.settings
        self._config = uvicorn.Config(
            service,
            host=settings.host,
            port=settings.port,
            http=_Bounded,
            access_log=False,
            backlog=_BACKLOG,
            lifespan="on",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(patience) + 1,
        )

    def run(self, ready: Callable[[str], None]) -> int:
        """Serve; `ready` is told the address when it is there. Returns the exit code."""
        server = _Announced(self._config, ready)
        server.run()
        return 0 if server.started else 1


class _Announced(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._ready(f"http://{shown}:{port}")


class _Bounded(HttpToolsProtocol):
    """Reads no head, and no trailers, without end: uvicorn would keep them all."""

    _head = 0
    """Bytes that came since the request began, or since the last of them that were its body."""
    _piece = _first = 0
    """Bytes of the last read, and of the one in which the request began: not all may be its own."""
    _is_long = False

    def data_received(self, data: bytes) -> None:
        self._piece = len(data)
        self._head += self._piece
        super().data_received(data)
        if self._head > _MOST_HEAD and not self.transport.is_closing():
            self._is_long = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head, self._first = 0, self._piece
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._first + self._head > _MOST_HEAD:  # a body may have come with it, so look
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            self._is_long = size > _MOST_HEAD
            if self._is_long:
                raise ValueError  # the parser stops, and the request is refused before it is served
        self._head = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong in the words of the API, and hang up."""
        problem = _TOO_LONG if self._is_long else Problem(400, "Bad Request", msg)
        body = problem.to_json()
        head = (
            f"HTTP/1.1 {problem.status} {problem.title}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
