"""Requests that arrive in one read, and those that go uvicorn's way all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tarry.service.api.response import ApiResponse
from tests.service.http.harness import GET, KEEP_ALIVE_S, ConnectionHarness

HEAD = b"POST /hot HTTP/1.1\r\nHost: h\r\nX-A: 1\r\n"
POST = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
DATE = [(b"date", b"today")]


class Hot:
    """An application that takes whole requests, and answers them when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], bytes]] = []
        self.replies: list[Callable[[ApiResponse], None]] = []
        self.bodies: list[bytes] = []
        """Of those that came uvicorn's way."""
        self.task: asyncio.Task[Any] | None = None
        """What the short way needs."""
        self.rig = ConnectionHarness(self._app, {b"/hot": self._serve})
        self.rig.state.default_headers = DATE

    def read(self, data: bytes) -> None:
        """Read once."""
        self.rig.connection.data_received(data)

    def answer(self, body: bytes = b"ok") -> None:
        """Answer the oldest request that waits."""
        self.replies.pop(0)(answer(body))

    @property
    def written(self) -> bytes:
        """All that was written."""
        return b"".join(self.rig.wire.written)

    def _serve(
        self, scope: Any, body: bytes, reply: Callable[[ApiResponse], None]
    ) -> asyncio.Task[Any] | None:
        self.asked.append((dict(scope), body))
        self.replies.append(reply)
        return self.task

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await answer(b"ok").send(scope, send)


def answer(body: bytes) -> ApiResponse:
    """An answer like any other."""
    return ApiResponse(201, body, [(b"content-type", b"text/plain"), (b"location", b"/1")])


@pytest.mark.parametrize("request_", [POST, CHUNKED], ids=["sized", "chunked"])
def test_a_request_in_one_read_is_served_at_once(request_: bytes) -> None:
    """It gets the same answer as on uvicorn's way, without a task, in one write."""

    async def run() -> None:
        hot, long = Hot(), Hot()
        for count in (1, 2):
            hot.read(request_)
            (scope, body) = hot.asked[-1]
            assert ("POST", "/hot", b"hello") == (scope["method"], scope["path"], body)
            assert (b"x-a", b"1") in scope["headers"]
            assert not hot.rig.state.tasks
            hot.rig.wire.written.clear()
            hot.answer()
            assert 1 == len(hot.rig.wire.written)
            assert await long.rig.ask(request_.replace(b"/hot", b"/cold")) == hot.written
            assert count == hot.rig.state.total_requests == len(hot.asked)
        assert b"HTTP/1.1 201 Created\r\ndate: today\r\n" in hot.written
        assert b"" == hot.rig.connection.cycle.body  # an idle connection keeps none

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_",
    [
        POST.replace(b"POST", b"PUT"),
        POST.replace(b"/hot", b"/hot?a=1"),
        POST.replace(b"/hot", b"/hot/"),
        POST.replace(b"/hot", b"/%68ot"),
        POST.replace(b"/hot", b"http://h/hot"),
        POST.replace(b"HTTP/1.1", b"HTTP/1.0"),
        POST.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"X-A: 1", b"Connection: keep-alive"),
        POST.replace(b"X-A: 1", b"Connection: close"),
        POST.replace(b"X-A: 1", b"connection: x, Close"),
        POST.replace(b"X-A: 1", b"Expect: 100-continue"),
    ],
)
def test_what_is_not_as_usual_goes_the_long_way(request_: bytes) -> None:
    """It is served there, with its body."""

    async def run() -> None:
        hot = Hot()
        assert (await hot.rig.ask(request_)).endswith(b"\r\n\r\nok")
        assert ([], [b"hello"]) == (hot.asked, hot.bodies)

    asyncio.run(run())


def test_an_upgrade_goes_the_long_way() -> None:
    """The parser stops at its head, so that there is no body."""

    async def run() -> None:
        hot = Hot()
        upgrade = b"Connection: upgrade\r\nUpgrade: h2c"
        assert (await hot.rig.ask(POST.replace(b"X-A: 1", upgrade))).endswith(b"\r\n\r\nok")
        assert ([], [b""]) == (hot.asked, hot.bodies)

    asyncio.run(run())


@pytest.mark.parametrize("request_", [POST, CHUNKED], ids=["sized", "chunked"])
def test_a_request_in_two_reads_is_served_once(request_: bytes) -> None:
    """Wherever it is cut, it arrives in full, and gets its one answer."""

    async def run() -> None:
        ways: set[bool] = set()
        for cut in range(1, len(request_)):
            hot = Hot()
            hot.read(request_[:cut])
            await asyncio.sleep(0)
            hot.read(request_[cut:])
            await hot.rig.served()
            ways.add(is_short := bool(hot.asked))
            if is_short:
                hot.answer()
            assert [b"hello"] == [body for _, body in hot.asked] + hot.bodies
            assert 1 == hot.written.count(b"HTTP/1.1 201 ") == hot.rig.state.total_requests
        assert {True, False} == ways  # its head may come in pieces

    asyncio.run(run())


