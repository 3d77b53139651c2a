"""One database connection: opens the file, and runs write operations and queries in transactions.

This module starts no thread and does not use asyncio, so that tests can run it in a deterministic
simulation. Errors of SQLite become `StoreUnavailable`, unless the operation caused them.

SQLite reuses the file of the write-ahead log (WAL) from its beginning only when a writer finds that
no connection reads from the WAL. If reads follow each other without a gap, that never happens, and
the WAL would grow without limit. So once the WAL is larger than `MAX_WAL_BYTES`, the writer makes a
checkpoint: it copies the WAL into the database file and truncates the WAL. A checkpoint waits for
reads that have begun, in this process or another, but not for reads that begin later.

If the WAL file is deleted while it is open, SQLite continues to write to the deleted file, which is
lost with the last connection. The same applies to the index of the WAL (the file `-shm`): processes
with different indexes would overwrite each other's commits. So the writer compares both files with
those that it opened, in every transaction. If one was deleted, it copies the deleted WAL into the
database file with a checkpoint, and connects again. The checkpoint truncates the deleted WAL, which
shows other connections that they have to connect again too.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.runtime.downstream import internal_downstream
from tarry.runtime.retry import call
from tarry.runtime.sqlite import begin_write, is_busy_error
from tarry.service.stores.sqlite import schema
from tarry.service.stores.sqlite.clock import AnchoredClock
from tarry.service.stores.sqlite.transaction import InternedNames, ReadTransaction, WriteTransaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.stores.sqlite.schema import StorePath
    from tarry.service.stores.sqlite.worker_locks import WorkerLock

    Clock = Callable[[], int]
    """Returns epoch milliseconds."""
    Operation = Callable[[WriteTransaction], Any]
    Query = Callable[[ReadTransaction], Any]
    Answer = tuple[Any, Exception | None]
    """The value that an operation or query returned, or the error that it raised."""
    FileId = tuple[int, int]
    """Device and inode of a file."""

_logger = logging.getLogger("tarry.service")
_FILE = internal_downstream("database file")
IN_MEMORY = ":memory:"
"""Path of a database in memory, which is lost when its only connection is closed."""
_MIN_SQLITE_VERSION = (3, 38, 0)  # the first in which the JSON functions are always built in
_BUSY_TIMEOUT_MS = 5_000
_MAX_READS_PER_TRANSACTION = 8
"""Limits the duration of a read transaction, during which the WAL cannot be truncated."""
MAX_WAL_BYTES = 64 << 20
"""The size above which the writer truncates the WAL."""
_MAX_CHECKPOINT_TRIES, _CHECKPOINT_TIMEOUT_MS = 10, 50
"""A checkpoint waits until a slot in SQLite's table of readers is free. Overlapping reads can share
a slot, which is then never free: a longer timeout does not help. A new try helps, because reads
that began during the last try use the newest state, and do not block the new try."""

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
_INVALID_OPERATION_CODES = {
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_MISUSE,
    sqlite3.SQLITE_RANGE,
}
"""Errors that are caused by the operation, not by the database."""
_CONNECT_POLICY = Policy(max_attempts=5, backoff=Schedule((0.0, 0.1, 0.2, 0.4)))
"""The first retry is made at once. Without it, a file could not be opened on an event loop, on
which tarry refuses plain functions that wait before their first retry."""
# In the next two sets, None stands for an error that the operation caused.
_CONNECTION_USABLE_CODES = {None, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}
"""Errors after which the connection can still be used."""
_MAY_SUCCEED_ALONE_CODES = {None, sqlite3.SQLITE_FULL, sqlite3.SQLITE_ERROR}
"""After these errors, the operations of a transaction may still succeed one by one. For example, a
full disk may have space for a smaller transaction."""


def _database_error_code(error: BaseException) -> int | None:
    """Return SQLite's primary error code; None if the operation caused the error."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        code &= 0xFF  # the higher bits are the extended code
    return None if code in _INVALID_OPERATION_CODES else code


