"""Failed handlers, incomplete requests and responses, and cancelled requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.runtime import event_loops
from tarry.testing import VirtualClock
from tarry.wire.http import Message, Receive, Scope, Send
from tests.idempotency.asgi_client import KEY, PaymentsApp, make_scope, send_request
from tests.idempotency.faulty_store import FaultyStore


async def test_raising_handler_releases_the_key() -> None:
    """A handler that raises sends nothing, its error reaches the server, and a retry runs."""
    payments = PaymentsApp()
    sent: list[Message] = []

    async def fail_once(scope: Scope, receive: Receive, send: Send) -> None:
        if payments.runs:
            await payments(scope, receive, send)
            return
        payments.bodies.append(b"failed")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("failed")

    app = IdempotencyMiddleware(fail_once)
    with pytest.raises(RuntimeError, match="failed"):
        await send_request(app, before_send=sent.append)
    assert [] == sent
    assert b"run 2" == (await send_request(app)).body
    assert (await send_request(app)).is_replayed


@pytest.mark.parametrize("status", [401, 403, 404, 405, 407, 408, 425, 429, 500, 503])
async def test_retryable_response_is_not_stored(status: int) -> None:
    """A response such as 401 or 503, which a later request may not get, is not stored."""
    payments = PaymentsApp(status)
    app = IdempotencyMiddleware(payments)

    assert status == (await send_request(app)).status
    assert (status, False) == ((second := await send_request(app)).status, second.is_replayed)
    assert 2 == payments.runs


@pytest.mark.parametrize("status", [400, 402, 409, 422])
async def test_other_client_errors_are_stored(status: int) -> None:
    """A 4xx response that depends only on the request is stored."""
    app = IdempotencyMiddleware(PaymentsApp(status))

    await send_request(app)
    assert (status, True) == ((second := await send_request(app)).status, second.is_replayed)


async def test_server_errors_are_stored_with_store_errors() -> None:
    """A 500 response is stored if `store_errors` is True."""
    app = IdempotencyMiddleware(PaymentsApp(500), store_errors=True)

    await send_request(app)
    assert (await send_request(app)).is_replayed


async def test_incomplete_response_releases_the_key() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    middleware = IdempotencyMiddleware(app)
    for _ in range(2):
        response = await send_request(middleware)
        assert ["http.response.start"] == [message["type"] for message in response.messages]


async def test_response_before_an_error_is_stored() -> None:
    """If a handler raises after its response, the response is stored and the error is raised."""
    payments = PaymentsApp()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await payments(scope, receive, send)
        raise RuntimeError("afterwards")

    middleware = IdempotencyMiddleware(app)
    with pytest.raises(RuntimeError, match="afterwards"):
        await send_request(middleware)
    assert (await send_request(middleware)).is_replayed


async def test_incomplete_request_does_not_run() -> None:
    """If the client disconnects before its body is complete, the handler does not run."""
    payments = PaymentsApp()
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError

    app = IdempotencyMiddleware(payments)
    await app(make_scope(headers=[(b"idempotency-key", KEY)]), receive, send)
    assert b"run 1" == (await send_request(app)).body


@pytest.mark.parametrize("make_store", [MemoryStore, FaultyStore])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelled_request_keeps_its_key_until_the_lease_expires(
    backend: str, make_store: Callable[[], MemoryStore]
) -> None:
    """The key of a cancelled request stays claimed, as a thread of its handler may still run."""
    payments = PaymentsApp()

    async def sleep_in_first_run(scope: Scope, receive: Receive, send: Send) -> None:
        if not payments.runs:
            payments.bodies.append(b"cancelled")
            await event_loops.async_sleep(1000)
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(sleep_in_first_run, make_store(), lease=30.0)
        with event_loops.timeout(100):
            await send_request(app)
            pytest.fail("not cancelled")
        assert 409 == (await send_request(app)).status
        await event_loops.async_sleep(30)
        assert b"run 2" == (await send_request(app)).body

    with VirtualClock() as clock:
        (clock.run if backend == "asyncio" else clock.run_trio)(main)


@pytest.mark.parametrize("error", [RuntimeError("failed"), KeyboardInterrupt("failed")])
def test_handler_errors_are_not_wrapped_on_trio(error: BaseException) -> None:
    """On trio the error of a handler is raised without an exception group."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async def main() -> None:
        with pytest.raises(type(error), match=r"^failed$"):
            await send_request(IdempotencyMiddleware(app, FaultyStore()))

    trio.run(main)
