"""`SqliteStore`: idempotency records in a SQLite file, shared by the processes of one machine."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.checks import check_positive
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.idempotency.store import ExistingRecord, Record, decode_response, encode_headers
from tarry.runtime.downstream import internal_downstream
from tarry.runtime.event_loops import in_trio
from tarry.runtime.retry import call
from tarry.runtime.sqlite import begin_write, is_busy_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tarry.idempotency.store import StoredResponse

T = TypeVar("T")

_APPLICATION_ID = 0x74616964
"""The ASCII codes of "taid". SQLite writes them into the header of a file of this store."""
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE tarry_record (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    owner TEXT NOT NULL,
    free_at REAL NOT NULL, -- seconds since 1970
    status INTEGER,        -- NULL while the first request runs
    headers TEXT,
    body BLOB              -- NULL if it was too large to store
);
CREATE INDEX tarry_record_by_end ON tarry_record (free_at);
"""
_URL = re.compile(r"://|(?::|//).*@|(?:postgres|redis|valkey)[a-z]*(?::|//)", re.IGNORECASE)
"""Matches the URL of a server, also with typing errors."""
_FILE = internal_downstream("idempotency file")
_NOW = "SELECT (julianday('now') - 2440587.5) * 86400.0"
_UPSERT = """
INSERT INTO tarry_record AS stored (key, fingerprint, owner, free_at, status, headers, body)
VALUES (:key, :fingerprint, :owner, :free_at, :status, :headers, :body)
ON CONFLICT (key) DO UPDATE SET
    fingerprint = excluded.fingerprint, owner = excluded.owner, free_at = excluded.free_at,
    status = excluded.status, headers = excluded.headers, body = excluded.body
"""
# In the next three statements, a repeated call of the same owner succeeds, because the result of
# its first call may have been lost.
_CLAIM = _UPSERT + (
    "WHERE stored.free_at <= :now OR (stored.owner = excluded.owner AND stored.status IS NULL)"
)
_EXTEND = _UPSERT + "WHERE stored.owner = excluded.owner AND stored.status IS NULL"
_FINISH = _UPSERT + (
    "WHERE stored.owner = excluded.owner AND (stored.status IS NULL OR (stored.status = "
    "excluded.status AND stored.headers = excluded.headers AND stored.body IS excluded.body))"
)
_READ = "SELECT fingerprint, free_at, status, headers, body FROM tarry_record WHERE key = ?"
_RELEASE = "DELETE FROM tarry_record WHERE key = :key AND owner = :owner AND status IS NULL"
_SWEEP = """
DELETE FROM tarry_record
WHERE key IN (SELECT key FROM tarry_record WHERE free_at <= :now LIMIT :limit)
"""


