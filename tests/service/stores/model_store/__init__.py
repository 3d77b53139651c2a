"""The model of a store: plain dicts and heaps, which the stateful test compares other stores with.

No method ever suspends, so a simulation that runs on it is deterministic. All of its state is one
`ModelState`: a new store with the same state is the store after a crash.
"""

from tests.service.stores.model_store.state import ModelState
from tests.service.stores.model_store.store import ModelStore

__all__ = ["ModelState", "ModelStore"]
