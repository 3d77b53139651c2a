"""Group commit without locks: the hot calls commit first, and wait for the disk together.

With `synchronous_commit = on`, a transaction keeps its row locks until its commit is on the disk.
The hot calls change the counters of lanes and tenants, so they would wait for each other, and each
for its own fsync: half of the time of a busy service. Therefore they commit with
`synchronous_commit = off`, which releases the locks at once, and then wait for a flush. PostgreSQL
writes its log in order: a later transaction that is flushed makes all earlier ones durable, also on
a synchronous standby. So one flush serves all calls that have committed before it started.

A flush proves nothing if the server has crashed between the commit and the flush, or if another
server has taken over: the commit may be lost. Both end all connections. So flushes have a
connection of their own, and a call fails if this connection was not open from before its
transaction until the end of the flush. Behind a pooler, which may reconnect to the server
unnoticed, calls do not defer their flush.

A call returns after its flush, so whatever it returns is durable. Only calls that read tasks may
see a change that is not on the disk yet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DEFER_FLUSH = "pg_catalog.set_config('synchronous_commit', 'off', true)"
"""An expression for statements whose caller waits for `GroupFlush`; it applies to the transaction
only."""
DO_NOT_DEFER_FLUSH = "pg_catalog.current_setting('synchronous_commit')"
"""The expression that replaces it behind a pooler."""
# Any write would do. A message is part of the log only, so it needs no table, lock or vacuum.
FLUSH = "SELECT pg_catalog.pg_logical_emit_message(true, 'tarry', '')"


class GroupFlush:
    """Makes committed transactions durable; `connect` opens the connection for flushes."""

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        self._connect = connect
        self._connection: Any = None
        self._connection_number = 0
        self._may_be_lost = False
        """Whether another connection was lost since this one was opened."""
        self._lock = asyncio.Lock()
        self._next: asyncio.Future[int] | None = None
        """The result of the next flush, which has not started yet: the number of its connection.
        None: no call waits for it."""
        self._flusher: asyncio.Task[None] | None = None

    async def begin(self) -> int:
        """Return the number of the connection for flushes, for `wait`; call it before a commit."""
        if self._must_connect():
            async with self._lock:
                if self._must_connect():
                    await self.close()
                    self._connection = await self._connect()
                    self._connection_number += 1
                    self._may_be_lost = False
        return self._connection_number

    def _must_connect(self) -> bool:
        return self._may_be_lost or self._connection is None or self._connection.is_closed()

    def mark_lost(self) -> None:
        """Connect again before the next transaction, because another connection was lost.

        The server has probably ended all connections, but the end of this one may be noticed later.
        """
        self._may_be_lost = True

    async def wait(self, connection_number: int) -> None:
        """Wait until all transactions that have committed since `begin` are durable."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
            if self._flusher is None:
                self._flusher = loop.create_task(self._run())
        if connection_number != await asyncio.shield(self._next):
            raise StoreUnavailable(
                "PostgreSQL: the connection was lost before the transaction was flushed"
            )

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def _run(self) -> None:
        while (flushed := self._next) is not None:
            self._next = None
            connection, number = self._connection, self._connection_number
            try:
                await _flush(connection)
            except Exception as error:  # noqa: BLE001 - raised by the calls that wait
                if connection is not None:
                    connection.terminate()
                    if connection is self._connection:
                        self._connection = None
                flushed.set_exception(error)
                flushed.exception()  # marks it as retrieved: all callers may have been cancelled
            else:
                flushed.set_result(number)
        self._flusher = None


async def _flush(connection: Any) -> None:
    if connection is None:
        raise StoreUnavailable("PostgreSQL: the connection for flushes was lost")
    await connection.fetch(FLUSH)
