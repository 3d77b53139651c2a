"""A handler behind the middleware that calls another service: it takes effect there once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

import httpx
import pytest

from tarry.adapters.httpx import AsyncRetryTransport
from tarry.idempotency import IdempotencyMiddleware, derive_key
from tarry.runtime.derived_keys import KeyedRequest, current_request
from tarry.wire.http import App, Receive, Scope, Send
from tests.idempotency.asgi_client import PaymentsApp, send_request

ALICE = [(b"authorization", b"Bearer alice")]
BOB = [(b"authorization", b"Bearer bob")]

Order = Callable[[httpx.AsyncClient], Awaitable[object]]


async def order_once(client: httpx.AsyncClient) -> None:
    """Make one payment, with a key from the adapter."""
    await client.post("/payments", content=b"10 EUR")


async def order_twice(client: httpx.AsyncClient) -> None:
    """Make two equal payments, with keys from the adapter."""
    await order_once(client)
    await order_once(client)


async def order_with_named_key(client: httpx.AsyncClient) -> None:
    """Make one payment, with a key for a name."""
    headers = {"Idempotency-Key": derive_key("pay")}
    await client.post("/payments", content=b"10 EUR", headers=headers)


def fail_in_first_run(payments: PaymentsApp, order: Order) -> App:
    """Return an application that pays in each run, and fails after the payment in the first."""
    runs: list[Scope] = []
    upstream = httpx.ASGITransport(IdempotencyMiddleware(payments))
    transport = AsyncRetryTransport(upstream, idempotency_key="auto")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://pay.example") as client:
            await order(client)
        runs.append(scope)
        if len(runs) == 1:
            raise RuntimeError("the database is not reachable")
        await PaymentsApp()(scope, receive, send)

    return app


@pytest.mark.parametrize(
    ("order", "payments_per_run"), [(order_once, 1), (order_twice, 2), (order_with_named_key, 1)]
)
async def test_a_handler_that_runs_again_pays_once(order: Order, payments_per_run: int) -> None:
    """The second run of a request repeats its calls with the keys of the first run."""
    payments = PaymentsApp()

    app = IdempotencyMiddleware(fail_in_first_run(payments, order))
    with pytest.raises(RuntimeError, match="the database"):
        await send_request(app, path="/orders")
    assert 201 == (await send_request(app, path="/orders")).status
    assert payments_per_run == payments.runs


@pytest.mark.parametrize("order", [order_once, order_with_named_key])
@pytest.mark.parametrize(
    "other", [{"key": b"other"}, {"headers": BOB}, {"path": "/subscriptions"}, {"key": None}]
)
async def test_another_request_pays_again(order: Order, other: dict[str, Any]) -> None:
    """A request with another key, caller or path, or without a key, makes its own payments."""
    payments = PaymentsApp()

    app = IdempotencyMiddleware(fail_in_first_run(payments, order))
    with pytest.raises(RuntimeError, match="the database"):
        await send_request(app, path="/orders", headers=ALICE)
    await send_request(app, **{"path": "/orders", "headers": ALICE, **other})
    assert 2 == payments.runs


async def test_request_ends_with_its_handler() -> None:
    """The context has no current request before and after a request, also if the handler raises."""
    are_set: list[bool] = []

    async def app(*_: object) -> None:
        are_set.append(current_request.get() is not None)
        raise RuntimeError

    for key in (b"a", None):
        with pytest.raises(RuntimeError):
            await send_request(IdempotencyMiddleware(app), key=key)
        are_set.append(current_request.get() is not None)
    assert [True, False, False, False] == (are_set)


async def test_closed_request_leaves_other_contexts_unchanged() -> None:
    """A request that is closed in another context does not change the current request there."""

    async def app(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    request = send_request(IdempotencyMiddleware(app))
    copy_context().run(request.send, None)
    other_request = KeyedRequest("other")
    token = current_request.set(other_request)
    request.close()

    assert other_request is current_request.get()
    current_request.reset(token)
