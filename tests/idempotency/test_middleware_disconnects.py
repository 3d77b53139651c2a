"""Requests whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware
from tarry.runtime import event_loops
from tarry.testing import VirtualClock
from tarry.wire.http import App, Message, Receive, Scope, Send
from tests.idempotency.asgi_client import KEY, PaymentsApp, make_scope, send_request
from tests.idempotency.faulty_store import FaultyStore


async def send_and_disconnect(app: App) -> None:
    """Send a request and disconnect."""
    unread: list[Message] = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Message:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Drop the message, as servers do after a disconnect."""

    await app(make_scope(headers=[(b"idempotency-key", KEY)]), receive, send)


class DisconnectAwareApp:
    """An application that runs for a second and stops on a disconnect, as Django does."""

    def __init__(self) -> None:
        self.payments = PaymentsApp()
        self.received: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler and wait for the disconnect concurrently."""
        body = await receive()

        async def receive_body() -> Message:
            return body

        async def wait_for_disconnect() -> None:
            self.received.append((await receive())["type"])

        async def handle() -> None:
            await event_loops.async_sleep(1)
            await self.payments(scope, receive_body, send)

        if event_loops.in_trio():
            async with trio.open_nursery() as nursery:

                async def run_and_cancel_others(function: Callable[[], Awaitable[None]]) -> None:
                    await function()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(run_and_cancel_others, wait_for_disconnect)
                nursery.start_soon(run_and_cancel_others, handle)
            return
        tasks = [asyncio.create_task(wait_for_disconnect()), asyncio.create_task(handle())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_request_of_a_disconnected_client_completes(backend: str) -> None:
    """The handler completes after a disconnect, and a retry gets its stored response."""
    app = DisconnectAwareApp()

    async def main() -> None:
        middleware = IdempotencyMiddleware(app, FaultyStore())
        await send_and_disconnect(middleware)
        response = await send_request(middleware)
        assert (b"run 1", True) == (response.body, response.is_replayed)

    with VirtualClock() as clock:
        (clock.run if backend == "asyncio" else clock.run_trio)(main)
    assert 1 == app.payments.runs


def test_handler_without_a_key_sees_the_disconnect() -> None:
    """In a request without a key, the application sees the disconnect and may stop."""
    app = DisconnectAwareApp()

    async def main() -> None:
        await send_request(IdempotencyMiddleware(app), key=None)

    with VirtualClock() as clock:
        clock.run(main)
    assert (["http.disconnect"], 0) == (app.received, app.payments.runs)


def test_handler_sees_the_disconnect_after_its_response() -> None:
    received: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PaymentsApp()(scope, receive, send)
        received.append((await receive())["type"])

    asyncio.run(send_and_disconnect(IdempotencyMiddleware(app)))

    assert ["http.disconnect"] == received


async def test_waiting_task_ends_when_the_handler_fails() -> None:
    received: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def wait_for_disconnect() -> None:
            received.append((await receive())["type"])

        tasks.append(asyncio.create_task(wait_for_disconnect()))
        await asyncio.sleep(0)
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await send_and_disconnect(IdempotencyMiddleware(app))
    await tasks[0]
    assert ["http.disconnect"] == received


def make_streaming_app(received: list[str]) -> App:
    """Return an application that streams events until its client disconnects."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        received.append((await receive())["type"])

    return app


async def test_stream_sees_the_disconnect() -> None:
    """An event stream receives the disconnect; a retry gets a problem with the original status."""
    received: list[str] = []

    app = IdempotencyMiddleware(make_streaming_app(received))
    await send_and_disconnect(app)
    assert 200 == (await send_request(app)).problem["originalStatus"]
    assert ["http.disconnect"] == received


async def test_stream_to_a_disconnected_client_is_complete() -> None:
    """An OSError of `send`, which some servers raise on a disconnect, does not release the key."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})

    def raise_disconnect(message: Message) -> None:
        raise OSError("client disconnected")

    middleware = IdempotencyMiddleware(app, max_response_bytes=8)
    with pytest.raises(OSError, match="client disconnected"):
        await send_request(middleware, before_send=raise_disconnect)
    assert 200 == (await send_request(middleware)).problem["originalStatus"]
