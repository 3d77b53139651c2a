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

    @post("/refuse")
    async def refuse() -> None:
        shop.pay("refuse")
        raise PermissionDeniedException

    @post("/stream", status_code=200)
    async def stream() -> Stream:
        return Stream(shop.chunks(), media_type="text/plain")

    @post("/leave")
    async def leave(request: Request[Any, Any, Any]) -> None:
        await request.body()
        shop.running.set()
        shop.saw_disconnect = (await request.receive())["type"] == "http.disconnect"

    @post("/down")
    async def down() -> None:
        await shop.down()

    @post("/down/thread", sync_to_thread=True)
    def down_in_thread() -> None:
        shop.down_in_thread()

    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncGenerator[None]:
        shop.lifespan_events.append("up")
        yield
        shop.lifespan_events.append("down")

    return Litestar(
        [pay, wait, fail, refuse, stream, leave, down, down_in_thread],
        middleware=middleware,
        lifespan=[lifespan],
        openapi_config=None,
        logging_config=None,
    )


def make_app(shop: Shop) -> App:
    """Return the application."""
    return make_litestar(shop)


def make_app_with_middleware(shop: Shop, guard: Any, **options: Any) -> App:
    """Return the application with a middleware in its list."""
    return make_litestar(shop, [DefineMiddleware(guard, **options)])
