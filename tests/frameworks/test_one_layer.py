"""The middleware of one layer in every framework."""

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
from tests.frameworks.shop import Shop, client_of, served
from tests.frameworks.ways import ONE_OF_EACH, Way

ORDER = {"amount": 7, "note": "for one"}


@pytest.mark.parametrize("path", ["/down", "/down/thread"])
def test_a_call_given_up_on_is_told(way: Way, path: str) -> None:
    """The failure says not to retry, made by the framework or by us; threads know it, too."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, OneRetryLayerMiddleware)) as client:
            answer = await client.post(path, headers={"X-Deadline-Ms": "60000"})

        assert 500 <= answer.status_code
        assert "false" == answer.headers["x-should-retry"]

    asyncio.run(main())
    (left,) = shop.runs
    assert 0 < left <= 60


def test_other_answers_are_left_alone(way: Way) -> None:
    """A bug of the handler's own, a refusal and a success say nothing about retries."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, OneRetryLayerMiddleware)) as client:
            answers = [await client.post(path) for path in ("/fail", "/refuse", "/stream")]
            paid = await client.post("/pay", json=ORDER)

        assert [500, 403, 200, 201] == [answer.status_code for answer in [*answers, paid]]
        assert not any("x-should-retry" in answer.headers for answer in [*answers, paid])

    asyncio.run(main())
    assert ["fail", "refuse", "stream", ORDER] == shop.runs


@pytest.mark.parametrize("way", ONE_OF_EACH, ids=str)
def test_behind_a_real_server(way: Way) -> None:
    """Over sockets all is the same; and the lifespan of the application is what it was."""
    shop = Shop()

    async def main() -> None:
        async with served(way.build(shop, OneRetryLayerMiddleware)) as client:
            assert 201 == (await client.post("/pay", json=ORDER)).status_code
            assert "false" == (await client.post("/down")).headers["x-should-retry"]

    asyncio.run(main())
    assert [ORDER, None] == shop.runs
    assert (["up", "down"] if way.has_lifespan else []) == shop.lives


def test_the_applications_own_errors_are_its_own() -> None:
    """A call that a handler can do without does not hide a bug from the error handlers."""
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
        async with client_of(app) as client:
            answer = await client.post("/")

        assert (500, "it is a bug") == (answer.status_code, answer.text)
        assert "x-should-retry" not in answer.headers

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_background_tasks_have_their_own_time(streams: bool) -> None:
    """The client's deadline ends with its answer; a real server sends streams in another task."""
    shop = Shop()

    async def later() -> None:
        shop.runs.append(tarry.remaining())
        shop.running.set()

    async def handle(_request: Any) -> Response:
        shop.runs.append(tarry.remaining())
        task = BackgroundTask(later)
        if streams:
            return StreamingResponse(shop.pieces(), background=task)
        return PlainTextResponse("one", background=task)

    app = Starlette(
        routes=[Route("/", handle, methods=["POST"])],
        middleware=[Middleware(OneRetryLayerMiddleware)],
    )

    async def main() -> None:
        async with served(app) as client:
            await client.post("/", headers={"X-Deadline-Ms": "60000"})
            await shop.running.wait()

    asyncio.run(main())
    assert (True, None) == (shop.runs[0] is not None, shop.runs[-1])
