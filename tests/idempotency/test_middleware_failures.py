"""Handlers that fail, clients that disconnect early, and cancelled requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.runtime import clocks
from tarry.testing import VirtualClock
from tarry.wire.http import Message, Receive, Scope, Send
from tests.idempotency.asgi_client import KEY, PaymentsApp, make_scope, send_request
from tests.idempotency.faulty_store import FaultyStore


def test_raising_handler_releases_the_key() -> None:
    """The server sees the error, nothing is sent, and a retry runs the handler."""
    payments = PaymentsApp()
    sent: list[Message] = []

    async def fails_once(scope: Scope, receive: Receive, send: Send) -> None:
        if payments.runs:
            await payments(scope, receive, send)
            return
        payments.bodies.append(b"failed")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("half way")

    async def main() -> None:
        app = IdempotencyMiddleware(fails_once)
        with pytest.raises(RuntimeError, match="half way"):
            await send_request(app, before_send=sent.append)
        assert [] == sent
        assert b"run 2" == (await send_request(app)).body
        assert (await send_request(app)).replayed

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 403, 404, 405, 407, 408, 425, 429, 500, 503])
def test_response_without_effect_is_not_stored(status: int) -> None:
    """A client that corrects its request, or waits, gets another try."""
    payments = PaymentsApp(status)
    app = IdempotencyMiddleware(payments)

    async def main() -> None:
        assert status == (await send_request(app)).status
        assert (status, False) == ((second := await send_request(app)).status, second.replayed)

    asyncio.run(main())
    assert 2 == payments.runs


@pytest.mark.parametrize("status", [400, 402, 409, 422])
def test_other_client_errors_are_stored(status: int) -> None:
    """Other 4xx responses are stored like any other response."""
    app = IdempotencyMiddleware(PaymentsApp(status))

    async def main() -> None:
        await send_request(app)
        assert (status, True) == ((second := await send_request(app)).status, second.replayed)

    asyncio.run(main())


def test_server_errors_are_stored_with_store_errors() -> None:
    """With store_errors a 500 is stored."""
    app = IdempotencyMiddleware(PaymentsApp(500), store_errors=True)

    async def main() -> None:
        await send_request(app)
        assert (await send_request(app)).replayed

    asyncio.run(main())


def test_incomplete_response_releases_the_key() -> None:
    """The server gets the incomplete response and handles it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def main() -> None:
        guarded = IdempotencyMiddleware(app)
        for _ in range(2):
            response = await send_request(guarded)
            assert ["http.response.start"] == [message["type"] for message in response.messages]

    asyncio.run(main())


def test_error_after_the_response_does_not_undo_it() -> None:
    """The server sees the error of a background task; the response was sent and is stored."""
    payments = PaymentsApp()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await payments(scope, receive, send)
        raise RuntimeError("afterwards")

    async def main() -> None:
        guarded = IdempotencyMiddleware(app)
        with pytest.raises(RuntimeError, match="afterwards"):
            await send_request(guarded)
        assert (await send_request(guarded)).replayed

    asyncio.run(main())


def test_incomplete_request_does_not_run() -> None:
    """A client that disconnects before its body is complete runs nothing."""
    payments = PaymentsApp()
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError

    async def main() -> None:
        app = IdempotencyMiddleware(payments)
        await app(make_scope(headers=[(b"idempotency-key", KEY)]), receive, send)
        assert b"run 1" == (await send_request(app)).body

    asyncio.run(main())


@pytest.mark.parametrize("store", [MemoryStore, FaultyStore])
@pytest.mark.parametrize("run", ["asyncio", "trio"])
def test_cancelled_request_lets_its_lease_expire(
    run: str, store: Callable[[], MemoryStore]
) -> None:
    """A thread of the handler may still run, so its key stays claimed until the lease ends."""
    payments = PaymentsApp()

    async def sleepy(scope: Scope, receive: Receive, send: Send) -> None:
        if not payments.runs:
            payments.bodies.append(b"cancelled")
            await clocks.async_sleep(1000)
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(sleepy, store(), lease=30.0)
        with clocks.timeout(100):
            await send_request(app)
            pytest.fail("not cancelled")
        assert 409 == (await send_request(app)).status
        await clocks.async_sleep(30)
        assert b"run 2" == (await send_request(app)).body

    with VirtualClock() as clock:
        (clock.run if run == "asyncio" else clock.run_trio)(main)


@pytest.mark.parametrize("error", [RuntimeError("plain"), KeyboardInterrupt("plain")])
def test_handler_errors_are_not_wrapped_on_trio(error: BaseException) -> None:
    """The error of a handler is not wrapped in an exception group."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async def main() -> None:
        with pytest.raises(type(error), match=r"^plain$"):
            await send_request(IdempotencyMiddleware(app, FaultyStore()))

    trio.run(main)
