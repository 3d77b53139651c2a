"""Features of one framework: mounts and background tasks of Starlette, CSRF checks of Django."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest
from django.http import HttpRequest, HttpResponse  # type: ignore[import-untyped]
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from tarry.idempotency import IdempotencyMiddleware
from tarry.wire.http import App
from tests.frameworks import django_app, litestar_app
from tests.frameworks.shop import (
    CLIENT_TIMEOUT_S,
    Shop,
    open_asgi_client,
    run_pending_callbacks,
    send_and_disconnect,
)

ORDER = {"amount": 7, "note": "for one"}


def make_mounted_app(shop: Shop, *middleware: Middleware) -> Starlette:
    """Return a shop that is mounted at /v1, with a background task after each payment."""

    async def pay(request: Request) -> Response:
        paid = shop.pay(await request.json())
        return JSONResponse(paid, 201, background=BackgroundTask(shop.runs.append, "background"))

    routes = [Mount("/v1", routes=[Route("/pay", pay, methods=["POST"])])]
    return Starlette(routes=routes, middleware=list(middleware))


async def test_starlette_runs_background_tasks_once() -> None:
    """A stored response runs no background task; `require_key` takes the path of the request."""
    shop = Shop()

    app = make_mounted_app(shop, Middleware(IdempotencyMiddleware, require_key=["/v1/*"]))
    async with open_asgi_client(app) as client:
        for _ in range(2):
            assert 201 == (await client.post("/v1/pay", json=ORDER)).status_code
        del client.headers["Idempotency-Key"]
        assert 400 == (await client.post("/v1/pay", json=ORDER)).status_code
    assert [ORDER, "background"] == shop.runs


@pytest.mark.parametrize("outermost", [True, False])
async def test_starlette_with_another_middleware(outermost: bool) -> None:
    """The middleware works outside or inside of a `BaseHTTPMiddleware`."""

    async def forward(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    shop = Shop()
    middlewares = [
        Middleware(BaseHTTPMiddleware, dispatch=forward),
        Middleware(IdempotencyMiddleware),
    ]

    async with open_asgi_client(
        make_mounted_app(shop, *(reversed(middlewares) if outermost else middlewares))
    ) as client:
        await client.post("/v1/pay", json=ORDER)
        second = await client.post("/v1/pay", json=ORDER)
    assert "true" == second.headers["idempotent-replayed"]
    assert [ORDER, "background"] == shop.runs


def test_litestar_creates_a_middleware_for_each_route() -> None:
    """Litestar creates a middleware for each route, with its own store if none is passed."""
    middlewares: list[IdempotencyMiddleware] = []

    def make_middleware(app: App) -> IdempotencyMiddleware:
        middlewares.append(IdempotencyMiddleware(app))
        return middlewares[-1]

    litestar_app.make_app_with_middleware(Shop(), make_middleware)

    assert len(middlewares) == len({id(middleware._store) for middleware in middlewares}) > 1


async def test_django_csrf_rejection_is_not_stored() -> None:
    """The 403 of a CSRF check is not stored; a stored response is sent without a CSRF check."""
    shop = Shop()
    token = "a" * 32
    valid_headers = {"X-CSRFToken": token, "Cookie": f"csrftoken={token}"}

    async with open_asgi_client(IdempotencyMiddleware(django_app.make_app(shop))) as client:
        without_token = await client.post("/form", json=ORDER)
        paid = await client.post("/form", json=ORDER, headers=valid_headers)
        retried = await client.post("/form", json=ORDER)

    assert [403, 201, 201] == [response.status_code for response in (without_token, paid, retried)]
    assert "true" == retried.headers["idempotent-replayed"]
    assert [ORDER] == shop.runs


async def test_django_sync_view_completes_after_a_disconnect() -> None:
    """A sync view completes in its thread after a disconnect; a retry gets its response."""
    shop = Shop()
    resume = Event()

    loop = asyncio.get_running_loop()

    def pay(_request: HttpRequest) -> HttpResponse:
        shop.pay("sync")
        loop.call_soon_threadsafe(shop.handler_started.set)
        assert resume.wait(CLIENT_TIMEOUT_S)
        return HttpResponse(status=201)

    app = IdempotencyMiddleware(django_app.make_app(shop, sync=pay))
    disconnected = asyncio.create_task(send_and_disconnect(app, "/sync", shop))
    await shop.handler_started.wait()
    await run_pending_callbacks()
    resume.set()
    await disconnected
    async with open_asgi_client(app) as client:
        retried = await client.post("/sync", content=b"{}")
    assert "true" == retried.headers["idempotent-replayed"]
    assert ["sync"] == shop.runs


async def test_cancelled_sync_handler_keeps_its_key() -> None:
    """The key of a cancelled request stays claimed, because the handler runs on in its thread."""
    shop = Shop()
    resume = Event()

    loop = asyncio.get_running_loop()
    app = FastAPI()

    def pay() -> None:
        shop.pay("sync")
        loop.call_soon_threadsafe(shop.handler_started.set)
        assert resume.wait(CLIENT_TIMEOUT_S)

    app.post("/sync")(pay)
    app.add_middleware(IdempotencyMiddleware)
    async with open_asgi_client(app) as client:
        cancelled = asyncio.create_task(client.post("/sync"))
        await shop.handler_started.wait()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        retried = await client.post("/sync")
        resume.set()
    assert 409 == retried.status_code
    assert ["sync"] == shop.runs
