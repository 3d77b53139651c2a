"""The store in memory: plain dicts and heaps, for tests and simulations.

Nothing in it waits, so a simulation that runs on it stays deterministic. Its state is one `Data`: a
new store over the same data is what a restart after a crash finds.
"""

from tests.service.stores.model_store.data import Data
from tests.service.stores.model_store.store import ModelStore

__all__ = ["Data", "ModelStore"]
