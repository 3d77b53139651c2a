"""Records in a SQLite file that the processes of one machine share, and that outlives them."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tarry.core.checks import positive
from tarry.errors import ConfigurationError
from tarry.idempotency.headers import pack, unpack
from tarry.idempotency.loops import in_thread
from tarry.idempotency.record import Record, StoredResponse
from tarry.idempotency.store import Taken
from tarry.runtime.retrying import call

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from os import PathLike

_VERSION = 1
_SCHEMA = """
CREATE TABLE record (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    owner TEXT NOT NULL,
    free_at REAL NOT NULL, -- seconds since 1970
    status INTEGER,        -- NULL while the first request runs
    headers TEXT,
    body BLOB              -- NULL when it was too large to keep
);
CREATE INDEX record_by_end ON record (free_at);
"""
_NOW = "SELECT (julianday('now') - 2440587.5) * 86400.0"
_CLAIM = """
INSERT INTO record (key, fingerprint, owner, free_at)
VALUES (:key, :fingerprint, :owner, :now + :lease)
ON CONFLICT (key) DO UPDATE SET
    fingerprint = excluded.fingerprint, owner = excluded.owner, free_at = excluded.free_at,
    status = NULL, headers = NULL, body = NULL
WHERE record.free_at <= :now
RETURNING 1
"""
_READ = "SELECT fingerprint, free_at, status, headers, body FROM record WHERE key = ?"
_EXTEND = "UPDATE record SET free_at = ? WHERE key = ? AND owner = ? AND status IS NULL"
_FINISH = """
UPDATE record SET free_at = ?, status = ?, headers = ?, body = ?
WHERE key = ? AND owner = ? AND status IS NULL
"""
_RELEASE = "DELETE FROM record WHERE key = ? AND owner = ? AND status IS NULL"
_SWEEP = "DELETE FROM record WHERE key IN (SELECT key FROM record WHERE free_at <= ? LIMIT ?)"


class SqliteStore:
    """Keeps records in the file at `path`, which it makes when it is missing.

    What a call has changed is on the disk when it returns. `busy_timeout`: how many seconds to wait
    for another process that writes. `clock` returns seconds since 1970, by default SQLite's own.

    The file is opened at the first call, so that a server may fork after it has made the store.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        busy_timeout: float = 5.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._busy_timeout = positive("busy_timeout", busy_timeout)
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        # One thread: SQLite lets one write at a time anyway, and so calls keep their order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tarry-idempotency")
        self._closed = False

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        return await in_thread(self._thread, partial(self._claim, key, fingerprint, owner, lease))

    async def extend(self, key: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is not the owner's any more."""
        return await self._write(lambda now: (_EXTEND, (now + lease, key, owner))) > 0

    async def finish(self, key: str, owner: str, response: StoredResponse, keep: float) -> bool:
        """Keep the response for `keep` seconds; False: the key is not the owner's any more."""
        stored = (response.status, pack(response.headers), response.body)
        return await self._write(lambda now: (_FINISH, (now + keep, *stored, key, owner))) > 0

    async def release(self, key: str, owner: str) -> None:
        """Free a key that is still the owner's and not finished."""
        await self._write(lambda _now: (_RELEASE, (key, owner)))

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` records whose time is up, and say how many those were."""
        return await self._write(lambda now: (_SWEEP, (now, limit)))

    async def close(self) -> None:
        """Close the file and end the thread."""
        if not self._closed:
            self._closed = True
            await in_thread(self._thread, self._disconnect)
            self._thread.shutdown(wait=False)

    # --- in the thread ----------------------------------------------------------------------------

    def _claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        with self._transaction() as (connection, now):
            wanted = {
                "key": key,
                "fingerprint": fingerprint,
                "owner": owner,
                "lease": lease,
                "now": now,
            }
            if connection.execute(_CLAIM, wanted).fetchall():
                return None
            printed, free_at, status, headers, body = connection.execute(_READ, (key,)).fetchone()
        response = None if status is None else StoredResponse(status, unpack(headers), body)
        return Taken(Record(printed, free_at, response), now)

    async def _write(self, statement: Callable[[float], tuple[str, tuple[Any, ...]]]) -> int:
        """Execute one statement, made with the time on the store's clock, and count its rows."""

        def write() -> int:
            with self._transaction() as (connection, now):
                return connection.execute(*statement(now)).rowcount

        return await in_thread(self._thread, write)

    @contextmanager
    def _transaction(self) -> Generator[tuple[sqlite3.Connection, float]]:
        """Hold the file's write lock; the time is read under it, in the order of the writes."""
        if self._connection is None:
            self._connection = call(self._connect, on=_is_busy)
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            now = connection.execute(_NOW).fetchone()[0] if self._clock is None else self._clock()
            yield connection, now

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path,
            timeout=self._busy_timeout,
            isolation_level=None,  # transactions are begun by hand
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in {0, _VERSION}:
            msg = (
                f"{self._path} has version {version} of the schema, and this tarry knows "
                f"{_VERSION}: it belongs to a newer one, or is not a file of idempotency records"
            )
            raise ConfigurationError(msg)
        if version == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_busy(error: BaseException) -> bool:
    """Two processes that open a new file at once: one cannot switch it to WAL, timeout or not."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }
