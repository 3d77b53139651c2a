"""The shop that each framework serves: its handlers, and clients that call it.

Each `*_app.py` has the same routes in one framework. All routes take POST requests:

    /pay          reads JSON; responds 201 with a header and a cookie
    /wait         responds 201 once the test allows it
    /fail         raises the first time, then responds 201
    /forbidden    raises the framework's own exception for 403
    /stream       responds in three chunks
    /disconnect   waits until the client disconnects
    /give-up      gives up a call; `/give-up/thread` does so in a thread
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
from tarry.wire.http import App, Message
from tests.idempotency.asgi_client import make_scope

CREDENTIALS = "Bearer customer-7"
"""Identifies the caller: the shop sets a cookie, and a cookie alone does not identify it."""
KEY = {"Idempotency-Key": '"4f2a"', "Authorization": CREDENTIALS}
CLIENT_TIMEOUT_S = 30.0
CHUNKS = ("one ", "two ", "three")

BuildApp: TypeAlias = Callable[..., App]
"""Takes the shop, a middleware class and its options; returns the application with both."""


@dataclass
class Shop:
    """The handlers of the shop, and the state that tests observe and control."""

    runs: list[Any] = field(default_factory=list[Any])
    """One item for each run of a handler: its order, or its name, or the remaining time."""
    lifespan_events: list[str] = field(default_factory=list[str])
    """The events of the application's lifespan."""
    handler_started: asyncio.Event = field(default_factory=asyncio.Event)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets a waiting handler continue."""
    pauses_stream: bool = False
    """Whether a stream waits before its last chunk."""
    saw_disconnect: bool = False
    """Whether a handler saw its client disconnect."""

    def pay(self, order: Any) -> dict[str, int]:
        """Record an order, and return the number of the payment."""
        self.runs.append(order)
        return {"payment": len(self.runs)}

    async def wait(self) -> dict[str, int]:
        """Record a payment, and return it after `resume`."""
        paid = self.pay("wait")
        self.handler_started.set()
        await self.resume.wait()
        return paid

    def fail(self) -> dict[str, int]:
        """Raise the first time."""
        paid = self.pay("fail")
        if paid["payment"] == 1:
            raise RuntimeError("a bug")
        return paid

    async def chunks(self) -> AsyncIterator[str]:
        """Stream the response."""
        self.pay("stream")
        for chunk in CHUNKS[:-1]:
            yield chunk
        if self.pauses_stream:
            self.handler_started.set()
            await self.resume.wait()
        yield CHUNKS[-1]

    async def give_up_call(self) -> None:
        """Make a call that is given up."""
        self.runs.append(tarry.remaining())
        with no_wait():
            await tarry.acall(self._fail_async, on=ConnectionError)

    def give_up_call_in_thread(self) -> None:
        """Make a call that is given up, in a thread of the framework."""
        self.runs.append(tarry.remaining())
        with no_wait():
            tarry.call(self._fail, on=ConnectionError)

    def _fail(self) -> None:
        raise ConnectionError("down")

    async def _fail_async(self) -> None:
        self._fail()


@asynccontextmanager
async def open_asgi_client(app: App) -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client that calls the application; an error of the application becomes a 500."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://shop", headers=KEY
    ) as client:
        yield client


async def run_pending_callbacks() -> None:
    """Yield to the event loop several times, so that frameworks handle their messages."""
    for _ in range(20):
        await asyncio.sleep(0)


async def send_and_disconnect(
    app: App, path: str, shop: Shop, key: bytes | None = b'"4f2a"'
) -> None:
    """Send a request, and disconnect as soon as its handler has started."""
    headers = [(b"host", b"shop"), (b"authorization", CREDENTIALS.encode())]
    if key is not None:
        headers.append((b"idempotency-key", key))
    unread = [b"}", b"{"]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": bool(unread)}
        await shop.handler_started.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Drop the message, as servers do."""

    await app(make_scope(path=path, headers=headers), receive, send)


@asynccontextmanager
async def open_server_client(app: App) -> AsyncGenerator[httpx.AsyncClient]:
    """Serve the application with uvicorn on a free port, and open a client for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, date_header=False, server_header=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers=KEY,
                trust_env=False,
                timeout=CLIENT_TIMEOUT_S,
            ) as client:
                yield client
        finally:
            server.should_exit = True
            await serving
