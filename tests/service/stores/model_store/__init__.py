"""The model of a store, made of dicts and heaps. Tests compare other stores with it.

No method suspends, so a simulation with this store is deterministic. The state of a store is one
`ModelState`: a new store with the same state is like the old store after a crash.
"""

from tests.service.stores.model_store.state import ModelState
from tests.service.stores.model_store.store import ModelStore

__all__ = ["ModelState", "ModelStore"]
