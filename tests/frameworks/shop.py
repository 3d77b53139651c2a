"""One shop, told without a framework: what its handlers do, and how a test asks it.

Each `in_*.py` says the same routes in the words of one framework, all of them POST:

    /pay      reads JSON; answers 201 with a header and a cookie
    /wait     answers 201 when it may go on
    /fail     raises the first time, then answers 201
    /refuse   is refused with 403, by the framework's own exception
    /stream   answers in three pieces
    /leave    waits for the client to go away
    /down     gives up on a call below; `/down/thread` does so in a thread
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import uvicorn

import tarry
from tarry.testing import no_wait
from tarry.wire.asgi import App, Message
from tests.idempotency.asgi_client import make_scope

KEY = {"Idempotency-Key": '"4f2a"'}
PATIENCE = 30.0
PIECES = ("one ", "two ", "three")

Build: TypeAlias = Callable[..., App]
"""(shop, middleware class, its options): the application with the middleware in its place."""


@dataclass
class Shop:
    """What a test sees of the shop."""

    runs: list[Any] = field(default_factory=list[Any])
    """What each run of a handler was given."""
    lives: list[str] = field(default_factory=list[str])
    """What the lifespan did."""
    running: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    hesitates: bool = False
    """A stream waits before its last piece."""
    gone: bool = False
    """A handler saw its client go away."""

    def pay(self, order: Any) -> dict[str, int]:
        """Take a payment."""
        self.runs.append(order)
        return {"payment": len(self.runs)}

    async def wait(self) -> dict[str, int]:
        """Take a payment when told to."""
        paid = self.pay("wait")
        self.running.set()
        await self.go_on.wait()
        return paid

    def fail(self) -> dict[str, int]:
        """Raise the first time."""
        paid = self.pay("fail")
        if paid["payment"] == 1:
            raise RuntimeError("a bug")
        return paid

    async def pieces(self) -> AsyncIterator[str]:
        """Stream."""
        self.pay("stream")
        for piece in PIECES[:-1]:
            yield piece
        if self.hesitates:
            self.running.set()
            await self.go_on.wait()
        yield PIECES[-1]

    async def down(self) -> None:
        """Give up on a call below."""
        self.runs.append(tarry.remaining())
        with no_wait():
            await tarry.acall(self._below_async, on=ConnectionError)

    def down_in_thread(self) -> None:
        """Give up on a call below, where the framework runs what blocks."""
        self.runs.append(tarry.remaining())
        with no_wait():
            tarry.call(self._below, on=ConnectionError)

    def _below(self) -> None:
        raise ConnectionError("down")

    async def _below_async(self) -> None:
        self._below()


@asynccontextmanager
async def client_of(app: App) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the application itself; what is raised there is a 500, as with a server."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=KEY) as one:
        yield one


async def turns() -> None:
    """Let the loop turn: frameworks hear what they listen for."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ask_and_leave(app: App, path: str, shop: Shop, key: bytes | None = b'"4f2a"') -> None:
    """Send a request, and be gone as soon as its handler runs."""
    headers = [(b"host", b"shop"), *([] if key is None else [(b"idempotency-key", key)])]
    unread = [b"}", b"{"]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": bool(unread)}
        await shop.running.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Into the void, as servers do."""

    await app(make_scope(path=path, headers=headers), receive, send)


@asynccontextmanager
async def served(app: App) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a real server, on a free port; requests wait in its socket until it is up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, date_header=False, server_header=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers=KEY, trust_env=False, timeout=PATIENCE
            ) as one:
                yield one
        finally:
            server.should_exit = True
            await serving
