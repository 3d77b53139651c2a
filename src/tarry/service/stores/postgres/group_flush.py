"""Group commit without locks: the hot calls commit first, and wait for the disk together.

With `synchronous_commit = on`, a transaction keeps its row locks until its commit is on the disk.
The hot calls change the counters of lanes and tenants, so they would wait for each other, and each
for its own fsync: half of the time of a busy service. Therefore they commit with
`synchronous_commit = off`, which releases the locks at once, and then wait for a flush. PostgreSQL
writes its log in order: a later transaction that is flushed makes all earlier ones durable, also on
a synchronous standby. So one flush serves all calls that have committed before it started.

A call returns after its flush, so whatever it returns is durable. Only calls that read tasks may
see a change that is not on the disk yet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DEFER_FLUSH = "set_config('synchronous_commit', 'off', true)"
"""An expression for statements whose caller waits for `GroupFlush`; it applies to the transaction
only."""
# Any write would do. A message is part of the log only, so it needs no table, lock or vacuum.
FLUSH = "SELECT pg_logical_emit_message(true, 'tarry', '')"


class GroupFlush:
    """Makes committed transactions durable; `flush` commits a transaction that is flushed."""

    def __init__(self, flush: Callable[[], Awaitable[object]]) -> None:
        self._flush = flush
        self._next: asyncio.Future[None] | None = None
        """Done after the next flush, which has not started yet; None: no call waits for it."""
        self._flusher: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until all transactions that have committed before this call are durable."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
            if self._flusher is None:
                self._flusher = loop.create_task(self._run())
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        while (flushed := self._next) is not None:
            self._next = None
            try:
                await self._flush()
            except Exception as error:  # noqa: BLE001 - raised by the calls that wait
                flushed.set_exception(error)
                flushed.exception()  # marks it as retrieved: all callers may have been cancelled
            else:
                flushed.set_result(None)
        self._flusher = None
