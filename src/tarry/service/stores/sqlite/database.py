"""The file: operations in, answers out, and one transaction for all that came together.

Without threads and without asyncio, so that a simulation can run it as it stands.
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
    Question = Callable[[ReadTransaction], Any]
    Answer = tuple[Any, Exception | None]

IN_MEMORY = ":memory:"
"""The path of a database in memory: it belongs to one connection, and is gone when that closes."""
_READS = 8
"""Questions that are answered in one transaction: while it lasts, the log cannot be emptied."""
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


class Database:
    """One connection to the file at `path`; `clock` gives epoch milliseconds.

    It is opened when it is needed, and opened anew after an error that may have to do with it: so
    the store works again as soon as its cause is gone.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        clock: Callable[[], int],
        worker_lock: WorkerLock | None = None,
    ) -> None:
        self.path = path
        self.worker_lock = worker_lock
        self._is_on_disk = path != IN_MEMORY
        self.commits: int = 0
        """How many transactions were written."""
        self._clock = clock
        self._lock = threading.RLock()
        """Held during a transaction: the reads and writes of a database in memory come from two
        threads and share a connection."""
        self._wal = WriteAheadLog(path)
        self._opened: tuple[sqlite3.Connection, InternedNames] | None = None
        self._place: tuple[int, int] | None = None

    def apply(self, operations: Sequence[Operation]) -> list[Answer]:
        """Run operations in one transaction; each has its own answer: a value, or an error.

        One that fails takes nothing with it: what failed together is run one by one.
        """
        with self._lock:
            try:
                return [(value, None) for value in self._together(operations)]
            except Exception as error:  # noqa: BLE001 - it is the caller's, in his answer
                self._clean_up(error)
                if len(operations) == 1 or not spares_others(error):
                    return [(None, self._told(error)) for _ in operations]
            return [answer for operation in operations for answer in self.apply([operation])]

    def read(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer questions, a few at a time from one state of the file."""
        parts = [questions[begin : begin + _READS] for begin in range(0, len(questions), _READS)]
        with self._lock:
            return [answer for part in parts for answer in self._read(part)]

    def open(self) -> tuple[sqlite3.Connection, InternedNames]:
        """Open the file unless it is open."""
        self._look()
        if self._opened is None:
            connection = connect(self.path)
            self._place = _place_of(self.path) if self._is_on_disk else None
            token = None
            if self.worker_lock is not None:
                self.worker_lock.acquire()
                token = self.worker_lock.token
            self._opened = connection, InternedNames(connection, token)
        return self._opened

    def prepare(self) -> None:
        """Make the file and take the lock, for another process that is to write."""
        try:
            self.open()
        except Exception as error:  # noqa: BLE001 - told in the port's words
            raise self._told(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; the next operation opens it again."""
        if self._opened is not None:
            connection, _ = self._opened
            self._opened = None
            connection.close()

    def _look(self) -> None:
        """Refuse to write into a file that is gone: SQLite would not notice."""
        if self._place is not None and self._place != _place_of(self.path):
            msg = (
                f"the store {self.path} is away: its file was moved or deleted since it was "
                "opened; put it back, or restart to begin with what is there"
            )
            raise StoreUnavailable(msg)

    def _together(self, operations: Sequence[Operation]) -> list[Any]:
        connection, names = self.open()
        if self._is_on_disk:
            self._wal.shorten(connection)
        connection.execute("BEGIN IMMEDIATE")
        before = connection.total_changes
        # The time is read under the write lock: it grows with the order of the transactions.
        tx = Transaction(connection, names, self._clock(), self.worker_lock)
        values = [operation(tx) for operation in operations]
        tx.flush()
        connection.execute("COMMIT")
        self.commits += connection.total_changes != before
        return values

    def _read(self, questions: Sequence[Question]) -> list[Answer]:
        answers: list[Answer] = []
        try:
            connection, _ = self.open()
            connection.execute("BEGIN")
            tx = ReadTransaction(connection, self._clock())
            answers.extend(self._answer(question, tx) for question in questions)
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - as above
            self._clean_up(error)
            return [(None, self._told(error)) for _ in questions]
        return answers

    def _answer(self, question: Question, tx: ReadTransaction) -> Answer:
        try:
            return question(tx), None
        except Exception as error:
            if is_fault(error):
                raise
            return None, error

    def _clean_up(self, error: Exception) -> None:
        """Take back what was begun."""
        if self._opened is None:
            return
        connection, names = self._opened
        names.forget()
        is_usable = not breaks_connection(error)
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            is_usable = False
        # A database in memory keeps its connection whatever happens: closing it deletes the data.
        if self._is_on_disk and not is_usable:
            self.close()

    def _told(self, error: Exception) -> Exception:
        if not is_fault(error):
            return error
        told = unavailable(error, self.path)
        told.__cause__ = error
        return told


def _place_of(path: str | PathLike[str]) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - in every transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
