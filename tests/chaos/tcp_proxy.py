"""A TCP proxy between a process and its store, which disturbs connections."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto

from tests.connections import Connections

DELAY_S = 0.3


class Disturbance(Enum):
    """What the proxy does with connections."""

    NONE = auto()
    DROP = auto()
    """No byte is forwarded. The bytes arrive later, as if they were sent again."""
    DELAY = auto()
    RESET = auto()
    """Connections are reset, but the requests before were forwarded: the store executes them."""
    HALF_CLOSE = auto()
    """The direction from the store is closed, while the store still receives requests."""
    REFUSE = auto()
    """New connections are reset at once. Existing connections are not disturbed."""


class TcpProxy:
    """Forwards connections from a loopback port to a Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._disturbance = Disturbance.NONE
        self._has_changed = asyncio.Event()
        self._connections = Connections(self._forward)
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._connections.accept, "127.0.0.1", 0)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def disturb(self, disturbance: Disturbance) -> None:
        """Disturb existing and new connections from now on."""
        asyncio.run_coroutine_threadsafe(self._set(disturbance), self._loop).result()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _set(self, disturbance: Disturbance) -> None:
        self._disturbance = disturbance
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    async def _cancel_all(self) -> None:
        self._server.close()
        await self._connections.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were closed end in the next iteration

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until one side closes it."""
        if self._disturbance is Disturbance.REFUSE:
            _reset(writer)
        else:
            await self._copy_both_directions(reader, writer)

    async def _copy_both_directions(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            store_reader, store_writer = await asyncio.open_unix_connection(self._path)
        except OSError:  # the server of the store is down
            _reset(writer)
            return
        copies = [
            asyncio.ensure_future(self._copy(reader, store_writer)),
            asyncio.ensure_future(self._copy_responses(store_reader, writer)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            store_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._wait_while_disturbed()
                writer.write(data)
                await writer.drain()

    async def _copy_responses(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                data = await self._read_response(reader)
                await self._wait_while_disturbed()
                if self._disturbance is Disturbance.RESET:
                    _reset(writer)
                    return
                if self._disturbance is Disturbance.HALF_CLOSE:
                    writer.write_eof()
                    await self._wait_for_change(asyncio.sleep(3600))
                    return
                if data is None:
                    continue
                if not data:
                    return
                writer.write(data)
                await writer.drain()

    async def _read_response(self, reader: asyncio.StreamReader) -> bytes | None:
        """Return the next bytes; or None if the disturbance has changed before they arrived."""
        return await self._wait_for_change(reader.read(65_536))

    async def _wait_for_change(self, work: Awaitable[bytes | None]) -> bytes | None:
        task = asyncio.ensure_future(work)
        change = asyncio.ensure_future(self._has_changed.wait())
        try:
            await asyncio.wait([task, change], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            change.cancel()
            task.cancel()

    async def _wait_while_disturbed(self) -> None:
        if self._disturbance is Disturbance.DELAY:
            await asyncio.sleep(DELAY_S)
        while self._disturbance is Disturbance.DROP:
            await self._has_changed.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def tcp_proxy(path: str) -> Iterator[TcpProxy]:
    """Run a proxy for a Unix socket."""
    proxy = TcpProxy(path)
    try:
        yield proxy
    finally:
        proxy.close()
