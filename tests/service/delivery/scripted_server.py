"""Servers in the loop of the test, which does with each request that arrives as it likes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.integration.hostile import OK

OPEN = b"HTTP/1.1 200 Open\r\nX-Proxy: 1\r\n\r\n"
"""What a proxy says when a tunnel stands."""


class Arrived:
    """A request that has arrived; it is answered when the test says so."""

    def __init__(self, head: str, body: bytes, connection: int, writer: asyncio.StreamWriter):
        self.head = head
        self.body = body
        self.path = head.split(" ", 2)[1]
        self.connection = connection
        self._writer = writer

    def answer(self, *said: bytes) -> None:
        """Answer, by default with OK."""
        self._writer.write(b"".join(said) or OK)

    def hang_up(self) -> None:
        """End the connection."""
        self._writer.close()


class Served:
    """A server. Requests wait in `arrived`; or `behave` has each connection to itself."""

    def __init__(self, behave: Behave | None) -> None:
        self.behave = behave
        self.arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self.connections = 0
        self.open = 0
        self.url = ""
        self.port = 0
        self._tasks: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until it ends or the server does."""
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        self.open += 1
        try:
            if self.behave is not None:
                await self.behave(reader, writer)
                return
            number = self.connections
            while True:
                head, body = await read_request(reader)
                self.arrived.put_nowait(Arrived(head, body, number, writer))
        except asyncio.CancelledError:
            writer.transport.abort()
        except (OSError, EOFError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def stop(self) -> None:
        """End all connections."""
        for task in self._tasks:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await asyncio.sleep(0)  # transports close in the next round


Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return the head of a request, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = [line[15:] for line in head.lower().splitlines() if line.startswith("content-length")]
    return head, await reader.readexactly(int(length[0])) if length else b""


@asynccontextmanager
async def serving(
    behave: Behave | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Served]:
    """Run a server."""
    served = Served(behave)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, ssl=tls, limit=2**16)
    served.port = server.sockets[0].getsockname()[1]
    served.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{served.port}/"
    try:
        yield served
    finally:
        server.close()
        await served.stop()


def saying(*parts: bytes, then_close: bool = True) -> Behave:
    """Read a request, say something, then close or wait for the end."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if not then_close:
            await reader.read()

    return behave


async def silent(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    """Read nothing, and say nothing."""
    await asyncio.Event().wait()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes until there are no more."""
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def proxying(
    says: bytes | None = None, tls: ssl.SSLContext | None = None, port: int | None = None
) -> AsyncIterator[tuple[Served, list[str]]]:
    """Run an egress proxy; yield it, and the heads of what it was asked.

    It opens the way it is asked for on this machine, or to a certain port, or just says something.
    """
    asked: list[str] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        asked.append(head)
        if says is not None:
            writer.write(says)
            return
        there = port or int(head.split(" ", 2)[1].rpartition(":")[2])
        far, back = await asyncio.open_connection("127.0.0.1", there)
        writer.write(OPEN)
        try:
            await asyncio.gather(pump(reader, back), pump(far, writer))
        finally:
            back.transport.abort()

    async with serving(behave, tls) as served:
        yield served, asked
