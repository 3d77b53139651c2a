"""The middleware when things go wrong: handlers, clients, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.runtime import event_loops
from tarry.testing import VirtualClock
from tarry.wire.asgi import Message, Receive, Scope, Send
from tests.idempotency.asking import KEY, Payments, ask, scope_of
from tests.idempotency.wayward import Wayward


def test_a_raising_handler_gives_the_key_back() -> None:
    """The error is the server's to see, nothing was sent, and a retry runs."""
    payments = Payments()
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
            await ask(app, before_send=sent.append)
        assert [] == sent
        assert b"run 2" == (await ask(app)).body
        assert (await ask(app)).replayed

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 403, 404, 405, 407, 408, 425, 429, 500, 503])
def test_a_response_that_says_that_nothing_was_done_is_not_kept(status: int) -> None:
    """Who comes back after it, with what was missing or as told, gets another try."""
    payments = Payments(status)
    app = IdempotencyMiddleware(payments)

    async def main() -> None:
        assert status == (await ask(app)).status
        assert (status, False) == ((second := await ask(app)).status, second.replayed)

    asyncio.run(main())
    assert 2 == payments.runs


@pytest.mark.parametrize("status", [400, 402, 409, 422])
def test_other_errors_are_kept(status: int) -> None:
    """A refusal is a result as any other."""
    app = IdempotencyMiddleware(Payments(status))

    async def main() -> None:
        await ask(app)
        assert (status, True) == ((second := await ask(app)).status, second.replayed)

    asyncio.run(main())


def test_server_errors_are_kept_when_asked_for() -> None:
    """With store_errors a 500 is replayed."""
    app = IdempotencyMiddleware(Payments(500), store_errors=True)

    async def main() -> None:
        await ask(app)
        assert (await ask(app)).replayed

    asyncio.run(main())


def test_a_handler_that_answers_nothing_gives_the_key_back() -> None:
    """What the server makes of it stays the server's; the half response reaches it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def main() -> None:
        guarded = IdempotencyMiddleware(app)
        for _ in range(2):
            answer = await ask(guarded)
            assert ["http.response.start"] == [message["type"] for message in answer.messages]

    asyncio.run(main())


def test_work_after_the_response_does_not_undo_it() -> None:
    """A background task that fails is the server's to see; the response was sent and is kept."""
    payments = Payments()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await payments(scope, receive, send)
        raise RuntimeError("afterwards")

    async def main() -> None:
        guarded = IdempotencyMiddleware(app)
        with pytest.raises(RuntimeError, match="afterwards"):
            await ask(guarded)
        assert (await ask(guarded)).replayed

    asyncio.run(main())


def test_a_client_that_leaves_before_its_body_is_there_runs_nothing() -> None:
    """Half a request is no request."""
    payments = Payments()
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
        await app(scope_of(headers=[(b"idempotency-key", KEY)]), receive, send)
        assert b"run 1" == (await ask(app)).body

    asyncio.run(main())


@pytest.mark.parametrize("store", [MemoryStore, Wayward])
@pytest.mark.parametrize("run", ["asyncio", "trio"])
def test_a_cancelled_request_leaves_its_lease_to_run_out(
    run: str, store: Callable[[], MemoryStore]
) -> None:
    """Cancellation goes through; a thread of the handler may go on, so its key is held."""
    payments = Payments()

    async def sleepy(scope: Scope, receive: Receive, send: Send) -> None:
        if not payments.runs:
            payments.bodies.append(b"cancelled")
            await event_loops.sleep(1000)
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(sleepy, store(), lease=30.0)
        with event_loops.timeout(100) as expiry:
            await ask(app)
        assert expiry.expired
        assert 409 == (await ask(app)).status
        await event_loops.sleep(30)
        assert b"run 2" == (await ask(app)).body

    with VirtualClock() as clock:
        (clock.run if run == "asyncio" else clock.run_trio)(main)


@pytest.mark.parametrize("error", [RuntimeError("plain"), KeyboardInterrupt("plain")])
def test_errors_of_handlers_are_their_own_on_trio(error: BaseException) -> None:
    """What a handler raises is not wrapped in a group."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async def main() -> None:
        with pytest.raises(type(error), match=r"^plain$"):
            await ask(IdempotencyMiddleware(app, Wayward()))

    trio.run(main)
