"""`PostgresStore`: idempotency records in a PostgreSQL table, shared by the processes of a service.

Each change of a record is one conditional statement, which uses the clock of the database. The
isolation level is PostgreSQL's default, READ COMMITTED.

Another role of the database must not run code with the rights of this one. So all names in
statements are qualified, and operators have operands of exactly their types: PostgreSQL prefers a
function or operator of any schema whose types match exactly. A table of another role may have
triggers, so it is refused.
"""

from __future__ import annotations

import asyncio
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError
from tarry.idempotency.store import ExistingRecord, Record, decode_response, encode_headers

if TYPE_CHECKING:
    from tarry.idempotency.store import StoredResponse

_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
"""At most 50 characters, because PostgreSQL truncates names at 63, and the name of the index is
the name of the table with a suffix."""

_URL = re.compile("postgres(?:ql)?://", re.IGNORECASE)
_URL_RULE = "must be a URL like postgresql://USER:PASSWORD@HOST/DATABASE"

_TIMEOUT_S = 5.0
"""Applies separately to connecting, to acquiring a connection, and to running a statement."""
_SWEEP_BATCH_ROWS = 500
"""Rows that one statement of a sweep deletes. Bounded, because rows stay locked until it ends."""
_MAX_CLAIM_ATTEMPTS = 10
"""Another attempt to claim a key is needed when its record expires after the claim failed, but
before the record is read."""

_CREATE = """
    SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('{table}', 0));
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

# The table that a name stands for, and whether its owner can be trusted. The owner of the database,
# or of a schema that the caller has named, can replace the table anyway. For a superuser,
# pg_has_role() is always true.
_FIND_TABLE = """
    SELECT n.nspname AS schema, o.rolname AS owner, u.rolname AS user,
        o.rolname = u.rolname OR o.rolsuper OR o.oid = d.datdba
            OR (NOT u.rolsuper AND pg_catalog.pg_has_role(o.oid, 'MEMBER'))
            OR ($2 AND o.oid = n.nspowner) AS is_trusted
    FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_roles AS o ON o.oid = c.relowner
    JOIN pg_catalog.pg_roles AS u ON u.rolname = CURRENT_USER
    JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
    WHERE c.oid = pg_catalog.to_regclass($1)::pg_catalog.oid
"""

# A repeated claim of the same owner succeeds, because the result of its first claim may have been
# lost with a connection.
_CLAIM = """
    INSERT INTO {table} AS stored (key, fingerprint, owner, free_at)
    VALUES ($1, $2, $3, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => $4))
    ON CONFLICT (key) DO UPDATE
    SET fingerprint = excluded.fingerprint, owner = excluded.owner, free_at = excluded.free_at,
        status = NULL, headers = NULL, body = NULL
    WHERE stored.free_at <= pg_catalog.clock_timestamp()
       OR (stored.owner = excluded.owner AND stored.status IS NULL)
    RETURNING true
"""

_READ = """
    SELECT fingerprint, extract(epoch FROM free_at)::float8 AS free_at, status, headers, body,
           extract(epoch FROM now.time)::float8 AS now
    FROM {table}, (SELECT pg_catalog.clock_timestamp() AS time) AS now
    WHERE key = $1 AND free_at > now.time
"""

# A record that was swept is inserted again, because no other owner has claimed the key since.
_EXTEND = """
    INSERT INTO {table} AS stored (key, fingerprint, owner, free_at)
    VALUES ($1, $2, $3, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => $4))
    ON CONFLICT (key) DO UPDATE SET free_at = excluded.free_at
    WHERE stored.owner = excluded.owner AND stored.status IS NULL
    RETURNING true
"""

# Storing the same response again succeeds, because the result of the first call may have been lost.
_FINISH = """
    INSERT INTO {table} AS stored (key, fingerprint, owner, free_at, status, headers, body)
    VALUES ($1, $2, $3, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => $4),
        $5, $6, $7)
    ON CONFLICT (key) DO UPDATE
    SET free_at = excluded.free_at,
        status = excluded.status, headers = excluded.headers, body = excluded.body
    WHERE stored.owner = excluded.owner AND (stored.status IS NULL OR
        (stored.status, stored.headers, stored.body) IS NOT DISTINCT FROM
        (excluded.status, excluded.headers, excluded.body))
    RETURNING true
