"""The store in a SQLite file: for one machine, without a server to start.

The code of a transaction is synchronous. `SqliteStore` runs it in two threads, or writes in another
process; operations that arrive while a commit runs are committed together in the next transaction.

    store                                  the methods of the port
    executor, writer_process, writer_main  run operations off the event loop, in groups
    operations                             the write operations by name
    add, claim, finish, transitions, lanes, dead_letters, policies, api_keys, retention, queries
                                           the operations and queries themselves
    fair_order                             which lane a claim takes tasks from
    transaction                            time, cached lanes and counters of one transaction
    database, connection, schema           connection, errors, WAL, tables
    worker_locks                           which worker processes are alive
    multirow, task_rows, interning         SQL for many rows, conversion of rows, numbers for names
"""

from tarry.service.stores.sqlite.database import IN_MEMORY, Database
from tarry.service.stores.sqlite.store import SqliteStore

__all__ = ["IN_MEMORY", "Database", "SqliteStore"]
