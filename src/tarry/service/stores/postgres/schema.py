"""Tables, indexes and migrations of the PostgreSQL store.

The data of a task is in several tables, according to how often it changes:

    live       PENDING and IN_FLIGHT tasks: small rows, because every transition rewrites its row
    finished   SUCCEEDED, EXHAUSTED and CANCELLED tasks: moved out of the hot table
    content    the request: written once, read when the task is claimed
    attempt    the attempt log: written once
    task_key   finds a task by its id, or by tenant and idempotency key

`content` and `attempt` are large, and partitioned by the day on which the task was added: a day's
partitions are dropped when no task of that day is left, so their rows are not deleted one by one.
The key of all tables, `seq`, has the day in its upper bits (`SEQ_DAY_BITS`), so that `seq` alone
names the partition, and is the order in which tasks were added.

A unique index of a partitioned table must contain the partition key, so ids and idempotency keys
would be unique only within a day: this is why `task_key` is a separate table, without partitions.
Tasks without a partition (the clock was wrong, or a few tasks outlive their day) are in a default
partition, so nothing depends on partitions that were created in time.

A lane (the queue of one downstream) or a tenant is *ready* (claims visit it in turn), or *asleep*
until one of its two check times, as in the SQLite store. `lane` and `tenant` have the counters,
too. They are updated last in each transaction, because the rows stay locked until the commit, and
always in the same order: lanes, tenants, policies, each by id. So transactions cannot deadlock.

`fillfactor` leaves space in the pages of hot tables, so that an update of columns without an index
does not have to write to indexes. For the same reason `lane.unused` is a column: an index on
`tasks = 0` would be written with each change of `tasks`.

While another client keeps a transaction open, PostgreSQL removes no old version of a row, and a
search in an index reads all of them: thousands for the few rows of `lane`, `tenant` and
`policy_use`, which each call updates. So these rows are found by an index on `(id, generation)`,
which is read in descending order. `generation` grows with every 32nd update, and the first visible
version is the row: at most about 32 versions are read. An update of `generation` has to write to
all indexes, so it is not done each time. A unique index would check all old versions then, so names
are unique in `lane_name` and `tenant_name`, whose rows do not change. The lanes to visit are found
by other indexes. To skip old versions there, a search starts at the tenant's `first_turn` (a lower
bound of `last_turn` of its ready lanes), `due_check_at` or `expiry_check_at`.

Text is stored with the collation "C": fast, and in the order of Python. See `encode_text` for
NUL characters.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.stores.postgres.constants import SEARCH_PATH
from tarry.service.stores.postgres.sql_files import load_schema

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_SCHEMA = "tarry"
_QUALIFIER = f"{DEFAULT_SCHEMA}."
SET_LOCAL_SEARCH_PATH = f"SET LOCAL search_path = {SEARCH_PATH}"
_MIGRATION_LOCK = 0x74617279
"""The advisory lock (two numbers: this and the hash of the schema) of a migration."""
_SET_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '500ms'"
"""A migration locks several tables, in another order than the calls of running processes. It gives
up before PostgreSQL would find a deadlock (after 1 s) and perhaps end a call."""
# Not to_regclass(), which may still return what was found before the lock was granted. And without
# functions, because the search_path may not be set yet.
_FIND_META = """
SELECT true FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = 'meta'
"""
# Of a schema: whether the pseudo-role PUBLIC, whose number is 0, may create functions in it.
_FIND_PUBLIC_CREATE = """
SELECT true FROM pg_catalog.pg_namespace AS n, pg_catalog.aclexplode(n.nspacl) AS a
WHERE n.nspname = $1 AND a.grantee = 0::pg_catalog.oid AND a.privilege_type = 'CREATE'
"""
_LOCK_TIMEOUT_STATE = "55P03"
_LOCK_PAUSES_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 30.0, 30.0)
"""Pauses between the tries of a migration that did not get its locks."""

_FIRST_VERSION = 7
"""Earlier versions were never released."""
MIGRATIONS: tuple[str, ...] = (load_schema(),)
"""The first creates the tables and functions; the next ones upgrade the schema version by 1 each.

