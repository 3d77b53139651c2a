"""The middleware inside real frameworks, asked by a real client; and what importing it costs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

import tarry.idempotency
from tarry.idempotency import IdempotencyMiddleware, SqliteStore
from tarry.wire.asgi import App

KEY = {"Idempotency-Key": '"4f2a"'}


async def post(app: App, path: str, times: int, body: object = None) -> list[httpx.Response]:
    """Send the same request several times, at the same moment."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await asyncio.gather(
            *(client.post(path, json=body, headers=KEY) for _ in range(times))
        )


def starlette_app(runs: list[object], *middleware: Middleware) -> Starlette:
    """A shop in Starlette."""

    async def pay(request: Request) -> Response:
        runs.append(await request.json())
        response = JSONResponse(
            {"run": len(runs)}, 201, background=BackgroundTask(runs.append, "!")
        )
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        return response

    async def stream(request: Request) -> Response:
        runs.append("stream")
        return StreamingResponse((str(number) for number in range(3)), media_type="text/plain")

    routes = [Route("/pay", pay, methods=["POST"]), Route("/stream", stream, methods=["POST"])]
    return Starlette(routes=[Mount("/v1", routes=routes)], middleware=list(middleware))


def test_starlette() -> None:
    """Cookies, bodies and background tasks are as they were; the replay differs by its mark."""
    runs: list[object] = []
    app = starlette_app(runs, Middleware(IdempotencyMiddleware, required=["/v1/*"]))

    async def main() -> None:
        (first,) = await post(app, "/v1/pay", 1, {"amount": 1})
        (second,) = await post(app, "/v1/pay", 1, {"amount": 1})

        assert (201, {"run": 1}) == (first.status_code, first.json())
        assert [*first.headers.raw, (b"idempotent-replayed", b"true")] == second.headers.raw
        assert first.content == second.content

    asyncio.run(main())
    assert [{"amount": 1}, "!"] == runs


def test_starlette_stream() -> None:
    """A stream of unknown length that stays below the limit is kept whole."""
    runs: list[object] = []
    app = starlette_app(runs, Middleware(IdempotencyMiddleware))

    async def main() -> None:
        for _ in range(2):
            (answer,) = await post(app, "/v1/stream", 1)
            assert (200, "012") == (answer.status_code, answer.text)

    asyncio.run(main())
    assert ["stream"] == runs


@pytest.mark.parametrize("outside", [True, False])
def test_beside_other_middleware(outside: bool) -> None:
    """It stands outside or inside of one that runs the application in a task of its own."""

    async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    runs: list[object] = []
    both = [Middleware(BaseHTTPMiddleware, dispatch=pass_on), Middleware(IdempotencyMiddleware)]
    app = starlette_app(runs, *(reversed(both) if outside else both))

    async def main() -> None:
        await post(app, "/v1/pay", 1, {"amount": 1})
        (second,) = await post(app, "/v1/pay", 1, {"amount": 1})
        assert "true" == second.headers["idempotent-replayed"]

    asyncio.run(main())
    assert [{"amount": 1}, "!"] == runs


def test_fastapi_with_a_crowd(tmp_path: Path) -> None:
    """Of fifty requests at once one runs; the others get its answer or are asked to come again."""
    runs: list[int] = []
    api = FastAPI()

    @api.post("/pay", status_code=201)
    async def pay(order: dict[str, int]) -> dict[str, int]:
        runs.append(order["amount"])
        return {"run": len(runs)}

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        app = IdempotencyMiddleware(api, store)
        answers = await post(app, "/pay", 50, {"amount": 7})
        await store.close()

        assert {"run": 1} in [answer.json() for answer in answers]
        assert {201, 409} >= {answer.status_code for answer in answers}

    asyncio.run(main())
    assert [7] == runs


def test_import_loads_no_third_party() -> None:
    """The middleware and its built-in stores need nothing but the standard library."""
    program = """
import json, sys
import tarry.idempotency
few = "asyncio" in sys.modules
from tarry.idempotency import IdempotencyMiddleware, MemoryStore, SqliteStore, Store
print(json.dumps([few, [name.partition(".")[0] for name in sys.modules]]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    few, loaded = json.loads(done.stdout)

    assert not few
    for package in ("starlette", "httpx", "trio", "anyio", "redis", "psycopg", "asyncpg"):
        assert package not in loaded


def test_names_resolve() -> None:
    """Each public name is there, and another is an attribute error."""
    names = tarry.idempotency.__all__

    assert sorted(set(names)) == names
    assert names == dir(tarry.idempotency)
    for name in names:
        assert name == getattr(tarry.idempotency, name).__name__
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(tarry.idempotency, "no_such_name")  # noqa: B009 - the type checker knows better