"""

_RELEASE = "DELETE FROM {table} WHERE key = $1 AND owner = $2 AND status IS NULL"

# statement_timestamp() instead of clock_timestamp(): only a stable function can use the index.
_SWEEP = """
    WITH expired AS (
        SELECT key FROM {table} WHERE free_at <= pg_catalog.statement_timestamp()
        ORDER BY free_at LIMIT $1 FOR UPDATE SKIP LOCKED
    ), deleted AS (
        DELETE FROM {table} USING expired WHERE {table}.key = expired.key RETURNING true
    )
    SELECT pg_catalog.count(*) FROM deleted
"""


class AsyncpgPool(Protocol):
    """The methods of `asyncpg.Pool` that the store uses."""

    def acquire(self, *, timeout: float | None = None) -> Any:
        """Acquire a connection."""

    async def release(self, connection: Any, *, timeout: float | None = None) -> None:
        """Release a connection."""

    async def close(self) -> None:
        """Close all connections."""


class PostgresStore:
    """Stores records in a table, which is created on first use if it does not exist.

    Args:
        dsn_or_pool: a connection URI, or an asyncpg pool, which the caller closes. Behind a
            transaction pooler such as PgBouncer, the pool needs `statement_cache_size=0`. Do not
            pass the pool from which request handlers acquire connections: if handlers hold all
            connections while their requests wait for this store, none of them ever continues.
        table: the name of the table; may include a schema. A table of another role is refused,
            unless that role is a superuser, owns the database or the schema in the name, or was
            granted to this role.
    """

    def __init__(self, dsn_or_pool: str | AsyncpgPool, *, table: str = "tarry_idempotency") -> None:
        names = table.split(".")
        if len(names) > 2 or not all(map(_TABLE_NAME.fullmatch, names)):  # noqa: PLR2004 - schema.table
            rule = "must be a name of up to 50 letters, digits and _, or schema.name"
            raise ConfigurationError("table", rule, table)
        self._names = names
        self._table = ""
        """The name with its schema, after the table was found."""
        with require_extra("PostgresStore needs asyncpg", "postgres"):
            self._asyncpg = import_module("asyncpg")
        # Errors do not show a mistyped URL, because its password could be anywhere in it.
        if isinstance(dsn_or_pool, str) and not _URL.match(dsn_or_pool):
            raise ConfigurationError("dsn_or_pool", _URL_RULE)
        self._dsn_or_pool = dsn_or_pool
        self._pool: AsyncpgPool | None = None
        self._open_lock = asyncio.Lock()

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a key for `lease` seconds. Return None, or the record of a key that is not free."""
        for _ in range(_MAX_CLAIM_ATTEMPTS):
            if await self._fetch_row(_CLAIM, key, fingerprint, owner, lease):
                return None
            if (row := await self._fetch_row(_READ, key)) is not None:
                response = decode_response(row["status"], row["headers"], row["body"])
                record = Record(row["fingerprint"], row["free_at"], response)
                return ExistingRecord(record, row["now"])
        # The key changes owners faster than its record can be read. Report a request in progress
        # whose lease is just expiring.
        return ExistingRecord(Record(fingerprint, free_at=0.0, response=None), now=0.0)

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; see `IdempotencyStore`."""
        return bool(await self._fetch_row(_EXTEND, key, fingerprint, owner, lease))

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store the response for `retention` seconds; see `IdempotencyStore`."""
        columns = response.status, encode_headers(response.headers), response.body
        return bool(await self._fetch_row(_FINISH, key, fingerprint, owner, retention, *columns))

    async def release(self, key: str, owner: str) -> None:
        """Free a key that this owner has claimed and not finished."""
        await self._fetch_row(_RELEASE, key, owner)

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` expired records, and return how many were deleted."""
        total, deleted = 0, 1
        while total < limit and deleted:
            row = await self._fetch_row(_SWEEP, min(_SWEEP_BATCH_ROWS, limit - total))
            deleted = row["count"]
            total += deleted
        return total

    async def close(self) -> None:
        """Close the connections, unless they belong to the caller's pool."""
        pool, self._pool = self._pool, None
        if pool is not None and pool is not self._dsn_or_pool:
            await pool.close()

    async def _fetch_row(self, statement: str, *args: object) -> Any:
        """Run a statement and return its first row, or None."""
        pool = self._pool or await self._open()
        return await self._run_with_retry(pool, statement.format(table=self._table), *args)

    async def _open(self) -> AsyncpgPool:
        """Connect and create the table; concurrent callers share the result."""
        async with self._open_lock:
            if self._pool is not None:
                return self._pool
            pool: Any = self._dsn_or_pool
            if isinstance(pool, str):
                pool = await self._asyncpg.create_pool(pool, min_size=0, timeout=_TIMEOUT_S)
            try:
                self._table = await self._find_table(pool)
            except BaseException as error:
                if pool is not self._dsn_or_pool:
                    await pool.close()
                if isinstance(error, ValueError) and "invalid literal" in str(error):
                    # asyncpg quotes a part of the password, which it takes for the port.
                    rule = f"{_URL_RULE}, with special characters of the password as %2F, %40 ..."
                    raise ConfigurationError("dsn_or_pool", rule) from None
                raise
            self._pool = pool
            return pool  # type: ignore[no-any-return]  # asyncpg has no types

    async def _find_table(self, pool: AsyncpgPool) -> str:
        """Return the name of the table with its schema; create the table if it is missing."""
        table = ".".join(f'"{name}"' for name in self._names)
        arguments = table, len(self._names) > 1
        found = await self._run_with_retry(pool, _FIND_TABLE, *arguments)
        # The table is created only if it is missing, because even CREATE TABLE IF NOT EXISTS needs
        # a right that the role of the application may lack.
        if found is None:
            statement = _CREATE.format(table=table, index=f'"{self._names[-1]}_free_at"')
            await self._run_with_retry(pool, statement)
            found = await self._run_with_retry(pool, _FIND_TABLE, *arguments)
        table = f"{found['schema']}.{self._names[-1]}"
        if not found["is_trusted"]:
            owner, user = found["owner"], found["user"]
            msg = (
                f"table {table} belongs to the role {owner}, whose triggers would run with the "
                f"rights of {user}. Pass another table=, drop this one, or, if you trust {owner}, "
                f"run: GRANT {owner} TO {user}"
            )
            raise ConfigurationError(msg)
        schema: str = found["schema"].replace('"', '""')
        return f'"{schema}"."{self._names[-1]}"'

    async def _run_with_retry(self, pool: AsyncpgPool, statement: str, *args: object) -> Any:
        """Run a statement; run it again after a lost connection or a serialization failure.

        A pool may return a connection that died while it was idle. A statement that runs twice does
        no harm: see the rules in `tarry.idempotency.store`.
        """
        try:
            return await self._run(pool, statement, *args)
        except (
            ConnectionError,
            self._asyncpg.InterfaceError,
            self._asyncpg.InternalClientError,  # a connection that the server is closing
            self._asyncpg.PostgresConnectionError,
            self._asyncpg.AdminShutdownError,
            self._asyncpg.CrashShutdownError,
            self._asyncpg.SerializationError,  # if the database has a stricter isolation level
        ):
            return await self._run(pool, statement, *args)

    async def _run(self, pool: AsyncpgPool, statement: str, *args: object) -> Any:
        connection = await pool.acquire(timeout=_TIMEOUT_S)
        try:
            # execute() runs several statements in one transaction, but takes no arguments.
            execute = connection.fetchrow if args else connection.execute
            return await execute(statement, *args, timeout=_TIMEOUT_S)
        finally:
            await pool.release(connection, timeout=_TIMEOUT_S)