The names of functions end with a version. A migration that changes the parameters or the effect of
a function adds one with the next version and leaves the old one, so that processes of the previous
release keep working. Other changes of functions need a migration too."""
COMPATIBLE_VERSION = _FIRST_VERSION
"""The oldest schema version whose processes work with the tables of the newest. They also start on
these tables: during a rolling upgrade, a process of the previous release may crash."""


def newest_version() -> int:
    """Return the schema version that this tarry creates."""
    return _FIRST_VERSION + len(MIGRATIONS) - 1


class Schema:
    """The schema with the tables of one store."""

    def __init__(self, name: str = DEFAULT_SCHEMA) -> None:
        self.name = name
        self._quoted_prefix = '"' + name.replace('"', '""') + '".'

    def sql(self, text: str) -> str:
        """Return a statement that is written for the schema `tarry`, for this schema."""
        return (
            text if self.name == DEFAULT_SCHEMA else text.replace(_QUALIFIER, self._quoted_prefix)
        )

    async def exists(self, connection: Any) -> bool:
        """Return whether the tables exist."""
        return await self._read_version(connection) > 0

    async def check_rights(self, connection: Any) -> None:
        """Raise `ConfigurationError` if every role may create functions in the schema.

        A function with the name of one of tarry's, but other types of parameters, may be called
        instead of it, because the types of parameters in statements are inferred.
        """
        if await connection.fetchval(_FIND_PUBLIC_CREATE, self.name):
            rule = (
                "must have a schema in which not every role may create functions: name another "
                f"one, or run REVOKE CREATE ON SCHEMA {self._quoted_prefix[:-1]} FROM PUBLIC"
            )
            raise ConfigurationError("store", rule, self.name)

    async def upgrade(self, connection: Any) -> bool:
        """Create or upgrade the tables, unless another process has done that.

        Return whether they were created.

        The advisory lock makes processes that start at the same time wait for each other. It ends
        with the transaction, so it works behind a transaction pooler too.
        """
        if await self._read_version(connection) >= newest_version():
            return False
        for pause_s in _LOCK_PAUSES_S:
            try:
                return await self._migrate(connection)
            except Exception as error:
                if getattr(error, "sqlstate", None) != _LOCK_TIMEOUT_STATE:
                    raise
                await asyncio.sleep(pause_s)
        return await self._migrate(connection)

    async def _migrate(self, connection: Any) -> bool:
        """Create or upgrade the tables in a transaction; return whether they were created."""
        # When the lock is granted, statements must see what the process that held it has committed.
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(SET_LOCAL_SEARCH_PATH)
            await connection.execute(
                "SELECT pg_advisory_xact_lock($1, hashtext($2))", _MIGRATION_LOCK, self.name
            )
            await connection.execute(_SET_LOCK_TIMEOUT)
            version = await self._read_version(connection)
            if version == 0:
                await self._create(connection)
            for migration in MIGRATIONS[max(0, version - _FIRST_VERSION + 1) :]:
                await connection.execute(self.sql(migration))
            await connection.execute(
                self.sql(
                    "INSERT INTO tarry.meta VALUES ('schema_version', $1), "
                    "('compatible_version', $2) "
                    "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
                ),
                newest_version(),
                COMPATIBLE_VERSION,
            )
        return version == 0

    async def _create(self, connection: Any) -> None:
        """Create the schema, unless an administrator has created it."""
        encoding = await connection.fetchval("SELECT current_setting('server_encoding')")
        if encoding != "UTF8":
            rule = f"must be a database with the encoding UTF8, but this one has {encoding}"
            raise ConfigurationError("store", rule)
        exists = "SELECT 1 FROM pg_namespace WHERE nspname = $1"
        if not await connection.fetchval(exists, self.name):
            await connection.execute(f"CREATE SCHEMA {self._quoted_prefix[:-1]}")

    async def _read_version(self, connection: Any) -> int:
        """Return the schema version (0: there are no tables); raise if it is not supported."""
        if not await connection.fetchval(_FIND_META, self.name):
            return 0
        versions: dict[str, int] = dict(
            await connection.fetch(self.sql("SELECT name, value FROM tarry.meta"))
        )
        version = versions.get("schema_version", 0)
        if 0 < version < _FIRST_VERSION:
            msg = (
                f"store: the tables in schema {self.name} have version {version}, but this tarry "
                f"supports versions from {_FIRST_VERSION} only: drop the schema, or name another"
            )
            raise ConfigurationError(msg)
        if versions.get("compatible_version", version) > newest_version():
            msg = (
                f"store: the tables in schema {self.name} have version {version}, but this tarry "
                f"supports up to version {newest_version()}: use the newer tarry that wrote them"
            )
            raise ConfigurationError(msg)
        return version


def quote_names(names: Iterable[str]) -> list[str]:
    """Return names as they are written in SQL."""
    return ['"' + name.replace('"', '""') + '"' for name in names]
