"""Records in a PostgreSQL table, for the many processes of a service.

Each step is one statement that names what it expects to find, on the clock of the database. The
isolation is PostgreSQL's own default, READ COMMITTED.
"""

from __future__ import annotations

import asyncio
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tarry.errors import ConfigurationError, MissingExtra
from tarry.idempotency.headers import pack, unpack
from tarry.idempotency.record import Record, StoredResponse
from tarry.idempotency.store import Taken

if TYPE_CHECKING:
    from types import ModuleType

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
"""At most 50 characters: PostgreSQL cuts names at 63, and the index adds to the table's."""

_TIMEOUT = 5.0
"""Seconds for each of: to connect, to be given a connection, to run a statement."""
_BATCH = 500
"""Rows that one statement of a sweep removes: it holds their locks until it is done."""
_ROUNDS = 10
"""Times to look again at a key that was taken when claimed, and free when read."""

_CREATE = """
    SELECT pg_advisory_xact_lock(hashtextextended('{table}', 0));
    CREATE TABLE IF NOT EXISTS {table} (
        key text COLLATE "C" PRIMARY KEY,
        fingerprint text NOT NULL,
        owner text NOT NULL,
        free_at timestamptz NOT NULL,
        status integer,
        headers text,
        body bytea
    );
    CREATE INDEX IF NOT EXISTS {index} ON {table} (free_at);
"""

# An owner that asks again is let in: its first answer was lost with its connection.
_CLAIM = """
    INSERT INTO {table} AS held (key, fingerprint, owner, free_at)
    VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))
    ON CONFLICT (key) DO UPDATE
    SET fingerprint = excluded.fingerprint, owner = excluded.owner, free_at = excluded.free_at,
        status = NULL, headers = NULL, body = NULL
    WHERE held.free_at <= clock_timestamp()
       OR (held.owner = excluded.owner AND held.status IS NULL)
    RETURNING true
"""

_HOLDER = """
    SELECT fingerprint, extract(epoch FROM free_at)::float8 AS free_at, status, headers, body,
           extract(epoch FROM now.time)::float8 AS now
    FROM {table}, (SELECT clock_timestamp() AS time) AS now
    WHERE key = $1 AND free_at > now.time
"""

# A record that is gone is made anew: nobody else has taken the key.
_EXTEND = """
    INSERT INTO {table} AS held (key, fingerprint, owner, free_at)
    VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))
    ON CONFLICT (key) DO UPDATE SET free_at = excluded.free_at
    WHERE held.owner = excluded.owner AND held.status IS NULL
    RETURNING true
"""

# The same response a second time is no second one: the first answer was lost, as above.
_FINISH = """
    INSERT INTO {table} AS held (key, fingerprint, owner, free_at, status, headers, body)
    VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4), $5, $6, $7)
    ON CONFLICT (key) DO UPDATE
    SET free_at = excluded.free_at,
        status = excluded.status, headers = excluded.headers, body = excluded.body
    WHERE held.owner = excluded.owner AND (held.status IS NULL OR
        (held.status, held.headers, held.body) IS NOT DISTINCT FROM
        (excluded.status, excluded.headers, excluded.body))
    RETURNING true
"""

_RELEASE = "DELETE FROM {table} WHERE key = $1 AND owner = $2 AND status IS NULL"

# statement_timestamp() and not clock_timestamp(): only a time that stands still can use the index.
_SWEEP = """
    WITH over AS (
        SELECT key FROM {table} WHERE free_at <= statement_timestamp()
        ORDER BY free_at LIMIT $1 FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM {table} USING over WHERE {table}.key = over.key RETURNING true
    )
    SELECT count(*) FROM gone
"""


