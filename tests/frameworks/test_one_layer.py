"""`OneRetryLayerMiddleware` in each framework."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import tarry
from tarry.adapters.asgi import OneRetryLayerMiddleware
from tests.frameworks.integrations import DOCUMENTED_INTEGRATIONS, Integration
from tests.frameworks.shop import Shop, open_asgi_client, open_server_client

ORDER = {"amount": 7, "note": "for one"}


@pytest.mark.parametrize("path", ["/give-up", "/give-up/thread"])
async def test_failure_after_retries_has_the_header(integration: Integration, path: str) -> None:
    """The response after a given-up call has X-Should-Retry: false, also for calls in a thread."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, OneRetryLayerMiddleware)) as client:
        response = await client.post(path, headers={"X-Deadline-Ms": "60000"})

    assert 500 <= response.status_code
    assert "false" == response.headers["x-should-retry"]
    (remaining,) = shop.runs
    assert 0 < remaining <= 60


async def test_other_responses_are_unchanged(integration: Integration) -> None:
    """The responses to an unrelated error, a 403 and a success have no X-Should-Retry."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, OneRetryLayerMiddleware)) as client:
        responses = [await client.post(path) for path in ("/fail", "/forbidden", "/stream")]
        paid = await client.post("/pay", json=ORDER)

    assert [500, 403, 200, 201] == [response.status_code for response in [*responses, paid]]
    assert not any("x-should-retry" in response.headers for response in [*responses, paid])
    assert ["fail", "forbidden", "stream", ORDER] == shop.runs


@pytest.mark.parametrize("integration", DOCUMENTED_INTEGRATIONS, ids=str)
async def test_real_server(integration: Integration) -> None:
    """The middleware works in a real server, and the lifespan of the application runs."""
    shop = Shop()

    async with open_server_client(integration.build(shop, OneRetryLayerMiddleware)) as client:
        assert 201 == (await client.post("/pay", json=ORDER)).status_code
        assert "false" == (await client.post("/give-up")).headers["x-should-retry"]
    assert [ORDER, None] == shop.runs
    assert (["startup", "shutdown"] if integration.has_lifespan else []) == shop.lifespan_events


async def test_unrelated_errors_reach_the_error_handlers() -> None:
    """An unrelated error after a given-up call reaches the exception handler of Starlette."""
    shop = Shop()

    async def handle(_request: Any) -> Response:
        with suppress(ConnectionError):
            await shop.give_up_call()
        raise ValueError("a bug")

    async def handle_error(_request: Any, error: Exception) -> Response:
        return PlainTextResponse(f"error: {error}", 500)

    app = Starlette(
        routes=[Route("/", handle, methods=["POST"])],
        middleware=[Middleware(OneRetryLayerMiddleware)],
        exception_handlers={Exception: handle_error},
    )

    async with open_asgi_client(app) as client:
        response = await client.post("/")

    assert (500, "error: a bug") == (response.status_code, response.text)
    assert "x-should-retry" not in response.headers


@pytest.mark.parametrize("streams", [False, True])
async def test_background_tasks_have_no_deadline(streams: bool) -> None:
    """A background task has no deadline, also if Starlette sends the response in another task."""
    shop = Shop()
    background_done = asyncio.Event()

    async def run_in_background() -> None:
        shop.runs.append(tarry.remaining())
        background_done.set()

    async def handle(_request: Any) -> Response:
        shop.runs.append(tarry.remaining())
        task = BackgroundTask(run_in_background)
        if streams:
            return StreamingResponse(shop.chunks(), background=task)
        return PlainTextResponse("one", background=task)

    app = Starlette(
        routes=[Route("/", handle, methods=["POST"])],
        middleware=[Middleware(OneRetryLayerMiddleware)],
    )

    async with open_server_client(app) as client:
        await client.post("/", headers={"X-Deadline-Ms": "60000"})
        await background_done.wait()
    assert (True, None) == (shop.runs[0] is not None, shop.runs[-1])
