"""Clients that disconnect: their request still runs, and its response is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware
from tarry.runtime import clocks
from tarry.testing import VirtualClock
from tarry.wire.http import App, Message, Receive, Scope, Send
from tests.idempotency.asgi_client import KEY, PaymentsApp, make_scope, send_request
from tests.idempotency.faulty_store import FaultyStore


async def send_and_disconnect(app: App, sent: list[Message] | None = None) -> None:
    """Send a request and disconnect. As with real servers, what is sent then is dropped."""
    unread: list[Message] = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Message:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if sent is not None:
            sent.append(message)

    await app(make_scope(headers=[(b"idempotency-key", KEY)]), receive, send)


class StopsOnDisconnect:
    """An application that works for a second and stops on a disconnect, as Django does."""

    def __init__(self) -> None:
        self.payments = PaymentsApp()
        self.received: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, and wait for the disconnect at the same time."""
        body = await receive()

        async def receive_again() -> Message:
            return body

        async def listen() -> None:
            self.received.append((await receive())["type"])

        async def work() -> None:
            await clocks.async_sleep(1)
            await self.payments(scope, receive_again, send)

        if clocks.in_trio():
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
def test_request_of_a_disconnected_client_completes(run: str) -> None:
    """The handler sees the disconnect only after its response is stored for a retry."""
    app = StopsOnDisconnect()

    async def main() -> None:
        guarded = IdempotencyMiddleware(app, FaultyStore())
        await send_and_disconnect(guarded)
        response = await send_request(guarded)
        assert (b"run 1", True) == (response.body, response.replayed)

    with VirtualClock() as clock:
        (clock.run if run == "asyncio" else clock.run_trio)(main)
    assert 1 == app.payments.runs


def test_without_a_key_the_handler_sees_the_disconnect() -> None:
    """A request without a key cannot be repeated, so the application may stop it."""
    app = StopsOnDisconnect()

    async def main() -> None:
        await send_request(IdempotencyMiddleware(app), key=None)

    with VirtualClock() as clock:
        clock.run(main)
    assert (["http.disconnect"], 0) == (app.received, app.payments.runs)


def test_handler_sees_the_disconnect_after_its_response() -> None:
    """Some handlers wait for the disconnect before they end."""
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PaymentsApp()(scope, receive, send)
        heard.append((await receive())["type"])

    asyncio.run(send_and_disconnect(IdempotencyMiddleware(app)))

    assert ["http.disconnect"] == heard


def test_waiting_task_ends_when_the_handler_fails() -> None:
    """A task that waits for the disconnect does not wait for a response that never comes."""
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
            await send_and_disconnect(IdempotencyMiddleware(app))
        await tasks[0]

    asyncio.run(main())
    assert ["http.disconnect"] == heard


def streaming(heard: list[str]) -> App:
    """Return an application that streams until its client disconnects."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        heard.append((await receive())["type"])

    return app


def test_stream_sees_the_disconnect() -> None:
    """A stream may end early. Its request counts as done, because its handler has not failed."""
    heard: list[str] = []

    async def main() -> None:
        app = IdempotencyMiddleware(streaming(heard))
        await send_and_disconnect(app)
        assert 200 == (await send_request(app)).problem["originalStatus"]

    asyncio.run(main())
    assert ["http.disconnect"] == heard


def test_stream_to_a_disconnected_client_is_done() -> None:
    """Servers that raise on a disconnect make the handler raise.

    That is not a failure of the handler.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})

    def gone(message: Message) -> None:
        raise OSError("the client has gone")

    async def main() -> None:
        guarded = IdempotencyMiddleware(app, max_response_bytes=8)
        with pytest.raises(OSError, match="the client has gone"):
            await send_request(guarded, before_send=gone)
        assert 200 == (await send_request(guarded)).problem["originalStatus"]

    asyncio.run(main())
