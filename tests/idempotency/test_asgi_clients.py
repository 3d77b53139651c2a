"""The middleware and clients that go away: the work they asked for is done, and its answer kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware
from tarry.runtime import event_loops
from tarry.testing import VirtualClock
from tarry.wire.asgi import App, Message, Receive, Scope, Send
from tests.idempotency.asking import KEY, Payments, ask, scope_of
from tests.idempotency.wayward import Wayward


async def ask_and_leave(app: App, sent: list[Message] | None = None) -> None:
    """Send a request, and be gone: what is sent goes into the void, as with servers."""
    unread: list[Message] = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Message:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if sent is not None:
            sent.append(message)

    await app(scope_of(headers=[(b"idempotency-key", KEY)]), receive, send)


class Attentive:
    """An application that works for a second, and stops when its client leaves, as Django does."""

    def __init__(self) -> None:
        self.payments = Payments()
        self.heard: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, and listen meanwhile."""
        body = await receive()

        async def again() -> Message:
            return body

        async def listen() -> None:
            self.heard.append((await receive())["type"])

        async def work() -> None:
            await event_loops.sleep(1)
            await self.payments(scope, again, send)

        if event_loops.in_trio():
            async with trio.open_nursery() as nursery:

                async def first(function: Callable[[], Awaitable[None]]) -> None:
                    await function()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(first, listen)
                nursery.start_soon(first, work)
            return
        tasks = [asyncio.create_task(listen()), asyncio.create_task(work())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("run", ["asyncio", "trio"])
def test_the_work_of_a_client_that_left_is_done(run: str) -> None:
    """The handler does not hear of it before its answer is recorded, which waits for the retry."""
    app = Attentive()

    async def main() -> None:
        guarded = IdempotencyMiddleware(app, Wayward())
        await ask_and_leave(guarded)
        answer = await ask(guarded)
        assert (b"run 1", True) == (answer.body, answer.replayed)

    with VirtualClock() as clock:
        (clock.run if run == "asyncio" else clock.run_trio)(main)
    assert 1 == app.payments.runs


def test_without_a_key_a_client_that_left_is_heard_of() -> None:
    """A request that nobody can ask for again is the application's to stop."""
    app = Attentive()

    async def main() -> None:
        await ask(IdempotencyMiddleware(app), key=None)

    with VirtualClock() as clock:
        clock.run(main)
    assert (["http.disconnect"], 0) == (app.heard, app.payments.runs)


def test_after_its_answer_the_handler_hears_that_its_client_left() -> None:
    """Some handlers wait for that before they end."""
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Payments()(scope, receive, send)
        heard.append((await receive())["type"])

    asyncio.run(ask_and_leave(IdempotencyMiddleware(app)))

    assert ["http.disconnect"] == heard


def test_who_waits_for_a_client_is_let_go_when_the_handler_fails() -> None:
    """A task that listens does not wait for an answer that never comes."""
    heard: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def listen() -> None:
            heard.append((await receive())["type"])

        tasks.append(asyncio.create_task(listen()))
        await asyncio.sleep(0)
        raise RuntimeError("a bug")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="a bug"):
            await ask_and_leave(IdempotencyMiddleware(app))
        await tasks[0]

    asyncio.run(main())
    assert ["http.disconnect"] == heard


def streaming(heard: list[str]) -> App:
    """An application that streams until its client has gone."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        heard.append((await receive())["type"])

    return app


def test_a_stream_hears_that_its_client_left() -> None:
    """What flows may end early; its request counts as done, for its handler has not failed."""
    heard: list[str] = []

    async def main() -> None:
        app = IdempotencyMiddleware(streaming(heard))
        await ask_and_leave(app)
        assert 200 == (await ask(app)).problem["originalStatus"]

    asyncio.run(main())
    assert ["http.disconnect"] == heard


def test_a_stream_that_cannot_be_sent_any_more_is_done() -> None:
    """Servers that raise when the client has gone make the handler raise: that is not its fault."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})

    def gone(message: Message) -> None:
        raise OSError("the client has gone")

    async def main() -> None:
        guarded = IdempotencyMiddleware(app, max_response_bytes=8)
        with pytest.raises(OSError, match="the client has gone"):
            await ask(guarded, before_send=gone)
        assert 200 == (await ask(guarded)).problem["originalStatus"]

    asyncio.run(main())