class Pool(Protocol):
    """What is used of asyncpg's pool."""

    def acquire(self, *, timeout: float | None = None) -> Any:
        """Wait for a connection."""
        ...

    async def release(self, connection: Any, *, timeout: float | None = None) -> None:
        """Give a connection back."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class PostgresStore:
    """Keeps records in a table, which is made on first use if it is not there.

    `dsn_or_pool` is a connection URI, or an asyncpg pool that stays yours to close (behind a
    transaction pooler: one with `statement_cache_size=0`). Not one that handlers hold connections
    of while they answer: the answer would wait for a connection, and the connection for the answer.
    `table` may name its schema.
    """

    def __init__(self, dsn_or_pool: str | Pool, *, table: str = "tarry_idempotency") -> None:
        names = table.split(".")
        if len(names) > 2 or not all(map(_NAME.fullmatch, names)):  # noqa: PLR2004 - schema.table
            rule = "a name of up to 50 letters, digits and _, or schema.name"
            raise ConfigurationError("table", f"must be {rule}", table)
        self._table = ".".join(f'"{name}"' for name in names)
        self._index = f'"{names[-1]}_free_at"'
        self._asyncpg = _library()
        self._given = dsn_or_pool
        self._pool: Pool | None = None
        self._opening = asyncio.Lock()

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        for _ in range(_ROUNDS):
            if await self._row(_CLAIM, key, fingerprint, owner, lease):
                return None
            if (row := await self._row(_HOLDER, key)) is not None:
                return Taken(Record(row["fingerprint"], row["free_at"], _response(row)), row["now"])
        # It changes hands faster than it can be read: taken, and worth another try at once.
        return Taken(Record(fingerprint, 0.0, None), 0.0)

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is finished, or another's."""
        return bool(await self._row(_EXTEND, key, fingerprint, owner, lease))

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Keep the response for `keep` seconds; False: the key is another's by now."""
        kept = response.status, pack(response.headers), response.body
        return bool(await self._row(_FINISH, key, fingerprint, owner, keep, *kept))

    async def release(self, key: str, owner: str) -> None:
        """Free a key whose request came to nothing; nothing happens if it is not the owner's."""
        await self._row(_RELEASE, key, owner)

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` records whose time is up, and say how many those were."""
        total, gone = 0, 1
        while total < limit and gone:
            gone = (await self._row(_SWEEP, min(_BATCH, limit - total)))["count"]
            total += gone
        return total

    async def close(self) -> None:
        """Close the connections that the store has opened itself."""
        pool, self._pool = self._pool, None
        if pool is not None and pool is not self._given:
            await pool.close()

    async def _row(self, statement: str, *args: object) -> Any:
        """Run a statement and return its first row, or None."""
        pool = self._pool or await self._open()
        return await self._twice(pool, statement.format(table=self._table), *args)

    async def _open(self) -> Pool:
        """Connect and make the table, once for all who wait for it."""
        async with self._opening:
            if self._pool is None:
                pool = await self._connected()
                try:
                    await self._make_table(pool)
                except BaseException:
                    if pool is not self._given:
                        await pool.close()
                    raise
                self._pool = pool
            return self._pool

    async def _connected(self) -> Pool:
        if not isinstance(self._given, str):
            return self._given
        pool: Pool = await self._asyncpg.create_pool(self._given, min_size=0, timeout=_TIMEOUT)
        return pool

    async def _make_table(self, pool: Pool) -> None:
        # Asked first, because a role that may use the table need not be one that may create it.
        there = "SELECT to_regclass($1) IS NOT NULL AS there"
        if not (await self._twice(pool, there, self._table))["there"]:
            await self._twice(pool, _CREATE.format(table=self._table, index=self._index))

    async def _twice(self, pool: Pool, statement: str, *args: object) -> Any:
        """Run a statement, and again if the connection turns out to be dead, or a rival won.

        A pool hands out what died while it lay idle. Every step may be repeated by its owner.
        """
        try:
            return await self._once(pool, statement, *args)
        except (
            ConnectionError,
            self._asyncpg.InterfaceError,
            self._asyncpg.InternalClientError,  # told that it ends, but not yet closed
            self._asyncpg.PostgresConnectionError,
            self._asyncpg.AdminShutdownError,
            self._asyncpg.CrashShutdownError,
            self._asyncpg.SerializationError,  # where the default is stricter than READ COMMITTED
        ):
            return await self._once(pool, statement, *args)

    async def _once(self, pool: Pool, statement: str, *args: object) -> Any:
        connection = await pool.acquire(timeout=_TIMEOUT)
        try:
            # Without arguments: several statements, in one transaction.
            run = connection.fetchrow if args else connection.execute
            return await run(statement, *args, timeout=_TIMEOUT)
        finally:
            await pool.release(connection, timeout=_TIMEOUT)


def _response(row: Any) -> StoredResponse | None:
    if row["status"] is None:
        return None
    return StoredResponse(row["status"], unpack(row["headers"]), row["body"])


def _library() -> ModuleType:
    try:
        return import_module("asyncpg")
    except ImportError as exc:
        message = "PostgresStore needs asyncpg: pip install 'tarry[postgres]'"
        raise MissingExtra(message) from exc
