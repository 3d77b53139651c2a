"""The store in memory: plain dicts and heaps, for tests and simulations.

Nothing in it waits, so a simulation that runs on it stays deterministic. Its state is one `Data`: a
new store over the same data is what a restart after a crash finds.
"""

from tarry.service.stores.memory.data import Data
from tarry.service.stores.memory.store import MemoryStore

__all__ = ["Data", "MemoryStore"]
