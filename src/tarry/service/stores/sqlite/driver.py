"""The store: the file behind two lines, one that writes in groups and one that reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.runtime.clocks import world
from tarry.service.stores.sqlite.apart import ProcessLine
from tarry.service.stores.sqlite.database import IN_MEMORY, Database
from tarry.service.stores.sqlite.line import ThreadLine
from tarry.service.stores.sqlite.operations import Call
from tarry.service.stores.sqlite.port import Port
from tarry.service.stores.sqlite.presence import Presence
from tarry.service.stores.sqlite.workers import recover

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from tarry.service.stores.sqlite.ledger import Ledger, View
    from tarry.service.stores.sqlite.line import Line

T = TypeVar("T")

_RECOVERED = 1000


class SqliteStore(Port):
    """Keeps everything in the SQLite file at `path`, which it makes when it is missing.

    `clock` gives epoch milliseconds. Several processes of one machine may use one file. `apart`
    has a process of its own write, by the machine's clock. The path `IN_MEMORY` keeps everything in
    the memory of this process until the store is closed; nothing is written to the disk.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        clock: Callable[[], int] | None = None,
        apart: bool = False,
    ) -> None:
        clock = clock or _now
        if path == IN_MEMORY:
            if apart:
                msg = "a store in memory cannot be written by another process: use apart=False"
                raise ConfigurationError(msg)
            # Only one connection sees a database in memory, so both threads share it.
            self.database: Database = Database(path, clock)
            self._view = self.database
        else:
            self.database = Database(path, clock, Presence(path))
            self._view = Database(path, clock)
        self._apart = apart
        self._writer: Line | None = None
        self._reader: Line | None = None

    async def open(self) -> None:
        """Connect, bring the schema up to date, and end the leases of workers that have died."""
        if self._writer is None:
            self._writer = (
                ProcessLine(self.database)
                if self._apart
                else ThreadLine("tarry-sqlite-writer", self.database.apply)
            )
            self._reader = ThreadLine("tarry-sqlite-reader", self._view.read)
        while await self._write(Call(recover, _RECOVERED)):
            pass

    async def close(self) -> None:
        """End the lines when they have done what waits, and close the file."""
        lines, self._writer, self._reader = (self._writer, self._reader), None, None
        for line in lines:
            if line is not None:
                await line.close()
        self._view.close()
        self.database.close()
        if self.database.presence is not None:
            self.database.presence.leave()

    async def _write(self, operation: Callable[[Ledger], T], weight: int = 1) -> T:
        return await _put(self._writer, operation, weight)

    async def _read(self, question: Callable[[View], T]) -> T:
        return await _put(self._reader, question, 1)


async def _put(line: Line | None, work: Callable[[Any], T], weight: int) -> T:
    if line is None:
        msg = "the store is not open: call open() first"
        raise StoreUnavailable(msg)
    answer: T = await line.put(work, weight)
    return answer


def _now() -> int:
    return int(world.epoch() * 1000)
