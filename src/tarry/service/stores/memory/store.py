"""The store in memory: its parts put together."""

from __future__ import annotations

from tarry.service.stores.memory.asking import Asking
from tarry.service.stores.memory.dead import Dead
from tarry.service.stores.memory.life import Life
from tarry.service.stores.memory.upkeep import Upkeep


class MemoryStore(Life, Asking, Dead, Upkeep):
    """A `Store` in the memory of the process.

    `clock` gives epoch ms, by default those of the machine. `data` goes on where another store
    was, as after a crash.
    """

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def close(self) -> None:
        """Do nothing: the data stays for who holds it."""

    async def ping(self) -> int:
        """Return the store's time."""
        return self._clock()
