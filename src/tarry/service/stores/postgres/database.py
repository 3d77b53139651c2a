"""Connections to PostgreSQL: a bounded pool, timeouts, retries, and errors of the store port.

Only the `search_path` of a connection matters to a statement. So without a cache of prepared
statements, the store works behind a pooler that may use a different connection of the server for
each transaction (such as PgBouncer in transaction mode).

The `search_path` must not find functions and operators of other roles. It is a parameter of each
connection, and of each function, and behind a pooler it is set for each transaction.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from msgspec import Struct

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.runtime.effects import effects
from tarry.service.store import StoreLost
from tarry.service.store_url import missing_store, redact_store_url
from tarry.service.stores.postgres.connection_pool import ConnectionPool
from tarry.service.stores.postgres.constants import SEARCH_PATH
from tarry.service.stores.postgres.group_flush import DEFER_FLUSH, DO_NOT_DEFER_FLUSH, GroupFlush
from tarry.service.stores.postgres.schema import DEFAULT_SCHEMA, SET_LOCAL_SEARCH_PATH, Schema

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
"""Time to connect, and to wait for a free connection of the pool."""
CALL_TIMEOUT_S = 15.0
"""Time of one statement, including its commit."""
_MIGRATION_TIMEOUT_S = 600.0
"""Time of one migration, which may have to read large tables."""
_DEFAULT_POOL_SIZE = 8
_MAX_POOL_SIZE = 1000
_STATEMENT_CACHE_SIZE = 100
_MAX_TRIES = 8
_MAX_RETRY_PAUSE_S = 0.05
_SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
_RETRYABLE_STATES = {"40001", "40P01"}
"""Serialization failure (also raised by our functions), and deadlock: nothing was changed."""
_UNAVAILABLE_CLASSES = ("08", "25", "26", "40", "53", "55", "57", "58", "XX")
"""SQLSTATE classes: connection, state of the transaction (read-only: a standby after a failover),
missing prepared statements (a pooler), rollbacks, resources (disk full), locked objects, operator
intervention, system and internal errors."""
_SHUTDOWN_CLASS = "57P0"
"""SQLSTATE prefix: the server stops, starts, or has crashed."""
_UNAVAILABLE_STATES = {"3F000", "42883", "42P01", "42P05"}
"""A missing schema, function or table (while a backup is restored), and a prepared statement of
another client (a pooler)."""
_LOCK_TIMEOUT_STATE = "55P03"
_REFUSED_STATES = {"3D000", "42501"}
"""A missing database, and a missing permission."""
_UNESCAPED_PASSWORD = re.compile(r"://(?:[^/?#@]*[/?#].*|[^/?#]*@.*)@", re.DOTALL)
"""Matches a URL in which an `@` does not end the user name and the password for asyncpg."""
_ESCAPING_RULE = (
    "percent-encode special characters of the password, such as %2F for / and %40 for @"
)
_NOT_OPEN = "the store is not open: call open() first"
_UNKNOWN_REASON = "it was stopped, or it has crashed"
_logger = logging.getLogger("tarry.service")


class PostgresOptions(Struct, frozen=True):
    """The options in the URL of a store."""

    dsn: str
    """The URL for asyncpg, without the options below."""
    schema: str = DEFAULT_SCHEMA
    pool_size: int = _DEFAULT_POOL_SIZE
    statement_cache: bool | None = None
    """None: unless there is a pooler."""
    listen: bool | None = None
    """Likewise."""


def parse_url(url: str) -> PostgresOptions:
    """Parse the URL of a store; its own options are query parameters."""
    address, _, query = url.partition("?")
    own: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in {"schema", "pool_size", "statement_cache", "listen"}:
            own[name] = value
        else:
            others.append((name, value))
    schema = own.get("schema", DEFAULT_SCHEMA)
    if not _SCHEMA_NAME.fullmatch(schema):
        rule = "must have a schema of up to 50 letters, digits and _"
        raise ConfigurationError("store", rule, schema)
    size = own.get("pool_size", str(_DEFAULT_POOL_SIZE))
    if not (size.isascii() and size.isdecimal() and 1 <= int(size) <= _MAX_POOL_SIZE):
        rule = f"must have a pool_size from 1 to {_MAX_POOL_SIZE}"
        raise ConfigurationError("store", rule, size)
    switches: dict[str, bool | None] = {}
    for name in ("statement_cache", "listen"):
        text = own.get(name)
        if text not in {"on", "off", None}:
            raise ConfigurationError("store", f"must have {name}=on or {name}=off", text)
        switches[name] = None if text is None else text == "on"
    dsn = f"{address}?{urlencode(others)}" if others else address
    return PostgresOptions(dsn, schema, int(size), switches["statement_cache"], switches["listen"])


class Database:
    """A pool of connections. All methods raise `StoreUnavailable` if the server cannot be used."""

    def __init__(
        self, url: str, *, clock: Callable[[], int] | None = None, must_exist: bool = False
    ) -> None:
        self.clock = clock
        self._must_exist = must_exist
        self.options: PostgresOptions = parse_url(url)
        self.schema: Schema = Schema(self.options.schema)
        # The parameters of `dsn` are encoded, also the `@` that ends an unescaped password.
        self._redacted_url = redact_store_url(url)
        self._is_password_unescaped = _UNESCAPED_PASSWORD.search(url) is not None
        with require_extra("a store in PostgreSQL needs asyncpg", "postgres"):
            self._asyncpg: Any = import_module("asyncpg")
        self._pool: ConnectionPool | None = None
        self._statements: dict[str, str] = {}
        self.is_pooled: bool = False
        """Whether a pooler was found between this process and the server."""
        self.loss: str | None = None
        """Why the tables are not those that were opened; None: they are. No statement runs then,
        except those of transactions `even_if_lost`: a process must not add tasks to tables from
        which others have gone, nor take their missing API keys for unknown ones."""
        self._group_flush = GroupFlush(self.connect)

    async def open(self) -> None:
        """Connect, and upgrade the tables; unless they `must_exist`, create them."""
        if self._pool is not None:
            return
        self.is_pooled = False
        with self.map_errors():
            connection = await self.connect(_MIGRATION_TIMEOUT_S)
            try:
                self.is_pooled = self.is_pooled or await _is_pooled(connection)
                if self._must_exist and not await self.schema.exists(connection):
                    raise missing_store(self._redacted_url)
                await self.schema.check_rights(connection)
                if await self.schema.upgrade(connection):
                    _logger.warning("created an empty store at %s", self._redacted_url)
                await connection.close(timeout=CONNECT_TIMEOUT_S)
            finally:
                connection.terminate()
        has_cache = self.options.statement_cache
        if has_cache is None:
            has_cache = not self.is_pooled
        cache_size = _STATEMENT_CACHE_SIZE if has_cache else 0
        self._pool = ConnectionPool(
            lambda: self.connect(CALL_TIMEOUT_S, statement_cache_size=cache_size),
            size=self.options.pool_size,
            timeout_s=CONNECT_TIMEOUT_S,
        )
        if self.is_pooled and None in {self.options.statement_cache, self.options.listen}:
            _logger.info(
                "a connection pooler was found at %s: without statement_cache=on and listen=on in "
                "the URL, statements are not cached and wake-ups are not received",
                self._redacted_url,
            )

    def now(self) -> int | None:
        """Return the time of a test's clock in epoch ms; None: the time of the server applies."""
        return None if self.clock is None else self.clock()

    @property
    def can_listen(self) -> bool:
        """Whether to receive notifications, which a pooler in transaction mode does not forward."""
        return not self.is_pooled if self.options.listen is None else self.options.listen

    async def close(self) -> None:
        """Close all connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
            await self._group_flush.close()

    async def connect(
        self, command_timeout: float = CALL_TIMEOUT_S, *, statement_cache_size: int = 0
    ) -> Any:
        """Open a connection; those of the pool have a cache of prepared statements."""
        errors = self._asyncpg
        with self.map_errors():
            try:
                return await self._asyncpg.connect(
                    self.options.dsn,
                    timeout=CONNECT_TIMEOUT_S,
                    command_timeout=command_timeout,
                    statement_cache_size=statement_cache_size,
                    server_settings={} if self.is_pooled else {"search_path": SEARCH_PATH},
                )
            except errors.ProtocolViolationError as error:
                # PgBouncer refuses parameters that it does not know.
                if self._pool is not None or self.is_pooled or "startup" not in str(error):
                    raise
                self.is_pooled = True
                return await self.connect(
                    command_timeout, statement_cache_size=statement_cache_size
                )
            except (
                ValueError,  # a port that is not a number, a missing certificate
                errors.UndefinedObjectError,  # a parameter that the server does not know
                errors.InvalidParameterValueError,
            ) as error:
                if self._pool is not None:
                    raise
                msg = f"store: {self._redacted_url} is not valid"
                if isinstance(error, ValueError) and (
                    self._is_password_unescaped or "invalid literal" in str(error)
                ):
                    # asyncpg may have quoted a part of the password, which it takes for the port.
                    raise ConfigurationError(f"{msg}: {_ESCAPING_RULE}") from None
                raise ConfigurationError(f"{msg}: {_one_line(error)}") from error

    async def fetch(self, statement: str, *arguments: object) -> list[Any]:
        """Run one statement in its own transaction, and return its rows."""
        # Without the cache, asyncpg prepares the statement first, in a round trip of its own. It
        # does not end the implicit transaction in between (it sends Flush, not Sync), so a pooler
        # sends both messages to the same connection of the server.
        text = self.sql(statement)
        if not self.is_pooled or DEFER_FLUSH in statement:  # see `live_tasks`
            return await self._run(lambda connection: connection.fetch(text, *arguments))

        async def run(connection: Any) -> list[Any]:
            async with self._transaction(connection):
                rows: list[Any] = await connection.fetch(text, *arguments)
                return rows

        return await self._run(run)

    async def fetch_row(self, statement: str, *arguments: object) -> Any:
        """Run one statement, and return its first row, or None."""
        rows = await self.fetch(statement, *arguments)
        return rows[0] if rows else None

    async def fetch_value(self, statement: str, *arguments: object) -> Any:
        """Run one statement, and return the first column of its first row, or None."""
        rows = await self.fetch(statement, *arguments)
        return rows[0][0] if rows else None

    async def transact(
        self, action: Callable[[Transaction], Awaitable[T]], *, even_if_lost: bool = False
    ) -> T:
        """Run an action in a transaction; retry it after a deadlock or a serialization failure."""

        async def run(connection: Any) -> T:
            async with self._transaction(connection):
                return await action(Transaction(connection, self))

        return await self._run(run, even_if_lost=even_if_lost)

    @asynccontextmanager
    async def _transaction(self, connection: Any) -> AsyncGenerator[None]:
        async with connection.transaction():
            if self.is_pooled:
                await connection.execute(SET_LOCAL_SEARCH_PATH)
            yield

    async def begin_deferred_flush(self) -> int:
        """Return a number for `flush`; call it before a transaction with `DEFER_FLUSH`."""
        if self.is_pooled:
            return 0
        if self._pool is None:
            raise StoreUnavailable(_NOT_OPEN)
        return await self._group_flush.begin()

    async def flush(self, connection_number: int) -> None:
        """Wait until the transactions with `DEFER_FLUSH` that have committed are durable.

        `connection_number` comes from `begin_deferred_flush`.
        """
        if not self.is_pooled:
            with self.map_errors():
                await self._group_flush.wait(connection_number)

    def sql(self, text: str) -> str:
        """Return a statement for the schema of this store."""
        statement = self._statements.get(text)
        if statement is None:
            if self.is_pooled:
                statement = text.replace(DEFER_FLUSH, DO_NOT_DEFER_FLUSH)
            statement = self._statements[text] = self.schema.sql(statement or text)
        return statement

    async def _run(self, action: Callable[[Any], Awaitable[T]], *, even_if_lost: bool = False) -> T:
        if self.loss is not None and not even_if_lost:
            raise StoreLost(self.loss)
        for number in range(1, _MAX_TRIES + 1):
            try:
                with self.map_errors():
                    return await self._run_once(action)
            except _Retryable:
                if number == _MAX_TRIES:
                    raise StoreUnavailable(
                        "PostgreSQL: too many conflicts between transactions; try again"
                    ) from None
                await asyncio.sleep(effects.draw_random() * _MAX_RETRY_PAUSE_S)
        raise AssertionError

    async def _run_once(self, action: Callable[[Any], Awaitable[T]]) -> T:
        pool = self._pool
        if pool is None:
            raise StoreUnavailable(_NOT_OPEN)
        try:
            connection = await pool.acquire()
        except StoreUnavailable:  # the server cannot be reached
            self._group_flush.mark_lost()
            raise
        try:
            result = await action(connection)
        except BaseException as error:
            # After a statement that has failed, a connection can be used again. But the next call
            # reconnects, to the new primary if there is one, if this server is a standby now.
            is_usable = isinstance(error, self._asyncpg.PostgresError) and not isinstance(
                error, self._asyncpg.ReadOnlySQLTransactionError
            )
            (pool.release if is_usable else pool.discard)(connection)
            if self._is_loss(error):
                self._group_flush.mark_lost()
            raise
        pool.release(connection)
        return result

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether an error shows that the server has ended a connection."""
        if isinstance(error, self._asyncpg.PostgresError):
            return str(getattr(error, "sqlstate", "")).startswith(_SHUTDOWN_CLASS)
        return isinstance(error, Exception) and not isinstance(error, TimeoutError)

    def map_errors(self) -> _ErrorMapping:
        """Return a context manager that translates errors of asyncpg."""
        return _ErrorMapping(self._asyncpg, self._redacted_url, is_open=self._pool is not None)


