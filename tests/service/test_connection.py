"""One connection over a transport that remembers, on a time that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from tarry.service.api.exchange import TAKES_WHOLE
from tarry.service.connection import Connection

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"2")]
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
KEEP_ALIVE = 75
PATIENCE = 10.0


class Wire:
    """A transport: what is written, and whether it was closed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        """Remember it."""
        self.written.append(data)

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True

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


class Timer:
    """A call that is due at a time."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.is_cancelled = at, call, False

    def cancel(self) -> None:
        """Do not call."""
        self.is_cancelled = True


class Loop:
    """The running loop with timers of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.create_task = asyncio.get_running_loop().create_task

    def time(self) -> float:
        """Return the test's time."""
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Remember a call."""
        self.timers.append(Timer(self.now + seconds, call))
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


class Rig:
    """A connection that serves an application."""

    def __init__(self, app: App) -> None:
        config = uvicorn.Config(
            cast("Any", app), access_log=False, log_config=None, timeout_keep_alive=KEEP_ALIVE
        )
        config.load()
        self.wire, self.loop, self.state = Wire(), Loop(), ServerState()
        self.connection = Connection(
            config=config,
            server_state=self.state,
            app_state={},
            _loop=self.loop,
            head_timeout=PATIENCE,
            body_timeout=PATIENCE,
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


async def in_steps(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
    """Answer in two steps, as ASGI has it."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


async def at_once(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
    """Answer in one piece."""
    assert scope.pop(TAKES_WHOLE)(200, HEADERS, b"ok")


def test_an_answer_in_one_piece_is_the_one_in_steps() -> None:
    """It is the same on the wire, with the server's own headers, and one write."""

    async def run() -> None:
        slow, fast = Rig(in_steps), Rig(at_once)
        for rig in (slow, fast):
            rig.state.default_headers = [(b"date", b"today")]
        for count in (1, 2):
            assert await slow.ask() == await fast.ask()
            assert b"HTTP/1.1 200 OK\r\ndate: today\r\n" in fast.wire.written[0]
            assert (1, count) == (len(fast.wire.written), fast.state.total_requests)

    asyncio.run(run())


def test_an_answer_that_closes_is_left_to_the_server() -> None:
    """Who asks for the end of the connection, or is told of it, gets it."""
    taken: list[bool] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [*HEADERS, (b"connection", b"close")]
        taken.append(scope.pop(TAKES_WHOLE)(200, headers, b"ok"))
        await in_steps(scope, receive, send)

    async def run() -> None:
        await Rig(app).ask()
        assert [False] == taken
        rig = Rig(in_steps)
        assert b"connection: close\r\n" in await rig.ask(GET[:-2] + b"Connection: close\r\n\r\n")
        assert rig.wire.is_closed

    asyncio.run(run())


def test_a_request_to_close_does_not_take_an_answer_whole() -> None:
    """The server's own way says that it closes, and does."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert TAKES_WHOLE not in scope
        await in_steps(scope, receive, send)

    async def run() -> None:
        answer = await Rig(app).ask(GET[:-2] + b"Connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())


def test_an_answer_at_the_end_is_the_last() -> None:
    """When the server is about to end, the connection is closed after the answer."""
    taken: list[bool] = []

    async def run() -> None:
        go_on = asyncio.Event()

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            await go_on.wait()
            taken.append(scope.pop(TAKES_WHOLE)(200, HEADERS, b"ok"))
            await in_steps(scope, receive, send)

        rig = Rig(app)
        rig.connection.data_received(GET)
        await asyncio.sleep(0)
        rig.connection.shutdown()
        go_on.set()
        await rig.served()
        assert [False] == taken
        assert b"".join(rig.wire.written).endswith(b"ok")
        assert rig.wire.is_closed

    asyncio.run(run())


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: x", b"a\nb", b"a\rb"])
def test_a_header_of_two_lines_is_not_taken(value: bytes) -> None:
    """Nothing is written that could be read as another header."""
    taken: list[bool] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        taken.append(scope.pop(TAKES_WHOLE)(200, [(b"location", value), *HEADERS], b"ok"))
        await in_steps(scope, receive, send)

    async def run() -> None:
        assert b"location" not in await Rig(app).ask()

    asyncio.run(run())
    assert [False] == taken


def test_an_answer_waits_for_a_slow_reader() -> None:
    """While what was written is not read, more is not taken at once."""

    async def run() -> None:
        async def app(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
            take = scope.pop(TAKES_WHOLE)
            rig.connection.pause_writing()
            assert not take(200, HEADERS, b"ok")
            assert [] == rig.wire.written
            rig.connection.resume_writing()
            assert take(200, HEADERS, b"ok")

        rig = Rig(app)
        assert (await rig.ask()).endswith(b"\r\n\r\nok")

    asyncio.run(run())


def test_nobody_is_answered_who_has_gone() -> None:
    """An answer to a lost connection is not written."""

    async def run() -> None:
        go_on = asyncio.Event()

        async def app(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
            await go_on.wait()
            assert not scope.pop(TAKES_WHOLE)(200, HEADERS, b"ok")

        rig = Rig(app)
        rig.connection.data_received(GET)
        await asyncio.sleep(0)
        rig.connection.connection_lost(None)
        go_on.set()
        await rig.served()
        assert [] == rig.wire.written
        assert 0 == rig.loop.pending

    asyncio.run(run())


def test_requests_in_one_piece_are_answered_in_order() -> None:
    """Each gets its own answer, also when it is taken whole."""

    async def app(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
        await asyncio.sleep(0)
        body = scope["path"].encode()
        assert scope.pop(TAKES_WHOLE)(200, [(b"content-length", b"2")], body)

    async def run() -> None:
        rig = Rig(app)
        paths = [b"/1", b"/2", b"/3"]
        answers = await rig.ask(b"".join(GET.replace(b"/x", path) for path in paths))
        assert paths == [part[:2] for part in answers.split(b"\r\n\r\n")[1:]]
        assert 3 == rig.state.total_requests

    asyncio.run(run())


def test_an_idle_connection_is_closed() -> None:
    """The time counts from the last answer, and one timer serves all requests."""

    async def run() -> None:
        rig = Rig(at_once)
        for _ in range(3):
            await rig.ask()
            rig.loop.sleep(KEEP_ALIVE - 1)
            assert 1 == rig.loop.pending
        assert not rig.wire.is_closed
        rig.loop.sleep(1)
        assert rig.wire.is_closed
        assert 0 == rig.loop.pending

    asyncio.run(run())


def test_a_connection_that_is_served_is_not_idle() -> None:
    """The timer of an answer does not end a later request that takes its time."""

    async def run() -> None:
        go_on = asyncio.Event()

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                await go_on.wait()
            await at_once(scope, receive, send)

        rig = Rig(app)
        await rig.ask()
        rig.connection.data_received(GET.replace(b"/x", b"/slow"))
        rig.loop.sleep(2 * KEEP_ALIVE)
        assert (False, 0) == (rig.wire.is_closed, rig.loop.pending)
        go_on.set()
        await rig.served()
        assert 1 == rig.loop.pending
        rig.loop.sleep(KEEP_ALIVE)
        assert rig.wire.is_closed

    asyncio.run(run())
