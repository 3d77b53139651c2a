"""The shop in Starlette."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.frameworks.shop import Shop


def make_app(shop: Shop, middleware: Sequence[Middleware] = ()) -> Starlette:
    """Return the application."""

    async def pay(request: Request) -> Response:
        paid = shop.pay(await request.json())
        response = JSONResponse(paid, 201, headers={"X-Payment": str(paid["payment"])})
        response.set_cookie("basket", "empty")
        return response

    async def wait(_request: Request) -> Response:
        return JSONResponse(await shop.wait(), 201)

    async def fail(_request: Request) -> Response:
        return JSONResponse(shop.fail(), 201)

    async def forbid(_request: Request) -> Response:
        shop.pay("forbidden")
        raise HTTPException(403)

    async def stream(_request: Request) -> Response:
        return StreamingResponse(shop.chunks(), media_type="text/plain")

    async def wait_for_disconnect(request: Request) -> Response:
        await request.body()
        shop.handler_started.set()
        shop.saw_disconnect = await request.is_disconnected()
        return Response()

    async def give_up(_request: Request) -> Response:
        await shop.give_up_call()
        return Response()

    def give_up_in_thread(_request: Request) -> Response:
        shop.give_up_call_in_thread()
        return Response()

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        shop.lifespan_events.append("startup")
        yield
        shop.lifespan_events.append("shutdown")

    handlers: dict[str, Any] = {
        "/pay": pay,
        "/wait": wait,
        "/fail": fail,
        "/forbidden": forbid,
        "/stream": stream,
        "/disconnect": wait_for_disconnect,
        "/give-up": give_up,
        "/give-up/thread": give_up_in_thread,
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]
    return Starlette(routes=routes, middleware=list(middleware), lifespan=lifespan)


def make_app_with_middleware(shop: Shop, middleware_class: Any, **options: Any) -> Starlette:
    """Return the application with a middleware in its `middleware` list."""
    return make_app(shop, [Middleware(middleware_class, **options)])
