"""What only one framework has: mounts and tasks of Starlette's, Django's guard against forgery."""

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
from tarry.wire.asgi import App
from tests.frameworks import in_django, in_litestar
from tests.frameworks.shop import PATIENCE, Shop, ask_and_leave, client_of, turns

ORDER = {"amount": 7, "note": "for one"}


def mounted(shop: Shop, *middleware: Middleware) -> Starlette:
    """A shop below a path, that does something after each answer."""

    async def pay(request: Request) -> Response:
        paid = shop.pay(await request.json())
        return JSONResponse(paid, 201, background=BackgroundTask(shop.runs.append, "!"))

    routes = [Mount("/v1", routes=[Route("/pay", pay, methods=["POST"])])]
    return Starlette(routes=routes, middleware=list(middleware))


def test_starlette_runs_background_tasks_once() -> None:
    """A replay has no work to do after it; and paths are those that the client sees."""
    shop = Shop()

    async def main() -> None:
        app = mounted(shop, Middleware(IdempotencyMiddleware, require_key=["/v1/*"]))
        async with client_of(app) as client:
            for _ in range(2):
                assert 201 == (await client.post("/v1/pay", json=ORDER)).status_code
            del client.headers["Idempotency-Key"]
            assert 400 == (await client.post("/v1/pay", json=ORDER)).status_code

    asyncio.run(main())
    assert [ORDER, "!"] == shop.runs


@pytest.mark.parametrize("outside", [True, False])
def test_starlette_beside_other_middleware(outside: bool) -> None:
    """It stands outside or inside of one that runs the application in a task of its own."""

    async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    shop = Shop()
    both = [Middleware(BaseHTTPMiddleware, dispatch=pass_on), Middleware(IdempotencyMiddleware)]

    async def main() -> None:
        async with client_of(mounted(shop, *(reversed(both) if outside else both))) as client:
            await client.post("/v1/pay", json=ORDER)
            second = await client.post("/v1/pay", json=ORDER)
        assert "true" == second.headers["idempotent-replayed"]

    asyncio.run(main())
    assert [ORDER, "!"] == shop.runs


def test_litestar_makes_a_middleware_for_each_route() -> None:
    """So each route has a store of its own, unless they are given one."""
    made: list[IdempotencyMiddleware] = []

    def counted(app: App) -> IdempotencyMiddleware:
        made.append(IdempotencyMiddleware(app))
        return made[-1]

    in_litestar.listed(Shop(), counted)

    assert len(made) == len({id(one._store) for one in made}) > 1


def test_django_refuses_forgeries_inside() -> None:
    """Its 403 is not kept, so the right token does; and a replay asks for no token."""
    shop = Shop()
    token = "a" * 32
    right = {"X-CSRFToken": token, "Cookie": f"csrftoken={token}"}

    async def main() -> None:
        async with client_of(IdempotencyMiddleware(in_django.app_of(shop))) as client:
            forged = await client.post("/form", json=ORDER)
            paid = await client.post("/form", json=ORDER, headers=right)
            again = await client.post("/form", json=ORDER)

        assert [403, 201, 201] == [one.status_code for one in (forged, paid, again)]
        assert "true" == again.headers["idempotent-replayed"]

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_django_keeps_the_answer_of_a_plain_view() -> None:
    """A client that goes away does not stop the thread, and its retry gets what that made."""
    shop = Shop()
    go_on = Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def pay(_request: HttpRequest) -> HttpResponse:
            shop.pay("plain")
            loop.call_soon_threadsafe(shop.running.set)
            assert go_on.wait(PATIENCE)
            return HttpResponse(status=201)

        app = IdempotencyMiddleware(in_django.app_of(shop, plain=pay))
        lost = asyncio.create_task(ask_and_leave(app, "/plain", shop))
        await shop.running.wait()
        await turns()
        go_on.set()
        await lost
        async with client_of(app) as client:
            again = await client.post("/plain", content=b"{}")
        assert "true" == again.headers["idempotent-replayed"]

    asyncio.run(main())
    assert ["plain"] == shop.runs


def test_a_thread_of_a_cancelled_request_runs_alone() -> None:
    """A plain handler goes on in its thread when its request is cancelled: its key is not free."""
    shop = Shop()
    go_on = Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        app = FastAPI()

        def pay() -> None:
            shop.pay("plain")
            loop.call_soon_threadsafe(shop.running.set)
            assert go_on.wait(PATIENCE)

        app.post("/plain")(pay)
        app.add_middleware(IdempotencyMiddleware)
        async with client_of(app) as client:
            cut_off = asyncio.create_task(client.post("/plain"))
            await shop.running.wait()
            cut_off.cancel()
            await asyncio.gather(cut_off, return_exceptions=True)
            again = await client.post("/plain")
            go_on.set()
        assert 409 == again.status_code

    asyncio.run(main())
    assert ["plain"] == shop.runs
