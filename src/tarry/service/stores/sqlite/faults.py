"""What SQLite's errors mean for a caller: the store is away, or the call was wrong."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from os import PathLike

_WORDS = {
    sqlite3.SQLITE_BUSY: "another process holds its write lock",
    sqlite3.SQLITE_LOCKED: "another connection holds a lock on it",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "it is read-only",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "it may not be opened",
    sqlite3.SQLITE_AUTH: "it may not be opened",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite file any more",
    sqlite3.SQLITE_PROTOCOL: "its locks are in disorder",
    sqlite3.SQLITE_NOMEM: "there is no memory left",
    sqlite3.SQLITE_INTERRUPT: "it was interrupted",
}
_WRONG_CALL = frozenset(
    {
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
    }
)
_STAYS = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})
_ALONE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_ERROR})


def _code(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF  # the rest says where it happened


def is_fault(error: BaseException) -> bool:
    """Whether the file is to blame, and not what was to be done with it."""
    code = _code(error)
    return isinstance(error, sqlite3.Error) and code is not None and code not in _WRONG_CALL


def breaks_connection(error: BaseException) -> bool:
    """Whether to open the file anew: what was wrong with it may be fixed without our knowing."""
    return is_fault(error) and _code(error) not in _STAYS


def spares_others(error: BaseException) -> bool:
    """Whether other operations may do better: a full disk has room for a smaller one."""
    return not is_fault(error) or _code(error) in _ALONE


def unavailable(error: BaseException, path: str | PathLike[str]) -> StoreUnavailable:
    """Return the error for callers, to be raised from the one that SQLite gave."""
    words = _WORDS.get(_code(error) or 0, "it fails")
    return StoreUnavailable(f"the store {path} is away: {words} ({error})")