class SqliteStore:
    """Stores records in the file at `path`, which is created if it does not exist.

    Changes are on disk when a call returns. The file is opened by the first call, so a server may
    fork after it has created the store.

    Args:
        path: the file.
        busy_timeout: seconds to wait while another process writes.
        clock: returns seconds since 1970; by default the clock of SQLite.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        busy_timeout: float = 5.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not isinstance(path, (str, PathLike)):
            raise ConfigurationTypeError("path", "must be the path of a file", path)
        if isinstance(path, str) and _URL.search(path):  # it may contain a password
            rule = "must be the path of a file, not a URL: use PostgresStore or RedisStore"
            raise ConfigurationError("path", rule)
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            rule = f"must be in an existing folder, got {short_repr(path)}: create {folder} first"
            raise ConfigurationError("path", rule)
        self._path = path
        self._busy_timeout = check_positive("busy_timeout", busy_timeout)
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._executor: ThreadPoolExecutor | None = None

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a key for `lease` seconds. Return None, or the record of a key that is not free."""

        def claim() -> ExistingRecord | None:
            with self._transaction() as (connection, now):
                row = _row(key, fingerprint, owner) | {"now": now, "free_at": now + lease}
                if connection.execute(_CLAIM, row).rowcount:
                    return None
                stored = connection.execute(_READ, (key,)).fetchone()
            record = Record(stored[0], stored[1], decode_response(*stored[2:]))
            return ExistingRecord(record, now)

        return await self._run_in_thread(claim)

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; see `IdempotencyStore`."""
        return await self._write(_EXTEND, lease, _row(key, fingerprint, owner)) > 0

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store the response for `retention` seconds; see `IdempotencyStore`."""
        return await self._write(_FINISH, retention, _row(key, fingerprint, owner, response)) > 0

    async def release(self, key: str, owner: str) -> None:
        """Free a key that this owner has claimed and not finished."""
        await self._write(_RELEASE, seconds=0.0, values={"key": key, "owner": owner})

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` expired records, and return how many were deleted."""
        return await self._write(_SWEEP, seconds=0.0, values={"limit": limit})

    async def close(self) -> None:
        """Close the file and stop the thread."""
        executor, self._executor = self._executor, None
        if executor is not None:
            await _run_in_executor(executor, self._disconnect)
            executor.shutdown(wait=False)

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        if self._executor is None:
            # One thread, because SQLite allows one writer at a time. It also keeps calls in order.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tarry-idempotency")
        return await _run_in_executor(self._executor, function)

    async def _write(self, statement: str, seconds: float, values: dict[str, Any]) -> int:
        """Execute a statement with `free_at` set to `seconds` from now; return its row count."""

        def write() -> int:
            with self._transaction() as (connection, now):
                values.update(now=now, free_at=now + seconds)
                return connection.execute(statement, values).rowcount

        return await self._run_in_thread(write)

    @contextmanager
    def _transaction(self) -> Generator[tuple[sqlite3.Connection, float]]:
        """Run a transaction that holds the write lock of the file; yield the connection and now.

        The time is read under the lock, so that times have the same order as writes.
        """
        if self._connection is None:
            # When two processes open a new file at the same time, one of them fails to switch it to
            # WAL, because SQLite ignores the busy timeout for this switch. So opening is retried.
            self._connection = call(self._connect, on=is_busy_error, downstream=_FILE)
        with self._connection as connection:
            begin_write(connection, self._busy_timeout)
            now = connection.execute(_NOW).fetchone()[0] if self._clock is None else self._clock()
            yield connection, now

    def _connect(self) -> sqlite3.Connection:
        if self._path != ":memory:":
            # Only the file's owner may read it, because it contains responses. SQLite creates its
            # WAL files with the same permissions.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        # isolation_level=None, because transactions are started explicitly.
        connection = sqlite3.connect(self._path, timeout=self._busy_timeout, isolation_level=None)
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self._check_or_create_schema(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_or_create_schema(self, connection: sqlite3.Connection) -> None:
        def read_number(statement: str) -> int:
            return int(connection.execute(statement).fetchone()[0])

        application_id = read_number("PRAGMA application_id")
        version = read_number("PRAGMA user_version")
        if (application_id, version) == (_APPLICATION_ID, _SCHEMA_VERSION):
            return
        if application_id == _APPLICATION_ID:
            raise ConfigurationError(
                f"{self._path} has schema version {version}, but this version of tarry "
                f"supports only {_SCHEMA_VERSION}: update tarry"
            )
        if application_id or version or read_number("SELECT count(*) FROM sqlite_master"):
            raise ConfigurationError(
                f"{self._path} is not a file of idempotency records: use a separate file for them"
            )
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def _run_in_executor(executor: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    future = executor.submit(function)
    if in_trio():
        import trio

        return await trio.to_thread.run_sync(future.result, abandon_on_cancel=True)
    return await asyncio.wrap_future(future)


def _row(
    key: str, fingerprint: str, owner: str, response: StoredResponse | None = None
) -> dict[str, Any]:
    row = {"key": key, "fingerprint": fingerprint, "owner": owner}
    if response is None:
        return row | {"status": None, "headers": None, "body": None}
    return row | response._asdict() | {"headers": encode_headers(response.headers)}
