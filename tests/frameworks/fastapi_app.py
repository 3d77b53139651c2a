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
        shop.lifespan_events.append("up")
        yield
        shop.lifespan_events.append("down")

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

    @app.post("/refuse")
    async def refuse() -> None:
        shop.pay("refuse")
        raise HTTPException(403)

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(shop.chunks(), media_type="text/plain")

    @app.post("/leave")
    async def leave(request: Request) -> None:
        await request.body()
        shop.running.set()
        shop.saw_disconnect = await request.is_disconnected()

    @app.post("/down")
    async def down() -> None:
        await shop.down()

    @app.post("/down/thread")
    def down_in_thread() -> None:
        shop.down_in_thread()

    return app


def make_app_with_middleware(shop: Shop, guard: Any, **options: Any) -> FastAPI:
    """Return the application with an added middleware."""
    app = make_app(shop)
    app.add_middleware(guard, **options)
    return app
