"""Specific features: mounts and background tasks of Starlette, CSRF checks of Django."""

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


def mounted(shop: Shop, *middleware: Middleware) -> Starlette:
    """Return a shop below a path, with a background task after each response."""

    async def pay(request: Request) -> Response:
        paid = shop.pay(await request.json())
        return JSONResponse(paid, 201, background=BackgroundTask(shop.runs.append, "!"))

    routes = [Mount("/v1", routes=[Route("/pay", pay, methods=["POST"])])]
    return Starlette(routes=routes, middleware=list(middleware))


def test_starlette_runs_background_tasks_once() -> None:
    """A stored response runs no background task; paths are those that the client sees."""
    shop = Shop()

    async def main() -> None:
        app = mounted(shop, Middleware(IdempotencyMiddleware, require_key=["/v1/*"]))
        async with open_asgi_client(app) as client:
            for _ in range(2):
                assert 201 == (await client.post("/v1/pay", json=ORDER)).status_code
            del client.headers["Idempotency-Key"]
            assert 400 == (await client.post("/v1/pay", json=ORDER)).status_code

    asyncio.run(main())
    assert [ORDER, "!"] == shop.runs


@pytest.mark.parametrize("outside", [True, False])
def test_starlette_beside_other_middleware(outside: bool) -> None:
    """It works outside or inside of a middleware that runs the application in its own task."""

    async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    shop = Shop()
    both = [Middleware(BaseHTTPMiddleware, dispatch=pass_on), Middleware(IdempotencyMiddleware)]

    async def main() -> None:
        async with open_asgi_client(
            mounted(shop, *(reversed(both) if outside else both))
        ) as client:
            await client.post("/v1/pay", json=ORDER)
            second = await client.post("/v1/pay", json=ORDER)
        assert "true" == second.headers["idempotent-replayed"]

    asyncio.run(main())
    assert [ORDER, "!"] == shop.runs


def test_litestar_creates_a_middleware_for_each_route() -> None:
    """Each route has its own store, unless one is passed."""
    middlewares: list[IdempotencyMiddleware] = []

    def counted(app: App) -> IdempotencyMiddleware:
        middlewares.append(IdempotencyMiddleware(app))
        return middlewares[-1]

    litestar_app.make_app_with_middleware(Shop(), counted)

    assert len(middlewares) == len({id(middleware._store) for middleware in middlewares}) > 1


def test_django_csrf_check_runs_inside() -> None:
    """Its 403 is not stored, so a valid token succeeds; a stored response needs no token."""
    shop = Shop()
    token = "a" * 32
    right = {"X-CSRFToken": token, "Cookie": f"csrftoken={token}"}

    async def main() -> None:
        async with open_asgi_client(IdempotencyMiddleware(django_app.make_app(shop))) as client:
            forged = await client.post("/form", json=ORDER)
            paid = await client.post("/form", json=ORDER, headers=right)
            again = await client.post("/form", json=ORDER)

        assert [403, 201, 201] == [one.status_code for one in (forged, paid, again)]
        assert "true" == again.headers["idempotent-replayed"]

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_django_sync_view_completes_after_a_disconnect() -> None:
    """A disconnect does not stop the thread, and the retry gets the stored response."""
    shop = Shop()
    go_on = Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def pay(_request: HttpRequest) -> HttpResponse:
            shop.pay("plain")
            loop.call_soon_threadsafe(shop.running.set)
            assert go_on.wait(CLIENT_TIMEOUT_S)
            return HttpResponse(status=201)

        app = IdempotencyMiddleware(django_app.make_app(shop, plain=pay))
        disconnected = asyncio.create_task(send_and_disconnect(app, "/plain", shop))
        await shop.running.wait()
        await run_pending_callbacks()
        go_on.set()
        await disconnected
        async with open_asgi_client(app) as client:
            again = await client.post("/plain", content=b"{}")
        assert "true" == again.headers["idempotent-replayed"]

    asyncio.run(main())
    assert ["plain"] == shop.runs


def test_thread_of_a_cancelled_request_keeps_its_key() -> None:
    """A sync handler goes on in its thread after a cancellation, so its key is not free."""
    shop = Shop()
    go_on = Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        app = FastAPI()

        def pay() -> None:
            shop.pay("plain")
            loop.call_soon_threadsafe(shop.running.set)
            assert go_on.wait(CLIENT_TIMEOUT_S)

        app.post("/plain")(pay)
        app.add_middleware(IdempotencyMiddleware)
        async with open_asgi_client(app) as client:
            cut_off = asyncio.create_task(client.post("/plain"))
            await shop.running.wait()
            cut_off.cancel()
            await asyncio.gather(cut_off, return_exceptions=True)
            again = await client.post("/plain")
            go_on.set()
        assert 409 == again.status_code

    asyncio.run(main())
    assert ["plain"] == shop.runs
