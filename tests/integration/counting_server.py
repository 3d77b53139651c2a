"""A server process whose handler leaves a line in a file for each run, and hangs when told to.

python -m tests.integration.counting_server FD ENGINE ADDRESS NAME RUNS LEASE answers|hangs
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
from tests.integration.claimants import store_of


def app_of(store: IdempotencyStore, runs: Path, lease: float, *, hangs: bool) -> Starlette:
    """The application."""

    async def pay(request: Request) -> Response:
        await request.body()
        with runs.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        if hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.1)  # so that most of a crowd come while it runs
        return PlainTextResponse(f"paid by {os.getpid()}", 201)

    guard = Middleware(IdempotencyMiddleware, store=store, lease=lease, require_key=["/pay"])
    return Starlette(routes=[Route("/pay", pay, methods=["POST"])], middleware=[guard])


if __name__ == "__main__":
    descriptor, engine, address, name, runs, lease, hangs = sys.argv[1:]
    store = store_of(engine, address, name)
    app = app_of(store, Path(runs), float(lease), hangs=hangs == "hangs")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(descriptor))])
