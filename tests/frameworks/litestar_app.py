"""The shop in Litestar."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from litestar import Litestar, Request, Response, post
from litestar.exceptions import PermissionDeniedException
from litestar.middleware import DefineMiddleware
from litestar.params import JSONBody
from litestar.response import Stream

from tarry.wire.http import App
from tests.frameworks.shop import Shop


@dataclass
class Order:
    """A request body."""

    amount: int
    note: str


def make_litestar(shop: Shop, middleware: Sequence[DefineMiddleware] = ()) -> Litestar:
    """Return the application as a Litestar object."""

    @post("/pay")
    async def pay(data: JSONBody[Order]) -> Response[dict[str, int]]:
        paid = shop.pay(asdict(data))
        response = Response(paid, headers={"X-Payment": str(paid["payment"])})
        response.set_cookie("basket", "empty")
        return response

    @post("/wait")
    async def wait() -> dict[str, int]:
        return await shop.wait()

    @post("/fail")
    async def fail() -> dict[str, int]:
        return shop.fail()

    @post("/forbidden")
    async def forbid() -> None:
        shop.pay("forbidden")
        raise PermissionDeniedException

    @post("/stream", status_code=200)
    async def stream() -> Stream:
        return Stream(shop.chunks(), media_type="text/plain")

    @post("/disconnect")
    async def wait_for_disconnect(request: Request[Any, Any, Any]) -> None:
        await request.body()
        shop.handler_started.set()
        shop.saw_disconnect = (await request.receive())["type"] == "http.disconnect"

    @post("/give-up")
    async def give_up() -> None:
        await shop.give_up_call()

    @post("/give-up/thread", sync_to_thread=True)
    def give_up_in_thread() -> None:
        shop.give_up_call_in_thread()

    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncGenerator[None]:
        shop.lifespan_events.append("startup")
        yield
        shop.lifespan_events.append("shutdown")

    return Litestar(
        [pay, wait, fail, forbid, stream, wait_for_disconnect, give_up, give_up_in_thread],
        middleware=middleware,
        lifespan=[lifespan],
        openapi_config=None,
        logging_config=None,
    )


def make_app(shop: Shop) -> App:
    """Return the application."""
    return make_litestar(shop)


def make_app_with_middleware(shop: Shop, middleware_class: Any, **options: Any) -> App:
    """Return the application with a middleware in its `middleware` list."""
    return make_litestar(shop, [DefineMiddleware(middleware_class, **options)])
