"""How the file is opened, made when it is missing, and brought up to date when it is older."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.runtime.retry import call
from tarry.service.stores.sqlite import tables, wal

if TYPE_CHECKING:
    from os import PathLike

_OLDEST = (3, 38, 0)  # the first that always has JSON
_APPLICATION = 0x74617272  # "tarr": whose file it is, in its header
_BUSY_MS = 5_000


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
        timeout=_BUSY_MS / 1000,
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
        f"journal_size_limit = {wal.MOST}",
        "secure_delete = FAST",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}")
    version = _version(connection, path)
    _log_ahead(connection, path)
    if version < len(tables.MIGRATIONS):
        connection.execute("BEGIN IMMEDIATE")
        try:
            _migrate(connection, path)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


def _log_ahead(connection: sqlite3.Connection, path: str | PathLike[str]) -> None:
    """Let readers and the writer not wait for each other; a copy of the file may have lost it."""
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode not in {"wal", "memory"}:
        msg = (
            f"{path} cannot have a write-ahead log, it stays in mode {mode}: "
            "keep the store on a local disk"
        )
        raise ConfigurationError(msg)


def _version(connection: sqlite3.Connection, path: str | PathLike[str]) -> int:
    """Return the version of the schema, 0 for an empty file; refuse what is not ours."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    if application != _APPLICATION and not (empty and version == application == 0):
        msg = f"{path} belongs to another program: name another file for the store"
        raise ConfigurationError(msg)
    if version > len(tables.MIGRATIONS):
        msg = (
            f"{path} has version {version} of the schema, and this tarry knows "
            f"{len(tables.MIGRATIONS)}: use the newer tarry that wrote it"
        )
        raise ConfigurationError(msg)
    return version


def _migrate(connection: sqlite3.Connection, path: str | PathLike[str]) -> None:
    """Take the steps that are missing; under the write lock, for others may be at it too."""
    for number in range(_version(connection, path), len(tables.MIGRATIONS)):
        for statement in tables.MIGRATIONS[number].split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number + 1}")
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