async def _is_pooled(connection: Any) -> bool:
    """Return whether a pooler is between this process and the server.

    A pooler sends a process id of its own when a client connects, because the connection of the
    server may change. It may ignore the `search_path` of the connection.
    """
    process_id, search_path = await connection.fetchrow(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_setting('search_path')",
        timeout=CALL_TIMEOUT_S,
    )
    return bool(process_id != connection.get_server_pid() or search_path != SEARCH_PATH)


class Transaction:
    """An open transaction."""

    def __init__(self, connection: Any, database: Database) -> None:
        self._connection = connection
        self._database = database

    async def fetch(self, statement: str, *arguments: object) -> list[Any]:
        """Run a statement, and return its rows."""
        rows: list[Any] = await self._connection.fetch(self._database.sql(statement), *arguments)
        return rows

    async def fetch_row(self, statement: str, *arguments: object) -> Any:
        """Run a statement, and return its first row, or None."""
        return await self._connection.fetchrow(self._database.sql(statement), *arguments)

    async def fetch_value(self, statement: str, *arguments: object) -> Any:
        """Run a statement, and return the first column of its first row, or None."""
        return await self._connection.fetchval(self._database.sql(statement), *arguments)


def _one_line(error: BaseException) -> str:
    """Return the text of an error, to which asyncpg adds lines with hints, or its type."""
    text = " ".join(str(error).split())
    if not text and isinstance(error, TimeoutError):
        return "no reply in time"
    return text or type(error).__name__


