"""The connections of a server that runs in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Connections:
    """Runs a handler for each connection of `asyncio.start_server`, and closes all of them.

    `asyncio.start_server` does not close the connection of a handler that is cancelled before its
    first step. Such a connection fails a later test, with a warning when it is collected.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_closed = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start the handler of a new connection, or close the connection after `close`."""
        if self._is_closed:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._handle(reader, writer))
        self._tasks.add(task)
        self._writers.add(writer)

    async def close(self) -> None:
        """Cancel all handlers, and close all connections."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handler(reader, writer)
        finally:
            writer.close()