class SqliteDatabase:
    """One connection to the file at `path`; `clock` returns epoch milliseconds.

    The connection is opened on first use. It is closed after an error that may have made it
    unusable, and opened again for the next operation. `reader` is a second connection of this
    process to the same file: the connections of a process share one WAL index, which can only be
    replaced when all of them are closed.
    """

    def __init__(
        self,
        path: StorePath,
        clock: Clock,
        worker_lock: WorkerLock | None = None,
        reader: SqliteDatabase | None = None,
    ) -> None:
        self.path = path
        self.worker_lock = worker_lock
        self._reader = reader
        self._clock = clock
        # A database in memory has only one connection, which the reader and writer threads share.
        self._lock = threading.RLock()
        self._is_on_disk = path != IN_MEMORY
        real_path = os.path.realpath(path)
        self._wal_path, self._wal_index_path = f"{real_path}-wal", f"{real_path}-shm"
        self._truncate_wal_above = MAX_WAL_BYTES
        self._connection_and_names: tuple[sqlite3.Connection, InternedNames] | None = None
        """The open connection and its cache of names; None while the file is closed."""
        self._file_id: FileId | None = None
        """The file when it was opened."""
        self._wal_ids: tuple[FileId | None, FileId | None] = (None, None)
        """The WAL and its index when they were opened."""
        self._wal_descriptor: int | None = None
        """The open WAL, to read its size also when it was deleted."""

    def apply(self, operations: Sequence[Operation]) -> list[Answer]:
        """Run operations in one transaction; return the value or the error of each.

        If one of them fails, the transaction is rolled back, and each operation runs in its own
        transaction, so that one failing operation does not affect the others.
        """
        with self._lock:
            try:
                return [(value, None) for value in self._run_transaction(operations)]
            except Exception as error:  # noqa: BLE001 - returned to the caller of each operation
                self._roll_back(error)
                code = _database_error_code(error)
                if (
                    len(operations) == 1
                    or code not in _MAY_SUCCEED_ALONE_CODES
                    or isinstance(error, StoreUnavailable)  # they may have been committed
                ):
                    return [(None, self._translate(error)) for _ in operations]
            return [answer for operation in operations for answer in self.apply([operation])]

    def read(self, queries: Sequence[Query]) -> list[Answer]:
        """Run queries in small read transactions; return the value or the error of each."""
        size = _MAX_READS_PER_TRANSACTION
        chunks = [queries[begin : begin + size] for begin in range(0, len(queries), size)]
        with self._lock:
            return [answer for chunk in chunks for answer in self._read_chunk(chunk)]

    def open(self) -> tuple[sqlite3.Connection, InternedNames]:
        """Return the connection and its cache of names; connect if there is no connection."""
        if self._file_id is not None and self._file_id != _read_file_id(self.path):
            # SQLite would continue to write to the old file, which no other process can see.
            raise self._unavailable(
                "its file was moved or deleted while it was open; put it back, or restart to use "
                "the file that is there now"
            )
        if self._connection_and_names is None:
            connection = connect(self.path)
            try:
                token = self._register_worker(connection)
            except BaseException:
                connection.close()
                raise
            if self._is_on_disk:
                self._file_id = _read_file_id(self.path)
                try:
                    self._wal_descriptor = os.open(self._wal_path, os.O_RDONLY)
                except OSError as error:
                    connection.close()
                    cause = f"its write-ahead log cannot be opened ({error})"
                    raise self._unavailable(cause) from error
                self._wal_ids = self._read_wal_ids()
            self._connection_and_names = connection, InternedNames(connection, token)
        return self._connection_and_names

    def _register_worker(self, connection: sqlite3.Connection) -> str | None:
        """Acquire the worker lock, if there is one, and set the clock; return the lock's token."""
        clock = self._clock if self._is_on_disk and isinstance(self._clock, AnchoredClock) else None
        worker_lock = self.worker_lock
        if worker_lock is None or worker_lock.token is not None:
            if clock is not None:
                clock.load_offset(connection)
        else:
            # Under the write lock, so that of two processes that start at the same time only the
            # first sets the clock, and the second uses its time.
            begin_write(connection, _BUSY_TIMEOUT_MS / 1000)
            worker_lock.acquire()
            is_alone = worker_lock.token is not None and not worker_lock.has_other_holders()
            if clock is not None and (is_alone or not clock.load_offset(connection)):
                clock.store_offset(connection)
            connection.execute("COMMIT")
        return None if worker_lock is None else worker_lock.token

    def prepare(self) -> None:
        """Create the file and acquire the worker lock, before the writer process opens the file."""
        try:
            if self._reader is not None:
                # After a crash of the writer process, only the reader may have the deleted WAL.
                self._reader.replace_deleted_wal()
            self.open()
        except Exception as error:  # noqa: BLE001 - raised again in the next line
            raise self._translate(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the next operation opens it again."""
        with self._lock:
            if self._connection_and_names is not None:
                connection, _ = self._connection_and_names
                self._connection_and_names = None
                if self._wal_descriptor is not None:
                    os.close(self._wal_descriptor)
                    self._wal_descriptor = None
                connection.close()

    def replace_deleted_wal(self) -> None:
        """If the WAL or its index was deleted, copy the WAL into the file and close the connection.

        Raises `StoreUnavailable` if the WAL cannot be copied. The connection then stays open unless
        copying the WAL can never succeed, and the next call tries again.
        """
        with self._lock:
            wal_id, index_id = wal_ids = self._read_wal_ids()
            if self._connection_and_names is None or wal_ids == self._wal_ids:
                return
            connection, _ = self._connection_and_names
            is_wal_deleted = wal_id != self._wal_ids[0]
            # An empty WAL was copied and truncated by another connection. If only the index was
            # deleted and exists again, another connection has copied the WAL and uses it.
            if self._wal_size() > 0 and (is_wal_deleted or index_id is None):
                if index_id not in {None, self._wal_ids[1]}:
                    self.close()
                    raise self._unavailable(
                        "its write-ahead log was deleted, and another process opened the file "
                        "before the log could be copied; changes since the last checkpoint are lost"
                    )
                cause = _checkpoint(connection, "TRUNCATE" if is_wal_deleted else "FULL")
                if cause is not None:
                    raise self._unavailable(
                        "its write-ahead log was deleted while it was open, and could not be "
                        f"copied into the file yet ({cause})"
                    )
                _logger.error(
                    "write-ahead log deleted while open, its content was copied into the file, "
                    "store=%s", self.path
                )  # fmt: skip
            self.close()
            if self._reader is not None:
                self._reader.close()

    def _run_transaction(self, operations: Sequence[Operation]) -> list[Any]:
        while True:
            connection, names = self.open()
            if self._is_on_disk and not os.access(self.path, os.W_OK):
                # The index of the WAL is mapped into memory: a write to it would end the process
                # with SIGBUS if the file system has become read-only.
                raise self._unavailable("its file is read-only")
            if self._read_wal_ids() == self._wal_ids:
                self._truncate_wal_if_long(connection)
                begin_write(connection, _BUSY_TIMEOUT_MS / 1000)
                # Checked again under the write lock: another process may have replaced the WAL
                # while this one waited for the lock, and would not see this transaction.
                if self._read_wal_ids() == self._wal_ids:
                    break
                connection.execute("ROLLBACK")
            self.replace_deleted_wal()
        names.clear_if_outdated()
        # The clock is read under the write lock, so that later transactions have later times.
        tx = WriteTransaction(connection, names, self._clock(), self.worker_lock)
        values = [operation(tx) for operation in operations]
        tx.flush()
        connection.execute("COMMIT")
        self.replace_deleted_wal()  # if it was deleted during the transaction, the commit is in it
        return values

    def _truncate_wal_if_long(self, connection: sqlite3.Connection) -> None:
        """Truncate the WAL if it is larger than `MAX_WAL_BYTES`. Must not run in a transaction."""
        size = self._wal_size()
        if size <= MAX_WAL_BYTES:
            self._truncate_wal_above = MAX_WAL_BYTES
        if size <= self._truncate_wal_above:
            return
        # A long read, such as a backup, prevents truncation. The next try follows only when the WAL
        # has grown by another `MAX_WAL_BYTES`.
        self._truncate_wal_above = size + MAX_WAL_BYTES
        _checkpoint(connection, "TRUNCATE")

    def _wal_size(self) -> int:
        return 0 if self._wal_descriptor is None else os.fstat(self._wal_descriptor).st_size

    def _read_wal_ids(self) -> tuple[FileId | None, FileId | None]:
        return _read_file_id(self._wal_path), _read_file_id(self._wal_index_path)

    def _read_chunk(self, queries: Sequence[Query]) -> list[Answer]:
        answers: list[Answer] = []
        try:
            connection, _ = self.open()
            # A deleted WAL can be read until the writer has copied it. The reader must not be the
            # first to connect again: a new index might lack a commit that is being written.
            wal_id, index_id = self._read_wal_ids()
            is_copied = wal_id != self._wal_ids[0] and self._wal_size() == 0
            if is_copied or index_id not in {None, self._wal_ids[1]}:
                self.close()
                connection, _ = self.open()
            connection.execute("BEGIN")
            tx = ReadTransaction(connection, self._clock())
            for query in queries:
                try:
                    answers.append((query(tx), None))
                except Exception as error:
                    if _database_error_code(error) is not None:
                        raise
                    answers.append((None, error))
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - returned to the caller of each query
            self._roll_back(error)
            return [(None, self._translate(error)) for _ in queries]
        return answers

    def _roll_back(self, error: Exception) -> None:
        """Roll back a failed transaction; close the connection if it is no longer usable."""
        if self._connection_and_names is None:
            return
        connection, names = self._connection_and_names
        names.clear()
        is_usable = _database_error_code(error) in _CONNECTION_USABLE_CODES
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            is_usable = False
        # The connection to a database in memory stays open: closing it would delete the data.
        if self._is_on_disk and not is_usable:
            self.close()

    def _translate(self, error: Exception) -> Exception:
        """Return `StoreUnavailable` for an error of the database, or any other error unchanged."""
        code = _database_error_code(error)
        if code is None:
            return error
        unavailable = self._unavailable(f"{_CAUSES.get(code, 'it fails')} ({error})")
        unavailable.__cause__ = error
        return unavailable

    def _unavailable(self, cause: str) -> StoreUnavailable:
        return StoreUnavailable(f"the store {self.path} is unavailable: {cause}")


def _checkpoint(connection: sqlite3.Connection, mode: str) -> str | None:
    """Copy the whole WAL into the database file; return why that failed, or None."""
    connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_TIMEOUT_MS}")
    try:
        for _ in range(_MAX_CHECKPOINT_TRIES):
            [(is_busy, _, _)] = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            if not is_busy:
                return None
    except sqlite3.Error as error:
        return str(error)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    return "another process uses it"


def _read_file_id(path: StorePath) -> FileId | None:
    """Return the device and inode of a file, or None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - faster than Path.stat, runs often
    except OSError:
        return None
    return status.st_dev, status.st_ino


def connect(path: StorePath) -> sqlite3.Connection:
    """Open the file, or create it if it is missing, and upgrade its schema."""
    if sqlite3.sqlite_version_info < _MIN_SQLITE_VERSION:
        raise ConfigurationError(
            f"the SQLite store needs SQLite {'.'.join(map(str, _MIN_SQLITE_VERSION))} or newer, "
            f"and this Python has {sqlite3.sqlite_version}"
        )
    # If two processes open a new file at once, switching to WAL mode fails in one of them, because
    # SQLite does not apply the busy timeout to the switch. So opening is retried.
    return call(
        _connect,
        path,
        on=is_busy_error,
        policy=_CONNECT_POLICY,
        downstream=_FILE,
    )


def _connect(path: StorePath) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,  # `SqliteDatabase` begins and ends transactions itself
        check_same_thread=False,  # it is not always closed in the thread that opened it
        cached_statements=1024,  # enough for every size of every multi-row statement
    )
    try:
        _configure(connection, path)
    except BaseException as error:
        connection.close()
        if _database_error_code(error) == sqlite3.SQLITE_NOTADB:
            msg = f"{path} is not a SQLite file: name another one for the store"
            raise ConfigurationError(msg) from error
        raise
    return connection


def _configure(connection: sqlite3.Connection, path: StorePath) -> None:
    for pragma in (
        "synchronous = FULL",  # COMMIT returns when the changes are on the disk
        "fullfsync = ON",  # without it, macOS leaves the changes in the cache of the drive
        "cache_size = -16384",  # 16 MiB
        f"journal_size_limit = {MAX_WAL_BYTES}",
        "secure_delete = FAST",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}")
    version = schema.read_version(connection, path)
    if version == 0:
        # `sweep` shrinks the file. This must be set before a new file gets a WAL and tables, and
        # only then: on an existing file it is a write, for which readers would wait.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    # In WAL mode, readers and the writer do not block each other. The mode is stored in the file,
    # but a restored copy may lack it, so it is set each time.
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode not in {"wal", "memory"}:
        raise ConfigurationError(
            f"{path} cannot have a write-ahead log, it stays in mode {mode}: "
            "keep the store on a local disk"
        )
    if schema.upgrade(connection, path, version) and path != IN_MEMORY:
        _logger.warning("created an empty store at sqlite:%s", Path(path).absolute())
    # The first read after the switch to WAL mode opens the WAL, which `SqliteDatabase` opens too.
    connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
