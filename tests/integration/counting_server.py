"""A server process whose handler appends a line to the file RUNS for each run, and may hang.

python -m tests.integration.counting_server FD ENGINE ADDRESS NAME RUNS LEASE respond|hang
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tarry.idempotency import IdempotencyMiddleware, IdempotencyStore
from tests.integration.claimants import open_store


def create_app(store: IdempotencyStore, runs: Path, lease: float, *, hangs: bool) -> Starlette:
    """Return an application with the idempotency middleware."""

    async def pay(request: Request) -> Response:
        await request.body()
        with runs.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        if hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.1)  # so that most concurrent requests arrive during this run
        return PlainTextResponse(f"paid by {os.getpid()}", 201)

    middleware = Middleware(IdempotencyMiddleware, store=store, lease=lease, require_key=["/pay"])
    return Starlette(routes=[Route("/pay", pay, methods=["POST"])], middleware=[middleware])


if __name__ == "__main__":
    descriptor, engine, address, name, runs, lease, behaviour = sys.argv[1:]
    store = open_store(engine, address, name)
    app = create_app(store, Path(runs), float(lease), hangs=behaviour == "hang")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(descriptor))])
