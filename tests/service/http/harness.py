"""A server connection with a fake transport and a fake clock."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from tarry.service.api.messages import ApiResponse, BufferedRequestHandler
from tarry.service.http.protocol import ServiceHttpProtocol

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD = b"POST /hot HTTP/1.1\r\nHost: h\r\nX-A: 1\r\n"
POST = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
KEEP_ALIVE_S = 75
REQUEST_TIMEOUT_S = 10.0
MAX_WRITE_BUFFER_BYTES = 65_536  # as in asyncio; above, writing is paused


class FakeTransport:
    """A transport that records what is written, and whether it was closed or aborted."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write_buffer_size = 0
        self.is_closed = self.is_aborted = False

    def write(self, data: bytes) -> None:
        """Record the data."""
        self.written.append(data)

    def close(self) -> None:
        """Record the close."""
        self.is_closed = True

    def abort(self) -> None:
        """Record the abort."""
        self.is_closed = self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        """Return the size that the test has set."""
        return self.write_buffer_size

    def is_closing(self) -> bool:
        """Return whether it was closed or aborted."""
        return self.is_closed

    def get_extra_info(self, _name: str, default: object = None) -> object:
        """Return the default."""
        return default

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""


class UnreadTransport(FakeTransport):
    """A transport whose client reads nothing, so that writing is soon paused."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_writing: Callable[[], None] = lambda: None
        """Set to the method of the protocol."""
        self.is_settled = asyncio.Event()
        """Whether writing is paused, or the response is complete, because it is a problem."""

    def write(self, data: bytes) -> None:
        """Keep the data in the write buffer, and pause writing if the buffer is full."""
        super().write(data)
        is_full = self.write_buffer_size > MAX_WRITE_BUFFER_BYTES
        self.write_buffer_size += len(data)
        if not is_full and self.write_buffer_size > MAX_WRITE_BUFFER_BYTES:
            self.pause_writing()
            self.is_settled.set()
        if b"problem+json" in data:
            self.is_settled.set()


class FakeTimer:
    """A scheduled callback."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.is_cancelled = at, call, False

    def cancel(self) -> None:
        """Cancel the callback."""
        self.is_cancelled = True


class FakeLoop:
    """The running event loop with fake time and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []
        self.create_task = asyncio.get_running_loop().create_task
        self.call_soon = asyncio.get_running_loop().call_soon

    def time(self) -> float:
        """Return the fake time."""
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> FakeTimer:
        """Schedule a callback."""
        self.timers.append(FakeTimer(self.now + seconds, call))
        return self.timers[-1]

    def sleep(self, seconds: float) -> None:
        """Advance the time and run the timers that are due."""
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            if not timer.is_cancelled:
                timer.call()

    @property
    def pending(self) -> int:
        """The number of timers that are not cancelled."""
        return sum(not timer.is_cancelled for timer in self.timers)


class ConnectionHarness:
    """A connection to an ASGI application."""

    def __init__(
        self,
        app: App,
        fast_routes: dict[bytes, BufferedRequestHandler] | None = None,
        *,
        state: ServerState | None = None,
        loop: FakeLoop | None = None,
        max_clients: int = 1000,
        transport: FakeTransport | None = None,
    ) -> None:
        config = uvicorn.Config(
            cast("Any", app),
            access_log=False,
            interface="asgi3",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        self.transport = transport or FakeTransport()
        self.loop, self.state = loop or FakeLoop(), state or ServerState()
        self.protocol = ServiceHttpProtocol(
            config=config,
            server_state=self.state,
            app_state={},
            _loop=self.loop,
            headers_timeout_s=REQUEST_TIMEOUT_S,
            body_timeout_s=REQUEST_TIMEOUT_S,
            fast_routes=fast_routes or {},
            max_clients=max_clients,
        )
        self.protocol.connection_made(cast("Any", self.transport))

    async def send(self, data: bytes = GET) -> bytes:
        """Send a request, wait for its response and return the written bytes."""
        self.transport.written.clear()
        self.protocol.data_received(data)
        await self.wait_until_served()
        return b"".join(self.transport.written)

    async def wait_until_served(self) -> None:
        """Wait for all running ASGI tasks."""
        while self.state.tasks:
            await asyncio.wait(self.state.tasks)
            await asyncio.sleep(0)


class FastRoute:
    """A connection with a fast route whose responses the test sends."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], bytes]] = []
        self.responders: list[Callable[[ApiResponse], None]] = []
        self.bodies: list[bytes] = []
        """Bodies of requests that uvicorn handled."""
        self.task: asyncio.Task[Any] | None = None
        """The task that the route returns."""
        self.connection = ConnectionHarness(self._app, {b"/hot": self._serve})
        self.connection.state.default_headers = [(b"date", b"today")]

    def receive(self, data: bytes) -> None:
        """Pass data to the connection."""
        self.connection.protocol.data_received(data)

    def respond(self, body: bytes = b"ok") -> None:
        """Respond to the oldest pending request."""
        self.responders.pop(0)(created_response(body))

    @property
    def written(self) -> bytes:
        """All bytes that were written."""
        return b"".join(self.connection.transport.written)

    def _serve(
        self, scope: Any, body: bytes, respond: Callable[[ApiResponse], None]
    ) -> asyncio.Task[Any] | None:
        self.requests.append((dict(scope), body))
        self.responders.append(respond)
        return self.task

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await created_response(b"ok").send(scope, send)

    @property
    def statuses(self) -> list[int]:
        """The statuses of all responses."""
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.written)]

    async def respond_to_all(self) -> None:
        """Wait until all complete requests have a response."""
        while self.responders or self.connection.state.tasks:
            while self.responders:
                self.respond()
            await self.connection.wait_until_served()


def created_response(body: bytes) -> ApiResponse:
    """Return a 201 response."""
    return ApiResponse(201, body, [(b"content-type", b"text/plain"), (b"location", b"/1")])
