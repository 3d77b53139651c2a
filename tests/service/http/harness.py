"""A connection over a transport that remembers, on a time that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from tarry.service.api.response import CompleteRequestHandler
from tarry.service.http.limits import LimitedHttpProtocol

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
KEEP_ALIVE_S = 75
REQUEST_TIMEOUT_S = 10.0


class FakeTransport:
    """A transport: what is written, and whether it was closed or cut off."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.unread = 0
        self.is_closed = self.is_aborted = False

    def write(self, data: bytes) -> None:
        """Remember it."""
        self.written.append(data)

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True

    def abort(self) -> None:
        """Remember it."""
        self.is_closed = self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        """Return what the test says."""
        return self.unread

    def is_closing(self) -> bool:
        """Say so."""
        return self.is_closed

    def get_extra_info(self, _name: str, default: object = None) -> object:
        """Know nothing."""
        return default

    def pause_reading(self) -> None:
        """Nothing is read anyway."""

    def resume_reading(self) -> None:
        """Nothing is read anyway."""


class FakeTimer:
    """A call that is due at a time."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.is_cancelled = at, call, False

    def cancel(self) -> None:
        """Do not call."""
        self.is_cancelled = True


class FakeLoop:
    """The running loop with timers of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []
        self.create_task = asyncio.get_running_loop().create_task

    def time(self) -> float:
        """Return the test's time."""
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> FakeTimer:
        """Remember a call."""
        self.timers.append(FakeTimer(self.now + seconds, call))
        return self.timers[-1]

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            if not timer.is_cancelled:
                timer.call()

    @property
    def pending(self) -> int:
        """How many timers will fire."""
        return sum(not timer.is_cancelled for timer in self.timers)


class ConnectionHarness:
    """A connection that serves an application."""

    def __init__(self, app: App, whole: dict[bytes, CompleteRequestHandler] | None = None) -> None:
        config = uvicorn.Config(
            cast("Any", app),
            access_log=False,
            interface="asgi3",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        self.wire, self.loop, self.state = FakeTransport(), FakeLoop(), ServerState()
        self.connection = LimitedHttpProtocol(
            config=config,
            server_state=self.state,
            app_state={},
            _loop=self.loop,
            header_timeout_s=REQUEST_TIMEOUT_S,
            body_timeout_s=REQUEST_TIMEOUT_S,
            fast_routes=whole or {},
        )
        self.connection.connection_made(cast("Any", self.wire))

    async def ask(self, data: bytes = GET) -> bytes:
        """Send a request and let it be served; return what is written then."""
        self.wire.written.clear()
        self.connection.data_received(data)
        await self.served()
        return b"".join(self.wire.written)

    async def served(self) -> None:
        """Wait for all that are served."""
        while self.state.tasks:
            await asyncio.wait(self.state.tasks)
            await asyncio.sleep(0)
