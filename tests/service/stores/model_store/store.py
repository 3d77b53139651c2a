"""The store in memory: its parts put together."""

from __future__ import annotations

from tests.service.stores.model_store.asking import Asking
from tests.service.stores.model_store.dead import Dead
from tests.service.stores.model_store.life import Life
from tests.service.stores.model_store.upkeep import Upkeep


class ModelStore(Life, Asking, Dead, Upkeep):
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
