"""The shop in FastAPI."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from tests.frameworks.shop import Shop


class Order(BaseModel):
    """A request body."""

    amount: int
    note: str


def make_app(shop: Shop) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        shop.lifespan_events.append("startup")
        yield
        shop.lifespan_events.append("shutdown")

    app = FastAPI(lifespan=lifespan)

    @app.post("/pay", status_code=201)
    async def pay(order: Order, response: Response) -> dict[str, int]:
        paid = shop.pay(order.model_dump())
        response.headers["X-Payment"] = str(paid["payment"])
        response.set_cookie("basket", "empty")
        return paid

    @app.post("/wait", status_code=201)
    async def wait() -> dict[str, int]:
        return await shop.wait()

    @app.post("/fail", status_code=201)
    async def fail() -> dict[str, int]:
        return shop.fail()

    @app.post("/forbidden")
    async def forbid() -> None:
        shop.pay("forbidden")
        raise HTTPException(403)

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(shop.chunks(), media_type="text/plain")

    @app.post("/disconnect")
    async def wait_for_disconnect(request: Request) -> None:
        await request.body()
        shop.handler_started.set()
        shop.saw_disconnect = await request.is_disconnected()

    @app.post("/give-up")
    async def give_up() -> None:
        await shop.give_up_call()

    @app.post("/give-up/thread")
    def give_up_in_thread() -> None:
        shop.give_up_call_in_thread()

    return app


def make_app_with_middleware(shop: Shop, middleware_class: Any, **options: Any) -> FastAPI:
    """Return the application with a middleware added by `add_middleware`."""
    app = make_app(shop)
    app.add_middleware(middleware_class, **options)
    return app
