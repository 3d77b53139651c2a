"""The store in a SQLite file: for one machine, without a server to start.

The code of a transaction is synchronous (`Database`, and the modules of operations that it runs).
`SqliteStore` runs it in two threads, or in a writer process. All operations that arrive while a
commit runs are committed together in the next transaction.
"""

from tarry.service.stores.sqlite.database import IN_MEMORY, Database
from tarry.service.stores.sqlite.store import SqliteStore

__all__ = ["IN_MEMORY", "Database", "SqliteStore"]