class _Retryable(Exception):
    """The transaction was rolled back because of a concurrent one, and can be retried."""


class _ErrorMapping:
    """A context manager that translates errors of asyncpg into errors of the store.

    A refused login or a missing permission is an error of the configuration only before the store
    `is_open`. Later it may be temporary, for example while a password is changed: then results of
    attempts have to be written again, and must not be discarded.
    """

    def __init__(self, asyncpg: Any, redacted_url: str, *, is_open: bool) -> None:
        self._asyncpg = asyncpg
        self._redacted_url = redacted_url
        self._is_open = is_open

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, StoreUnavailable | ConfigurationError | _Retryable):
            return
        if isinstance(error, self._asyncpg.PostgresError):
            state: str = getattr(error, "sqlstate", None) or ""
            # After an upgrade of the schema by another process, asyncpg prepares statements again.
            is_outdated = isinstance(error, self._asyncpg.InvalidCachedStatementError)
            if is_outdated or state in _RETRYABLE_STATES:
                raise _Retryable from error
            is_refused = state[:2] == "28" or state in _REFUSED_STATES  # 28: password, role
            if is_refused and not self._is_open:
                msg = f"store: {self._redacted_url} refused the connection: {_one_line(error)}"
                raise ConfigurationError(msg) from error
            is_unavailable = state[:2] in _UNAVAILABLE_CLASSES or state in _UNAVAILABLE_STATES
            if not (is_refused or is_unavailable):
                return
            if state == _LOCK_TIMEOUT_STATE:
                raise StoreUnavailable(
                    f"PostgreSQL at {self._redacted_url}: another session holds a lock on a table "
                    "of the store; pg_locks and pg_stat_activity show it"
                ) from error
        elif not isinstance(
            error,
            OSError
            | TimeoutError
            | self._asyncpg.InterfaceError
            # A server that stops sends an error before it closes a connection. asyncpg raises this
            # error for a statement between the two, and does not send the statement.
            | self._asyncpg.InternalClientError
            | asyncio.IncompleteReadError,
        ):
            return
        msg = f"PostgreSQL at {self._redacted_url}: {self._describe(error)}"
        raise StoreUnavailable(msg) from error

    def _describe(self, error: BaseException) -> str:
        """Return what has happened. asyncpg may only name the state of its connection."""
        text = _one_line(error)
        if isinstance(error, ConnectionError | FileNotFoundError):
            return f"the server cannot be reached: {text}"
        asyncpg = self._asyncpg
        is_closed = isinstance(error, asyncpg.InterfaceError) and "closed" in text
        if is_closed or isinstance(error, asyncpg.InternalClientError):
            return f"the server has closed the connection: {_UNKNOWN_REASON}"
        if isinstance(error, asyncpg.ConnectionDoesNotExistError):
            # The last error of the server may follow: "...: terminating connection due to ...".
            reason = text.partition(": ")[2] or _UNKNOWN_REASON
            return f"the server has closed the connection: {reason}"
        return text
