"""What a connection does around its requests, on uvicorn's way; the other is in test_shortway."""

from __future__ import annotations

import asyncio
from typing import Any

from tarry.service.http.limits import _UNREAD_RESPONSE_GRACE_S
from tests.service.http.harness import GET, KEEP_ALIVE_S, ConnectionHarness

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"2")]


async def answer(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
    """Answer at once."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


def test_requests_in_one_piece_are_answered_in_order() -> None:
    """Each gets its own answer."""

    async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def run() -> None:
        rig = ConnectionHarness(app)
        paths = [b"/1", b"/2", b"/3"]
        answers = await rig.ask(b"".join(GET.replace(b"/x", path) for path in paths))
        assert paths == [part[:2] for part in answers.split(b"\r\n\r\n")[1:]]
        assert 3 == rig.state.total_requests

    asyncio.run(run())


def test_an_idle_connection_is_closed() -> None:
    """The time counts from the last answer, and one timer serves all requests."""

    async def run() -> None:
        rig = ConnectionHarness(answer)
        for _ in range(3):
            await rig.ask()
            rig.loop.sleep(KEEP_ALIVE_S - 1)
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
            await answer(scope, receive, send)

        rig = ConnectionHarness(app)
        await rig.ask()
        rig.connection.data_received(GET.replace(b"/x", b"/slow"))
        rig.loop.sleep(2 * KEEP_ALIVE_S)
        assert (False, 0) == (rig.wire.is_closed, rig.loop.pending)
        go_on.set()
        await rig.served()
        assert 1 == rig.loop.pending
        rig.loop.sleep(KEEP_ALIVE_S)
        assert rig.wire.is_closed

    asyncio.run(run())


def test_a_head_comes_to_the_application_as_it_is() -> None:
    """Path, query, method, version and headers are those of the request, each time."""
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope)
        await answer(scope, receive, send)

    async def run() -> None:
        rig = ConnectionHarness(app)
        await rig.ask()
        await rig.ask(b"PUT /%2Fy?z=1 HTTP/1.0\r\nX-A: 1\r\nx-a: 2\r\n\r\n")

    asyncio.run(run())
    first, second = seen
    assert ("GET", "/x", b"", "1.1") == _line(first)
    assert ("PUT", "//y", b"z=1", "1.0") == _line(second)
    assert [(b"host", b"h")] == first["headers"]
    assert [(b"x-a", b"1"), (b"x-a", b"2")] == second["headers"]


def test_who_is_served_learns_that_the_client_has_gone() -> None:
    """Also when another request of the connection waits behind it."""
    left: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.append(scope["path"])
        await answer(scope, receive, send)

    async def run() -> None:
        rig = ConnectionHarness(app)
        rig.connection.data_received(GET + GET.replace(b"/x", b"/y") * 2)
        rig.connection.connection_lost(None)
        async with asyncio.timeout(30):
            await rig.served()
        assert (["/x"], []) == (left, rig.wire.written)

    asyncio.run(run())


def test_at_the_end_nobody_is_waited_for_who_does_not_read() -> None:
    """An answer that is still being read has a moment; then the connection is cut off."""

    async def run() -> None:
        rig = ConnectionHarness(answer)
        await rig.ask()
        rig.wire.unread = 9
        rig.connection.shutdown()
        assert (True, False) == (rig.wire.is_closed, rig.wire.is_aborted)
        rig.loop.sleep(_UNREAD_RESPONSE_GRACE_S / 2)
        assert not rig.wire.is_aborted
        rig.loop.sleep(_UNREAD_RESPONSE_GRACE_S / 2)
        assert rig.wire.is_aborted

    asyncio.run(run())


def test_at_the_end_an_answer_that_is_on_its_way_has_its_moment() -> None:
    """It counts from when there is something to read, and ends with the connection."""

    async def run() -> None:
        go_on = asyncio.Event()

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            await go_on.wait()
            await answer(scope, receive, send)

        rig = ConnectionHarness(app)
        rig.connection.data_received(GET)
        rig.connection.shutdown()
        rig.loop.sleep(3 * _UNREAD_RESPONSE_GRACE_S)
        go_on.set()
        await rig.served()
        rig.wire.unread = 9
        rig.loop.sleep(_UNREAD_RESPONSE_GRACE_S)
        assert (True, False) == (rig.wire.is_closed, rig.wire.is_aborted)
        rig.connection.connection_lost(None)
        rig.loop.sleep(_UNREAD_RESPONSE_GRACE_S)
        assert (False, 0) == (rig.wire.is_aborted, rig.loop.pending)

    asyncio.run(run())


def _line(scope: dict[str, Any]) -> tuple[str, str, bytes, str]:
    return scope["method"], scope["path"], scope["query_string"], scope["http_version"]