def test_who_comes_behind_waits() -> None:
    """Requests in one read are answered in order, the later ones on uvicorn's way."""

    async def run() -> None:
        hot = Hot()
        hot.read(POST + GET + POST.replace(b"hello", b"again"))
        hot.read(POST.replace(b"hello", b"third"))
        await asyncio.sleep(0)
        assert (1, [], b"") == (len(hot.asked), hot.bodies, hot.written)
        hot.answer(b"first")
        await hot.rig.served()
        assert [b"", b"again", b"third"] == hot.bodies
        bodies = [part.partition(b"HTTP")[0] for part in hot.written.split(b"\r\n\r\n")[1:]]
        assert [b"first", b"ok", b"ok", b"ok"] == bodies
        hot.read(POST)
        assert 2 == len(hot.asked)  # there is none before it

    asyncio.run(run())


def test_who_does_not_read_his_answers_goes_the_long_way() -> None:
    """There it is waited until he does."""

    async def run() -> None:
        hot = Hot()
        hot.rig.connection.pause_writing()
        hot.read(POST)
        await asyncio.sleep(0)
        assert ([], b"") == (hot.asked, hot.written)
        hot.rig.connection.resume_writing()
        await hot.rig.served()
        assert hot.written.endswith(b"\r\n\r\nok")

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
def test_nobody_is_answered_who_has_gone(error: Exception | None) -> None:
    """An answer to a lost connection is not written, and no timer is left."""

    async def run() -> None:
        hot = Hot()
        hot.read(POST + GET)
        hot.rig.wire.close()
        hot.rig.connection.connection_lost(error)
        hot.answer()
        assert (b"", 0) == (hot.written, hot.rig.loop.pending)
        assert not hot.rig.state.connections

    asyncio.run(run())


def test_an_answer_at_the_end_is_the_last() -> None:
    """When the server is about to end, the request is answered, and then the connection closed."""

    async def run() -> None:
        hot = Hot()
        hot.read(POST)
        hot.rig.connection.shutdown()
        assert not hot.rig.wire.is_closed
        hot.answer()
        assert b"\r\nconnection: close\r\n" in hot.written
        assert hot.written.endswith(b"\r\n\r\nok")
        assert hot.rig.wire.is_closed

    asyncio.run(run())


def test_the_server_waits_for_what_needs_a_task() -> None:
    """It knows of the task until it is done."""

    async def run() -> None:
        hot, go_on = Hot(), asyncio.Event()
        hot.task = asyncio.create_task(go_on.wait())
        hot.read(POST)
        assert {hot.task} == hot.rig.state.tasks
        go_on.set()
        await hot.rig.served()
        assert not hot.rig.state.tasks

    asyncio.run(run())


def test_a_connection_is_idle_after_its_answer() -> None:
    """Not before it: an answer may take longer than an idle connection is kept."""

    async def run() -> None:
        hot = Hot()
        for _ in range(2):
            hot.read(POST)
            hot.rig.loop.sleep(2 * KEEP_ALIVE_S)
            assert (False, 0) == (hot.rig.wire.is_closed, hot.rig.loop.pending)
            hot.answer()
        hot.rig.loop.sleep(KEEP_ALIVE_S)
        assert hot.rig.wire.is_closed

    asyncio.run(run())


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: x", b"a\nb", b"a\rb"])
def test_a_header_of_two_lines_is_not_written(value: bytes) -> None:
    """Nothing goes out that could be read as another header; the connection ends."""

    async def run() -> None:
        hot = Hot()
        hot.read(POST)
        hot.replies[0](ApiResponse(201, b"ok", [(b"location", value)]))
        assert (b"", True) == (hot.written, hot.rig.wire.is_closed)

    asyncio.run(run())


def test_what_is_no_request_ends_the_connection() -> None:
    """One before it in the same read is served, though its answer has no way any more."""

    async def run() -> None:
        hot = Hot()
        hot.read(POST + b"nonsense\r\n\r\n")
        assert hot.written.startswith(b"HTTP/1.1 400 ")
        assert (1, True) == (len(hot.asked), hot.rig.wire.is_closed)
        hot.answer()
        assert 1 == hot.written.count(b"HTTP/1.1 ")

    asyncio.run(run())


def test_a_body_that_is_broken_is_not_served() -> None:
    """The connection ends with 400 before anybody is asked."""

    async def run() -> None:
        hot = Hot()
        await hot.rig.ask(CHUNKED[:-7] + b"xyz\r\n")
        assert hot.written.startswith(b"HTTP/1.1 400 ")
        assert ([], []) == (hot.asked, hot.bodies)

    asyncio.run(run())
