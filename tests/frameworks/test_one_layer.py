"""The middleware that keeps retries at one layer, in each framework."""

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


@pytest.mark.parametrize("path", ["/down", "/down/thread"])
def test_failure_after_retries_has_the_header(integration: Integration, path: str) -> None:
    """The failure has X-Should-Retry: false, also for calls in a thread."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, OneRetryLayerMiddleware)) as client:
            response = await client.post(path, headers={"X-Deadline-Ms": "60000"})

        assert 500 <= response.status_code
        assert "false" == response.headers["x-should-retry"]

    asyncio.run(main())
    (left,) = shop.runs
    assert 0 < left <= 60


def test_other_responses_are_unchanged(integration: Integration) -> None:
    """An unrelated error, a refusal and a success have no header."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, OneRetryLayerMiddleware)) as client:
            responses = [await client.post(path) for path in ("/fail", "/refuse", "/stream")]
            paid = await client.post("/pay", json=ORDER)

        assert [500, 403, 200, 201] == [response.status_code for response in [*responses, paid]]
        assert not any("x-should-retry" in response.headers for response in [*responses, paid])

    asyncio.run(main())
    assert ["fail", "refuse", "stream", ORDER] == shop.runs


@pytest.mark.parametrize("integration", DOCUMENTED_INTEGRATIONS, ids=str)
def test_behind_a_real_server(integration: Integration) -> None:
    """The behaviour is the same over sockets, and the application's lifespan runs."""
    shop = Shop()

    async def main() -> None:
        async with open_server_client(integration.build(shop, OneRetryLayerMiddleware)) as client:
            assert 201 == (await client.post("/pay", json=ORDER)).status_code
            assert "false" == (await client.post("/down")).headers["x-should-retry"]

    asyncio.run(main())
    assert [ORDER, None] == shop.runs
    assert (["up", "down"] if integration.has_lifespan else []) == shop.lifespan_events


def test_unrelated_errors_reach_the_error_handlers() -> None:
    """A call that was given up before does not hide an unrelated error."""
    shop = Shop()

    async def handle(_request: Any) -> Response:
        with suppress(ConnectionError):
            await shop.down()
        raise ValueError("a bug")

    async def explain(_request: Any, error: Exception) -> Response:
        return PlainTextResponse(f"it is {error}", 500)

    app = Starlette(
        routes=[Route("/", handle, methods=["POST"])],
        middleware=[Middleware(OneRetryLayerMiddleware)],
        exception_handlers={Exception: explain},
    )

    async def main() -> None:
        async with open_asgi_client(app) as client:
            response = await client.post("/")

        assert (500, "it is a bug") == (response.status_code, response.text)
        assert "x-should-retry" not in response.headers

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_background_tasks_have_no_deadline(streams: bool) -> None:
    """The client's deadline ends with the response; a real server sends streams in another task."""
    shop = Shop()

    async def later() -> None:
        shop.runs.append(tarry.remaining())
        shop.running.set()

    async def handle(_request: Any) -> Response:
        shop.runs.append(tarry.remaining())
        task = BackgroundTask(later)
        if streams:
            return StreamingResponse(shop.chunks(), background=task)
        return PlainTextResponse("one", background=task)

    app = Starlette(
        routes=[Route("/", handle, methods=["POST"])],
        middleware=[Middleware(OneRetryLayerMiddleware)],
    )

    async def main() -> None:
        async with open_server_client(app) as client:
            await client.post("/", headers={"X-Deadline-Ms": "60000"})
            await shop.running.wait()

    asyncio.run(main())
    assert (True, None) == (shop.runs[0] is not None, shop.runs[-1])
