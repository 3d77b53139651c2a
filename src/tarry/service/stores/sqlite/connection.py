"""Opening the database file, and keeping its write-ahead log (WAL) short.

SQLite overwrites the WAL from its beginning only when a writer finds that no connection reads from
it. Under steady reading that never happens, and the file would grow without limit. So once the WAL
is larger than `MAX_WAL_BYTES`, the writer copies all of it into the database file and truncates it.
This checkpoint waits for reads that have begun, in this process or another, but not for reads that
begin later.
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

_MIN_SQLITE_VERSION = (3, 38, 0)  # the first in which the JSON functions are always built in
_BUSY_TIMEOUT_MS = 5_000
MAX_WAL_BYTES = 64 << 20
"""Size above which the writer truncates the WAL; SQLite leaves a file of at most this size."""
_MAX_CHECKPOINT_TRIES, _CHECKPOINT_TIMEOUT_MS = 10, 50
"""A checkpoint waits until a slot in SQLite's table of readers is free, not until one read ends. If
one read follows another in the same slot, waiting longer does not help. A new try does, because the
later read uses the newest state and does not block the checkpoint."""


def connect(path: str | PathLike[str]) -> sqlite3.Connection:
    """Open the file, creating it if it is missing, and upgrade its schema."""
    if sqlite3.sqlite_version_info < _MIN_SQLITE_VERSION:
        msg = (
            f"the SQLite store needs SQLite {'.'.join(map(str, _MIN_SQLITE_VERSION))} or newer, "
            f"and this Python has {sqlite3.sqlite_version}"
        )
        raise ConfigurationError(msg)
    return call(_connect, path, on=_is_busy)


def _is_busy(error: BaseException) -> bool:
    # When two processes open a new file at once, one of them cannot switch it to WAL mode: SQLite
    # does not apply the busy timeout to that.
    return getattr(error, "sqlite_errorcode", None) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _connect(path: str | PathLike[str]) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,  # `Database` begins and ends transactions itself
        check_same_thread=False,  # opened and closed by one thread, used by another
        cached_statements=1024,  # all sizes of all multi-row statements
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
        "synchronous = FULL",  # COMMIT returns when the changes are on the disk
        "fullfsync = ON",  # macOS would otherwise leave them in the cache of the drive
        "cache_size = -16384",  # 16 MiB
        f"journal_size_limit = {MAX_WAL_BYTES}",
        "secure_delete = FAST",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}")
    version = schema.read_version(connection, path)
    _use_write_ahead_log(connection, path)
    schema.upgrade(connection, path, version)


def _use_write_ahead_log(connection: sqlite3.Connection, path: str | PathLike[str]) -> None:
    """Switch the file to WAL mode, in which readers and the writer do not block each other.

    The mode is stored in the file, but is set on every opening: a restored copy may lack it.
    """
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode not in {"wal", "memory"}:
        msg = (
            f"{path} cannot have a write-ahead log, it stays in mode {mode}: "
            "keep the store on a local disk"
        )
        raise ConfigurationError(msg)


class WriteAheadLog:
    """The WAL of the database at `path`, seen from the only connection that writes."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = f"{os.path.realpath(path)}-wal"
        self._truncate_above = MAX_WAL_BYTES

    def truncate_if_long(self, connection: sqlite3.Connection) -> None:
        """Truncate the WAL if it is larger than `MAX_WAL_BYTES`; call it outside of a transaction.

        A long read, such as a backup, can prevent the truncation. The next try is made when the WAL
        has grown by another `MAX_WAL_BYTES`.
        """
        size = self._size()
        if size <= MAX_WAL_BYTES:
            self._truncate_above = MAX_WAL_BYTES
        if size <= self._truncate_above:
            return
        self._truncate_above = size + MAX_WAL_BYTES
        [(timeout,)] = connection.execute("PRAGMA busy_timeout").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_TIMEOUT_MS}")
        try:
            for _ in range(_MAX_CHECKPOINT_TRIES):
                [(busy, _, _)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                if not busy:
                    break
        finally:
            connection.execute(f"PRAGMA busy_timeout = {timeout}")

    def _size(self) -> int:
        try:
            # os.stat instead of Path.stat: this runs before every transaction.
            return os.stat(self._path).st_size  # noqa: PTH116
        except OSError:
            return 0
