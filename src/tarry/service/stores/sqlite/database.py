"""One database connection: runs write operations, several in one transaction, and queries.

Synchronous: no threads and no asyncio, so that tests can run it in a deterministic simulation. The
second half of the module translates errors of SQLite into `StoreUnavailable`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable
from tarry.service.stores.sqlite.connection import WriteAheadLog, connect
from tarry.service.stores.sqlite.interning import InternedNames
from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from tarry.service.stores.sqlite.worker_locks import WorkerLock

    Operation = Callable[[Transaction], Any]
    Query = Callable[[ReadTransaction], Any]
    Answer = tuple[Any, Exception | None]
    """The value of an operation or query, or the error that it raised."""

IN_MEMORY = ":memory:"
"""Path of a database in memory: it belongs to one connection, and is lost when that is closed."""
_READS_PER_TRANSACTION = 8
"""Bounds the duration of a read transaction, during which the WAL cannot be truncated."""

_CAUSES = {
    sqlite3.SQLITE_BUSY: "another process holds its write lock",
    sqlite3.SQLITE_LOCKED: "another connection holds a lock on it",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "it is read-only",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "permission to open it was denied",
    sqlite3.SQLITE_AUTH: "permission to open it was denied",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
    sqlite3.SQLITE_NOTADB: "it is no longer a SQLite file",
    sqlite3.SQLITE_PROTOCOL: "its file locks do not work",
    sqlite3.SQLITE_NOMEM: "there is no memory left",
    sqlite3.SQLITE_INTERRUPT: "it was interrupted",
}
_INVALID_OPERATION_CODES = frozenset(
    {
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
    }
)
"""Errors that are caused by the operation, not by the database."""
_CONNECTION_USABLE_CODES = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}
)
"""Database errors after which the connection can still be used."""
_MAY_SUCCEED_ALONE_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_ERROR})
"""Database errors of a group that may not occur if its operations run one by one."""


class Database:
    """One connection to the file at `path`; `clock` returns epoch milliseconds.

    The connection is opened on first use, and opened again after an error that it may have caused.
    So the store works again as soon as the cause of the error is gone.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        clock: Callable[[], int],
        worker_lock: WorkerLock | None = None,
    ) -> None:
        self.path = path
        self.worker_lock = worker_lock
        self.commits: int = 0
        """Number of transactions that changed something."""
        self._clock = clock
        # The reads and writes of a database in memory come from two threads and share a connection.
        self._lock = threading.RLock()
        self._is_on_disk = path != IN_MEMORY
        self._wal = WriteAheadLog(path)
        self._opened: tuple[sqlite3.Connection, InternedNames] | None = None
        """The open connection and its cache of names; None while the file is closed."""
        self._file_id: tuple[int, int] | None = None
        """Device and inode of the file when it was opened."""

    def apply(self, operations: Sequence[Operation]) -> list[Answer]:
        """Run operations in one transaction; return the value or the error of each.

        If one of them fails, the transaction is rolled back and each operation runs in a
        transaction of its own, so that a failing operation does not affect the others.
        """
        with self._lock:
            try:
                return [(value, None) for value in self._run_transaction(operations)]
            except Exception as error:  # noqa: BLE001 - returned to the caller of each operation
                self._roll_back(error)
                if len(operations) == 1 or not _may_succeed_alone(error):
                    return [(None, self._translate(error)) for _ in operations]
            return [answer for operation in operations for answer in self.apply([operation])]

    def read(self, queries: Sequence[Query]) -> list[Answer]:
        """Run queries, a few in each read transaction; return the value or the error of each."""
        size = _READS_PER_TRANSACTION
        chunks = [queries[begin : begin + size] for begin in range(0, len(queries), size)]
        with self._lock:
            return [answer for chunk in chunks for answer in self._read_chunk(chunk)]

    def open(self) -> tuple[sqlite3.Connection, InternedNames]:
        """Return the connection and its cache of names; open the file if it is not open."""
        self._check_file()
        if self._opened is None:
            connection = connect(self.path)
            self._file_id = _file_id(self.path) if self._is_on_disk else None
            token = None
            if self.worker_lock is not None:
                self.worker_lock.acquire()
                token = self.worker_lock.token
            self._opened = connection, InternedNames(connection, token)
        return self._opened

    def prepare(self) -> None:
        """Create the file and acquire the worker lock, before the writer process opens the file."""
        try:
            self.open()
        except Exception as error:  # noqa: BLE001 - raised as an error of the port
            raise self._translate(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; the next operation opens it again."""
        if self._opened is not None:
            connection, _ = self._opened
            self._opened = None
            connection.close()

    def _check_file(self) -> None:
        """Raise `StoreUnavailable` if the file was moved or deleted since it was opened.

        SQLite would not notice, and would write to a file that no other process can see.
        """
        if self._file_id is not None and self._file_id != _file_id(self.path):
            msg = (
                f"the store {self.path} is unavailable: its file was moved or deleted while it was "
                "open; put it back, or restart to use the file that is there now"
            )
            raise StoreUnavailable(msg)

    def _run_transaction(self, operations: Sequence[Operation]) -> list[Any]:
        connection, names = self.open()
        if self._is_on_disk:
            self._wal.truncate_if_long(connection)
        connection.execute("BEGIN IMMEDIATE")
        changes_before = connection.total_changes
        # The clock is read under the write lock, so that later transactions have later times.
        tx = Transaction(connection, names, self._clock(), self.worker_lock)
        values = [operation(tx) for operation in operations]
        tx.flush()
        connection.execute("COMMIT")
        self.commits += connection.total_changes != changes_before
        return values

    def _read_chunk(self, queries: Sequence[Query]) -> list[Answer]:
        answers: list[Answer] = []
        try:
            connection, _ = self.open()
            connection.execute("BEGIN")
            tx = ReadTransaction(connection, self._clock())
            answers.extend(self._run_query(query, tx) for query in queries)
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - returned to the caller of each query
            self._roll_back(error)
            return [(None, self._translate(error)) for _ in queries]
        return answers

    def _run_query(self, query: Query, tx: ReadTransaction) -> Answer:
        try:
            return query(tx), None
        except Exception as error:
            if _is_database_error(error):
                raise
            return None, error

    def _roll_back(self, error: Exception) -> None:
        """Roll back the transaction that failed; close the connection if it is no longer usable."""
        if self._opened is None:
            return
        connection, names = self._opened
        names.clear()
        is_usable = _is_connection_usable(error)
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            is_usable = False
        # A database in memory keeps its connection whatever happens: closing it deletes the data.
        if self._is_on_disk and not is_usable:
            self.close()

    def _translate(self, error: Exception) -> Exception:
        """Return `StoreUnavailable` for an error of the database, and any other error as it is."""
        if not _is_database_error(error):
            return error
        cause = _CAUSES.get(_primary_code(error) or 0, "it fails")
        unavailable = StoreUnavailable(f"the store {self.path} is unavailable: {cause} ({error})")
        unavailable.__cause__ = error
        return unavailable


def _file_id(path: str | PathLike[str]) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - called often, and faster than Path.stat
    except OSError:
        return None
    return status.st_dev, status.st_ino


# --- errors of SQLite -----------------------------------------------------------------------------


def _primary_code(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF  # the higher bits are the extended code


def _is_database_error(error: BaseException) -> bool:
    """Return whether the database is the cause of an error, and not the operation."""
    code = _primary_code(error)
    return (
        isinstance(error, sqlite3.Error)
        and code is not None
        and code not in _INVALID_OPERATION_CODES
    )


def _is_connection_usable(error: BaseException) -> bool:
    """Return False if the file must be opened again before the next operation."""
    return not _is_database_error(error) or _primary_code(error) in _CONNECTION_USABLE_CODES


def _may_succeed_alone(error: BaseException) -> bool:
    """Return whether some operations of a failed group may succeed on their own.

    A full disk, for example, may have space for a smaller transaction.
    """
    return not _is_database_error(error) or _primary_code(error) in _MAY_SUCCEED_ALONE_CODES
