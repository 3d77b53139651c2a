"""The store in a SQLite file: one machine, nothing to start.

What belongs to one transaction is plain synchronous code (`Database` and the modules it runs); the
driver adds two threads. All that waits while a commit runs goes into the next one.
"""

from tarry.service.stores.sqlite.database import IN_MEMORY, Database
from tarry.service.stores.sqlite.store import SqliteStore

__all__ = ["IN_MEMORY", "Database", "SqliteStore"]
