"""How the file is opened, and its write-ahead log kept short.

SQLite begins its log anew when a writer finds that nobody reads from it. Under steady reading that
never happens, so above a size the writer copies all of it into the file and empties it. It waits
for reads that have begun, in this process or another; those that begin meanwhile do not hold it up.
"""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.runtime.retry import call
from tarry.service.stores.sqlite import schema

if TYPE_CHECKING:
    from os import PathLike

_OLDEST = (3, 38, 0)  # the first that always has JSON
_BUSY_TIMEOUT_MS = 5_000
MAX_WAL_BYTES = 64 << 20
"""Bytes: above it the log is emptied, and SQLite leaves no more of it on the disk."""
_MAX_CHECKPOINT_TRIES, _CHECKPOINT_TIMEOUT_MS = 10, 50
"""SQLite waits for a place in its table of reads, not for the read: where one follows another, it
waits in vain. A new try finds that the later read is of the newest state, and no obstacle.
"""


def connect(path: str | PathLike[str]) -> sqlite3.Connection:
    """Open the file, make it when it is missing, and bring its tables up to date."""
    if sqlite3.sqlite_version_info < _OLDEST:
        msg = (
            f"the SQLite store needs SQLite {'.'.join(map(str, _OLDEST))} or newer, "
            f"and this Python has {sqlite3.sqlite_version}"
        )
        raise ConfigurationError(msg)
    return call(_connect, path, on=_is_busy)


def _is_busy(error: BaseException) -> bool:
    """Two processes that open a new file at once: one cannot switch it to WAL, timeout or not."""
    return getattr(error, "sqlite_errorcode", None) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _connect(path: str | PathLike[str]) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,  # transactions are begun by hand
        check_same_thread=False,  # opened and closed by one thread, used by another
        cached_statements=1024,
    )
    try:
        _prepare(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            msg = f"{path} is not a SQLite file: name another one for the store"
            raise ConfigurationError(msg) from error
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: str | PathLike[str]) -> None:
    for pragma in (
        "synchronous = FULL",  # a commit is on the disk
        "fullfsync = ON",  # else macOS leaves it in the drive's cache
        "cache_size = -16384",
        f"journal_size_limit = {MAX_WAL_BYTES}",
        "secure_delete = FAST",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}")
    version = schema.read_version(connection, path)
    _log_ahead(connection, path)
    schema.upgrade(connection, path, version)


def _log_ahead(connection: sqlite3.Connection, path: str | PathLike[str]) -> None:
    """Let readers and the writer not wait for each other; a copy of the file may have lost it."""
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode not in {"wal", "memory"}:
        msg = (
            f"{path} cannot have a write-ahead log, it stays in mode {mode}: "
            "keep the store on a local disk"
        )
        raise ConfigurationError(msg)


class WriteAheadLog:
    """The log of the file at `path`, as the one connection that writes sees it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = f"{os.path.realpath(path)}-wal"
        self._try_above = MAX_WAL_BYTES

    def shorten(self, connection: sqlite3.Connection) -> None:
        """Empty the log if it is long; not within a transaction.

        A long read, such as a backup, keeps it: the next try is made when it has grown as much
        again.
        """
        size = self._size()
        if size <= MAX_WAL_BYTES:
            self._try_above = MAX_WAL_BYTES
        if size <= self._try_above:
            return
        self._try_above = size + MAX_WAL_BYTES
        [(patience,)] = connection.execute("PRAGMA busy_timeout").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_TIMEOUT_MS}")
        try:
            for _ in range(_MAX_CHECKPOINT_TRIES):
                [(busy, _, _)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                if not busy:
                    break
        finally:
            connection.execute(f"PRAGMA busy_timeout = {patience}")

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size  # noqa: PTH116 - in every transaction
        except OSError:
            return 0
