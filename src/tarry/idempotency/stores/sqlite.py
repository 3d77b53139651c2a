"""Records in a SQLite file that the processes of one machine share, and that outlives them."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.checks import positive
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.idempotency.headers import pack, unpack
from tarry.idempotency.loops import in_thread
from tarry.idempotency.record import Record, StoredResponse
from tarry.idempotency.store import Taken
from tarry.runtime.retry import call

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")

_APPLICATION = 0x74616964
"""Says in the file's head whose it is: "taid"."""
_VERSION = 1
_SCHEMA = """
CREATE TABLE tarry_record (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    owner TEXT NOT NULL,
    free_at REAL NOT NULL, -- seconds since 1970
    status INTEGER,        -- NULL while the first request runs
    headers TEXT,
    body BLOB              -- NULL when it was too large to keep
);
CREATE INDEX tarry_record_by_end ON tarry_record (free_at);
"""
_NOW = "SELECT (julianday('now') - 2440587.5) * 86400.0"
_INSERT = """
INSERT INTO tarry_record AS held (key, fingerprint, owner, free_at, status, headers, body)
VALUES (:key, :fingerprint, :owner, :free_at, :status, :headers, :body)
ON CONFLICT (key) DO UPDATE SET
    fingerprint = excluded.fingerprint, owner = excluded.owner, free_at = excluded.free_at,
    status = excluded.status, headers = excluded.headers, body = excluded.body
"""
# Who repeats a step is let in: its first answer was lost.
_CLAIM = (
    _INSERT
    + """
WHERE held.free_at <= :now OR (held.owner = excluded.owner AND held.status IS NULL)
"""
)
_EXTEND = _INSERT + "WHERE held.owner = excluded.owner AND held.status IS NULL"
_FINISH = (
    _INSERT
    + """
WHERE held.owner = excluded.owner AND (held.status IS NULL OR (
    held.status = excluded.status AND held.headers = excluded.headers
    AND held.body IS excluded.body
))
"""
)
_READ = "SELECT fingerprint, free_at, status, headers, body FROM tarry_record WHERE key = ?"
_RELEASE = "DELETE FROM tarry_record WHERE key = :key AND owner = :owner AND status IS NULL"
_SWEEP = """
DELETE FROM tarry_record
WHERE key IN (SELECT key FROM tarry_record WHERE free_at <= :now LIMIT :limit)
"""


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
        if not isinstance(path, (str, PathLike)):
            raise ConfigurationTypeError("path", "must name a file", path)
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            rule = (
                f"must lie in a folder that is there, got {short_repr(path)}: make {folder} first"
            )
            raise ConfigurationError("path", rule)
        self._path = path
        self._busy_timeout = positive("busy_timeout", busy_timeout)
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        return await self._in_thread(partial(self._claim, key, fingerprint, owner, lease))

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is finished, or another's."""
        return await self._write(_EXTEND, lease, _row(key, fingerprint, owner)) > 0

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Keep the response for `keep` seconds; False: the key is another's by now."""
        return await self._write(_FINISH, keep, _row(key, fingerprint, owner, response)) > 0

    async def release(self, key: str, owner: str) -> None:
        """Free a key that is still the owner's and not finished."""
        await self._write(_RELEASE, 0.0, {"key": key, "owner": owner})

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` records that are over, and say how many those were."""
        return await self._write(_SWEEP, 0.0, {"limit": limit})

    async def close(self) -> None:
        """Close the file and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await in_thread(thread, self._disconnect)
            thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            # One thread: SQLite lets one write at a time anyway, and so calls keep their order.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tarry-idempotency")
        return await in_thread(self._thread, function)

    async def _write(self, statement: str, seconds: float, values: dict[str, Any]) -> int:
        """Execute one statement, with its end counted from now, and count its rows."""

        def write() -> int:
            with self._transaction() as (connection, now):
                values.update(now=now, free_at=now + seconds)
                return connection.execute(statement, values).rowcount

        return await self._in_thread(write)

    # --- in the thread ----------------------------------------------------------------------------

    def _claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        with self._transaction() as (connection, now):
            wanted = _row(key, fingerprint, owner) | {"now": now, "free_at": now + lease}
            if connection.execute(_CLAIM, wanted).rowcount:
                return None
            printed, free_at, status, headers, body = connection.execute(_READ, (key,)).fetchone()
        response = None if status is None else StoredResponse(status, unpack(headers), body)
        return Taken(Record(printed, free_at, response), now)

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
        if self._path != ":memory:":
            # Only its owner may read the file: responses are in it. SQLite makes its own beside it
            # with the same rights.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(
            self._path,
            timeout=self._busy_timeout,
            isolation_level=None,  # transactions are begun by hand
        )
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self._migrate(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        def ask(what: str) -> int:
            return int(connection.execute(what).fetchone()[0])

        application, version = ask("PRAGMA application_id"), ask("PRAGMA user_version")
        if (application, version) == (_APPLICATION, _VERSION):
            return
        if application == _APPLICATION:
            msg = (
                f"{self._path} has version {version} of the schema, and this tarry knows "
                f"{_VERSION}: it belongs to a newer one"
            )
            raise ConfigurationError(msg)
        if application or version or ask("SELECT count(*) FROM sqlite_master"):
            msg = (
                f"{self._path} is not a file of idempotency records: give them a file of their own"
            )
            raise ConfigurationError(msg)
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _row(
    key: str, fingerprint: str, owner: str, response: StoredResponse | None = None
) -> dict[str, Any]:
    row = {"key": key, "fingerprint": fingerprint, "owner": owner}
    if response is None:
        return row | {"status": None, "headers": None, "body": None}
    headers = pack(response.headers)
    return row | {"status": response.status, "headers": headers, "body": response.body}


def _is_busy(error: BaseException) -> bool:
    """Two processes that open a new file at once: one cannot switch it to WAL, timeout or not."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }
