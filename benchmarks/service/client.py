"""A fast HTTP/1.1 client with keep-alive connections, one request at a time on each."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import httptools


class Connection(asyncio.Protocol):
    """One connection; a request is written with a single call."""

    def __init__(self, headers: str) -> None:
        self._headers = headers
        self._transport: asyncio.WriteTransport | None = None
        self._parser = None
        self._response_future: asyncio.Future[int] | None = None  # the status of the response
        self.is_closed = False

    def connection_made(self, transport) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        response_future, self._response_future = self._response_future, None
        response_future.set_result(self._parser.get_status_code())

    def connection_lost(self, exc) -> None:
        self.is_closed = True
        if self._response_future is not None and not self._response_future.done():
            self._response_future.set_exception(
                exc or ConnectionResetError("the server closed the connection")
            )

    async def post(self, path: str, body: bytes) -> int:
        """Send a request; return the status of the response."""
        self._response_future = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        return await self._response_future

    def close(self) -> None:
        self._transport.close()


class Connections:
    """Connections to one server; `post` replaces a connection that the server has closed."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        all_headers = {"Host": address.netloc, **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        self._idle: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
        self.all: list[Connection] = []

    @classmethod
    async def open(cls, url: str, count: int, headers: dict[str, str]) -> Connections:
        connections = cls(url, headers)
        for _ in range(count):
            connections._idle.put_nowait(await connections._connect())
        return connections

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._headers), self._host, self._port
        )
        self.all.append(connection)
        return connection

    async def post(self, path: str, body: bytes) -> int:
        """Send a request on an idle connection; wait until a connection is idle."""
        connection = await self._idle.get()
        try:
            if connection.is_closed:
                connection = await self._connect()
            return await connection.post(path, body)
        finally:
            self._idle.put_nowait(connection)

    def close(self) -> None:
        for connection in self.all:
            connection.close()
