"""Servers and proxies that run in the test's event loop and whose responses the test sets."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.connections import Connections, Handler
from tests.integration.hostile import OK

TUNNEL_OPEN = b"HTTP/1.1 200 Open\r\nX-Proxy: 1\r\n\r\n"
"""The response of a proxy that has opened a tunnel."""


class ReceivedRequest:
    """A request that the server has received; the test calls `respond`."""

    def __init__(self, head: str, body: bytes, connection: int, writer: asyncio.StreamWriter):
        self.head = head
        self.body = body
        self.path = head.split(" ", 2)[1]
        self.connection = connection
        self._writer = writer

    def respond(self, *parts: bytes) -> None:
        """Send a response, by default OK."""
        self._writer.write(b"".join(parts) or OK)

    def write_at_once(self, data: bytes) -> None:
        """Send bytes before the event loop continues."""
        os.write(self._writer.get_extra_info("socket").fileno(), data)

    def close_connection(self) -> None:
        """Close the connection."""
        self._writer.close()


class ScriptedServer:
    """A server that queues requests in `received`, or passes connections to `handler`."""

    def __init__(self, handler: Handler | None) -> None:
        self.handler = handler
        self.received: asyncio.Queue[ReceivedRequest] = asyncio.Queue()
        self.connections = 0
        """The number of connections so far."""
        self.open = 0
        """The number of open connections."""
        self.url = ""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it is closed or the server stops."""
        self.connections += 1
        self.open += 1
        try:
            if self.handler is not None:
                await self.handler(reader, writer)
                return
            number = self.connections
            while True:
                head, body = await read_request(reader)
                self.received.put_nowait(ReceivedRequest(head, body, number, writer))
        except (OSError, EOFError):
            pass
        finally:
            self.open -= 1


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return the head and the body of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = [line[15:] for line in head.lower().splitlines() if line.startswith("content-length")]
    return head, await reader.readexactly(int(length[0])) if length else b""


@asynccontextmanager
async def run_server(
    handler: Handler | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[ScriptedServer]:
    """Run a ScriptedServer, with TLS when `tls` is given."""
    scripted = ScriptedServer(handler)
    connections = Connections(scripted.serve)
    server = await asyncio.start_server(connections.accept, "127.0.0.1", 0, ssl=tls, limit=2**16)
    scripted.port = server.sockets[0].getsockname()[1]
    scripted.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{scripted.port}/"
    try:
        yield scripted
    finally:
        server.close()
        await connections.close()


def respond_with(*parts: bytes, then_close: bool = True) -> Handler:
    """Return a handler that reads a request, writes `parts`, and closes or keeps the connection."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if not then_close:
            await reader.read()

    return handler


async def never_respond(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    """Read and write nothing."""
    await asyncio.Event().wait()


async def copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the end of the stream."""
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def run_proxy(
    response: bytes | None = None, tls: ssl.SSLContext | None = None, port: int | None = None
) -> AsyncIterator[tuple[ScriptedServer, list[str]]]:
    """Run an egress proxy; yield it with the list of the heads of its requests.

    The proxy sends `response` if given. Otherwise it opens a tunnel to `port`, or by default to
    the requested port, always on 127.0.0.1.
    """
    heads: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        heads.append(head)
        if response is not None:
            writer.write(response)
            return
        target_port = port or int(head.split(" ", 2)[1].rpartition(":")[2])
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", target_port)
        writer.write(TUNNEL_OPEN)
        try:
            await asyncio.gather(
                copy_stream(reader, target_writer), copy_stream(target_reader, writer)
            )
        finally:
            target_writer.transport.abort()

    async with run_server(handler, tls) as server:
        yield server, heads
