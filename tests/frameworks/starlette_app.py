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

    async def refuse(_request: Request) -> Response:
        shop.pay("refuse")
        raise HTTPException(403)

    async def stream(_request: Request) -> Response:
        return StreamingResponse(shop.chunks(), media_type="text/plain")

    async def leave(request: Request) -> Response:
        await request.body()
        shop.running.set()
        shop.saw_disconnect = await request.is_disconnected()
        return Response()

    async def down(_request: Request) -> Response:
        await shop.down()
        return Response()

    def down_in_thread(_request: Request) -> Response:
        shop.down_in_thread()
        return Response()

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        shop.lifespan_events.append("up")
        yield
        shop.lifespan_events.append("down")

    handlers: dict[str, Any] = {
        "/pay": pay,
        "/wait": wait,
        "/fail": fail,
        "/refuse": refuse,
        "/stream": stream,
        "/leave": leave,
        "/down": down,
        "/down/thread": down_in_thread,
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]
    return Starlette(routes=routes, middleware=list(middleware), lifespan=lifespan)


def make_app_with_middleware(shop: Shop, guard: Any, **options: Any) -> Starlette:
    """Return the application with a middleware in its list."""
    return make_app(shop, [Middleware(guard, **options)])
