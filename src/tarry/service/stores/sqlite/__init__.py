"""The store in a SQLite file: for one machine, without a server to start.

What it is bad at (figures of docs/many-processes.md):

* Several machines: the file must be on a local disk, and there is no failover, only backups.
* Several writers: one process writes to the file at a time. Two processes delivered 1.27 times as
  many tasks per second as one, and four not more than two.
* A process that is stopped (SIGSTOP) while it writes keeps the lock of the file. Other processes
  respond with 503 until it continues or is killed.

`SqliteTaskStore` reads in one thread, and writes in another thread or process. Operations that
arrive while a transaction is committed share the next transaction.

    store                       the methods of `tarry.service.store.Store`
    executor, writer_process    run operations outside the event loop, in groups
    add, claim, finish, transitions, lanes, policies, queries
                                the operations and queries themselves
    finished_tasks              operations on finished tasks: replay, purge, retention
    operations                  what the writer process can run
    statements                  statements for many rows
    transaction                 the time, lanes, counters and names that one transaction uses
    database, schema            connection, errors, write-ahead log, tables
    worker_locks                which worker processes are alive, and which is the leader
"""

from tarry.service.stores.sqlite.database import IN_MEMORY, SqliteDatabase
from tarry.service.stores.sqlite.store import SqliteTaskStore

__all__ = ["IN_MEMORY", "SqliteDatabase", "SqliteTaskStore"]
