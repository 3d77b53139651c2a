"""A pool of connections that are opened when they are needed.

The pool of asyncpg takes 0.2 ms of processor time for each call, several times as long as a short
statement, because its timeouts need asyncio tasks. This pool needs none while connections are idle.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_MAX_IDLE_S = 300.0
"""A connection that was idle for longer is closed: a firewall may have dropped it silently."""


class ConnectionPool:
    """Up to `size` connections, which `connect` opens.

    `timeout_s` limits the time to wait for a free connection, and to close one.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Any]], *, size: int, timeout_s: float
    ) -> None:
        self._connect = connect
        self._size = size
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(size)
        self._idle: list[tuple[Any, float]] = []
        """Idle connections with the time since when they are idle, the longest first."""
        self._used: set[Any] = set()
        self._discards: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def acquire(self) -> Any:
        """Return a connection for exclusive use; raise `TimeoutError` if none becomes free."""
        if self._slots.locked():  # a timeout, which costs time, is needed only to wait
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
        else:
            await self._slots.acquire()
        try:
            connection = self._pop_idle() or await self._connect()
        except BaseException:
            self._slots.release()
            raise
        self._used.add(connection)
        return connection

    def _pop_idle(self) -> Any:
        """Remove and return the connection that was used last, or None if no connection is idle.

        Its plans are most likely still in the server's memory.
        """
        oldest = asyncio.get_running_loop().time() - _MAX_IDLE_S
        while self._idle and self._idle[0][1] < oldest:
            self._idle.pop(0)[0].terminate()
        while self._idle:
            connection = self._idle.pop()[0]
            if not connection.is_closed():
                return connection
        return None

    def release(self, connection: Any) -> None:
        """Take back a connection that has completed its statements."""
        self._used.discard(connection)
        if self._is_closed:
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append((connection, asyncio.get_running_loop().time()))
        self._slots.release()

    def discard(self, connection: Any) -> None:
        """Start to close a connection; a statement that it still runs is cancelled."""
        discard = asyncio.get_running_loop().create_task(self._close(connection))
        self._discards.add(discard)
        discard.add_done_callback(self._discards.discard)

    async def _close(self, connection: Any) -> None:
        try:
            with suppress(Exception):
                await connection.close(timeout=self._timeout_s)
        finally:
            connection.terminate()
            self._used.discard(connection)
            self._slots.release()

    async def close(self) -> None:
        """Close all connections, after the calls that use them have ended or timed out."""
        self._is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                for _ in range(self._size):
                    await self._slots.acquire()
        idle, self._idle = [connection for connection, _ in self._idle], []
        for connection in idle:
            with suppress(Exception):
                await connection.close(timeout=self._timeout_s)
        self.terminate()

    def terminate(self) -> None:
        """Close all connections at once."""
        self._is_closed = True
        for connection in (*self._used, *(each for each, _ in self._idle)):
            connection.terminate()
        self._idle.clear()
