"""The file's write-ahead log, kept short where readers would let it grow without end.

SQLite begins its log anew when a writer finds that nobody reads from it. Under steady reading that
never happens, so above a size the writer copies all of it into the file and empties it. It waits
for reads that have begun, in this process or another; those that begin meanwhile do not hold it up.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from os import PathLike

MOST = 64 << 20
"""Bytes: above it the log is emptied, and SQLite leaves no more of it on the disk."""
_TRIES, _PATIENCE_MS = 10, 50
"""SQLite waits for a place in its table of reads, not for the read: where one follows another, it
waits in vain. A new try finds that the later read is of the newest state, and no obstacle.
"""


class Wal:
    """The log of the file at `path`, as the one connection that writes sees it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = f"{os.path.realpath(path)}-wal"
        self._try_above = MOST

    def shorten(self, connection: sqlite3.Connection) -> None:
        """Empty the log if it is long; not within a transaction.

        A long read, such as a backup, keeps it: the next try is made when it has grown as much
        again.
        """
        size = self._size()
        if size <= MOST:
            self._try_above = MOST
        if size <= self._try_above:
            return
        self._try_above = size + MOST
        [(patience,)] = connection.execute("PRAGMA busy_timeout").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")
        try:
            for _ in range(_TRIES):
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
