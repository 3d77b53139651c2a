"""The middleware when things go wrong: handlers, clients, cancellation."""

from __future__ import annotations

import asyncio

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware
from tarry.testing import VirtualClock
from tarry.wire.asgi import Message, Receive, Scope, Send
from tests.idempotency.asking import KEY, Payments, ask, scope_of, slow


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


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_response_that_says_not_now_is_not_kept(status: int) -> None:
    """Who comes back after it, as told, gets another try."""
    payments = Payments(status)
    app = IdempotencyMiddleware(payments)

    async def main() -> None:
        assert status == (await ask(app)).status
        assert (status, False) == ((second := await ask(app)).status, second.replayed)

    asyncio.run(main())
    assert 2 == payments.runs


@pytest.mark.parametrize("status", [400, 404, 409, 422])
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


def test_the_handler_hears_that_the_client_left() -> None:
    """After the body, `receive` is the server's own."""
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])

    asyncio.run(ask(IdempotencyMiddleware(app)))

    assert ["http.request", "http.disconnect"] == heard


@pytest.mark.parametrize("run", ["asyncio", "trio"])
def test_a_cancelled_request_gives_the_key_back(run: str) -> None:
    """Cancellation goes through, and a retry runs."""
    payments = Payments()

    async def on_asyncio() -> None:
        app = IdempotencyMiddleware(slow(payments, 1000))
        task = asyncio.create_task(ask(app))
        await asyncio.sleep(100)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        payments.bodies.append(b"cancelled")
        assert b"run 2" == (await ask(app)).body

    async def on_trio() -> None:
        async def sleepy(scope: Scope, receive: Receive, send: Send) -> None:
            if not payments.runs:
                await trio.sleep(1000)
            await payments(scope, receive, send)

        app = IdempotencyMiddleware(sleepy)
        with trio.move_on_after(100) as scope:
            await ask(app)
        assert scope.cancelled_caught
        payments.bodies.append(b"cancelled")
        assert b"run 2" == (await ask(app)).body

    with VirtualClock() as clock:
        if run == "asyncio":
            clock.run(on_asyncio)
        else:
            clock.run_trio(on_trio)


def test_errors_of_handlers_are_their_own_on_trio() -> None:
    """The error of a handler is not wrapped in a group."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("plain")

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"^plain$"):
            await ask(IdempotencyMiddleware(app))

    trio.run(main)
