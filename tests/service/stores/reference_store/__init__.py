"""The in-memory reference store, made of dicts and heaps. Tests compare other stores with it.

No method suspends, so a simulation with this store is deterministic. The state of a store is one
`ReferenceState`: a new store with the same state is like the old store after a crash.
"""

from tests.service.stores.reference_store.state import ReferenceState
from tests.service.stores.reference_store.store import ReferenceStore

__all__ = ["ReferenceState", "ReferenceStore"]
