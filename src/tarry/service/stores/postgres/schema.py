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
from tarry.service.stores.postgres.functions import FUNCTIONS
from tarry.service.stores.postgres.functions.constants import (
    PLPGSQL,
    SEARCH_PATH,
    SET_LOCAL_SEARCH_PATH,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_SCHEMA = "tarry"
_QUALIFIER = f"{DEFAULT_SCHEMA}."
SEQ_DAY_BITS = 40
"""Number of bits of `seq` after the day: tasks per day are numbered below 2 ** 40."""
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

_HOT = (
    "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, "
    "autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0"
)
"""Storage parameters of tables whose rows are often updated: vacuum them early, without pauses."""

_TABLES = f"""
CREATE SEQUENCE tarry.task_number AS bigint MAXVALUE {(1 << SEQ_DAY_BITS) - 1} CYCLE CACHE 1;
CREATE SEQUENCE tarry.turn AS bigint;
CREATE TABLE tarry.meta (name text COLLATE "C" PRIMARY KEY, value bigint NOT NULL)
    WITH (fillfactor = 50, {_HOT});
INSERT INTO tarry.meta VALUES ('pinged', 0), ('limits_version', 0);

CREATE TABLE tarry.tenant (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    pending bigint NOT NULL DEFAULT 0,
    in_flight bigint NOT NULL DEFAULT 0,
    succeeded bigint NOT NULL DEFAULT 0,
    exhausted bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    superseded bigint NOT NULL DEFAULT 0,
    lanes integer NOT NULL DEFAULT 0,
    last_turn bigint NOT NULL DEFAULT 0,
    due_check_at bigint, -- lower bound of the same column of its lanes that are asleep
    expiry_check_at bigint, -- likewise
    ready boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50, {_HOT});
CREATE INDEX tenant_due_check ON tarry.tenant (due_check_at)
    WHERE NOT ready AND due_check_at IS NOT NULL;
CREATE INDEX tenant_expiry_check ON tarry.tenant (expiry_check_at)
    WHERE NOT ready AND expiry_check_at IS NOT NULL;
CREATE INDEX tenant_rotation ON tarry.tenant (last_turn, id) WHERE ready;

CREATE TABLE tarry.lane (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant integer NOT NULL,
    name text COLLATE "C" NOT NULL UNIQUE,
    parked_until bigint,
    probes integer NOT NULL DEFAULT 0,
    consecutive_opens integer NOT NULL DEFAULT 0,
    paused boolean NOT NULL DEFAULT false,
    pending bigint NOT NULL DEFAULT 0,
    in_flight bigint NOT NULL DEFAULT 0,
    exhausted bigint NOT NULL DEFAULT 0,
    tasks bigint NOT NULL DEFAULT 0, -- in any status
    unused boolean NOT NULL DEFAULT true, -- tasks = 0
    last_claim_at bigint,
    last_turn bigint NOT NULL DEFAULT 0, -- the greater, the more recently served
    last_probe bigint, -- seq of the task that was last leased as a probe
    due_at bigint, -- lower bound of the due times of pending tasks
    lease_end_at bigint, -- lower bound of the ends of leases
    due_check_at bigint, -- visit the lane one lease horizon before this time
    expiry_check_at bigint, -- visit the lane at this time (a lease or the parking ends)
    ready boolean NOT NULL DEFAULT false,
    rate double precision, -- see Store.record_lane_limits
    concurrency integer,
    limits text, -- the DownstreamLimits that an operator has set
    budget double precision NOT NULL DEFAULT 0, -- see Store.add_to_budgets
    budget_at bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, {_HOT});
CREATE INDEX lane_by_tenant ON tarry.lane (tenant, name);
CREATE INDEX lane_due_check ON tarry.lane (tenant, due_check_at)
    WHERE NOT ready AND due_check_at IS NOT NULL;
CREATE INDEX lane_expiry_check ON tarry.lane (tenant, expiry_check_at)
    WHERE NOT ready AND expiry_check_at IS NOT NULL;
CREATE INDEX lane_rotation ON tarry.lane (tenant, last_turn, id) WHERE ready;
CREATE INDEX lane_unused ON tarry.lane (id) WHERE unused AND NOT paused AND limits IS NULL;
CREATE INDEX lane_limited ON tarry.lane (id) WHERE rate IS NOT NULL;
CREATE INDEX lane_paused ON tarry.lane (id) WHERE paused;
CREATE INDEX lane_configured ON tarry.lane (tenant, name) WHERE limits IS NOT NULL;

CREATE TABLE tarry.task_key (
    seq bigint PRIMARY KEY,
    id uuid NOT NULL UNIQUE,
    tenant integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    UNIQUE (tenant, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tarry.live ( -- columns as the fields of model.Task, unless described here
    tenant integer NOT NULL,
    seq bigint NOT NULL,
    lane integer NOT NULL,
    policy integer NOT NULL, -- policy_use.id
    queue smallint NOT NULL, -- PENDING: 0 without, 1 with a failed attempt; IN_FLIGHT: 2
    wake_at bigint NOT NULL,
    next_attempt_at bigint NOT NULL,
    first_due_at bigint NOT NULL,
    created_at bigint NOT NULL,
    version integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    attempts_before_replay integer NOT NULL DEFAULT 0,
    lost_attempts integer NOT NULL DEFAULT 0,
    backoff_offset integer NOT NULL DEFAULT 0,
    replays integer NOT NULL DEFAULT 0,
    cancelling boolean NOT NULL DEFAULT false,
    previous_delay double precision,
    worker text COLLATE "C",
    last_outcome_kind text COLLATE "C",
    PRIMARY KEY (tenant, seq)
) WITH (fillfactor = 70, {_HOT});
CREATE INDEX live_queue ON tarry.live (lane, queue, wake_at, seq);

CREATE TABLE tarry.finished (
    tenant integer NOT NULL,
    status smallint NOT NULL,
    seq bigint NOT NULL,
    lane integer NOT NULL,
    policy integer NOT NULL,
    finished_at bigint NOT NULL,
    next_attempt_at bigint NOT NULL,
    first_due_at bigint NOT NULL,
    created_at bigint NOT NULL,
    version integer NOT NULL,
    attempts integer NOT NULL,
    attempts_before_replay integer NOT NULL,
    lost_attempts integer NOT NULL,
    backoff_offset integer NOT NULL,
    replays integer NOT NULL,
    previous_delay double precision,
    last_outcome_kind text COLLATE "C",
    reason text COLLATE "C",
    PRIMARY KEY (tenant, status, seq)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX finished_by_age ON tarry.finished (status, finished_at);

CREATE TABLE tarry.content (
    seq bigint PRIMARY KEY,
    id uuid NOT NULL,
    policy_version integer,
    key text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    body_ref text COLLATE "C",
    content bytea NOT NULL
) PARTITION BY RANGE (seq);
CREATE TABLE tarry.content_default PARTITION OF tarry.content DEFAULT;
CREATE TABLE tarry.attempt (
    seq bigint NOT NULL,
    number integer NOT NULL,
    due_at bigint, -- of a lost attempt
    worker text COLLATE "C", -- of a lost attempt
    log bytea, -- the AttemptRecord; NULL: the attempt was lost
    PRIMARY KEY (seq, number)
) PARTITION BY RANGE (seq);
CREATE TABLE tarry.attempt_default PARTITION OF tarry.attempt DEFAULT;

CREATE TABLE tarry.policy_use ( -- a policy that tasks name, whether it is stored or not
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant integer NOT NULL,
    policy text COLLATE "C" NOT NULL,
    live_tasks bigint NOT NULL DEFAULT 0,
    tasks bigint NOT NULL DEFAULT 0, -- in any status
    deleted_version integer NOT NULL DEFAULT 0, -- last version before the policy was deleted
    UNIQUE (tenant, policy)
) WITH (fillfactor = 50, {_HOT});
CREATE INDEX policy_use_deleted ON tarry.policy_use (id) WHERE deleted_version > 0;
CREATE TABLE tarry.policy (
    tenant integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    document bytea NOT NULL,
    created_at bigint NOT NULL,
    tasks bigint NOT NULL DEFAULT 0, -- with this policy_version
    replaced_at bigint, -- NULL: the newest version
    PRIMARY KEY (tenant, id, version)
);
CREATE INDEX policy_replaced ON tarry.policy (replaced_at) WHERE replaced_at IS NOT NULL;

CREATE TABLE tarry.api_key (
    id text COLLATE "C" PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    digest bytea NOT NULL UNIQUE,
    name text NOT NULL,
    created_at bigint NOT NULL,
    revoked_at bigint
);
CREATE TABLE tarry.signing_secret (
    tenant text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    lane text COLLATE "C", -- NULL: all lanes without secrets of their own
    secret bytea NOT NULL,
    public_key text,
    created_at bigint NOT NULL,
    expires_at bigint,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX signing_secret_expiry ON tarry.signing_secret (expires_at)
    WHERE expires_at IS NOT NULL;

CREATE TABLE tarry.replay (
    id text COLLATE "C" PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    next_at bigint NOT NULL, -- the time of its end if running = 0
    running smallint NOT NULL, -- 1: replays dead letters, 2: only counts finished tasks
    job bytea NOT NULL -- the ReplayRecord
);
CREATE INDEX replay_by_age ON tarry.replay (created_at, id);
CREATE INDEX replay_of_tenant ON tarry.replay (tenant, created_at, id);
CREATE INDEX replay_unfinished ON tarry.replay (next_at, id) WHERE running > 0;
CREATE TABLE tarry.replay_task ( -- a replayed task that has not finished yet
    replay text COLLATE "C" NOT NULL,
    task uuid NOT NULL,
    PRIMARY KEY (replay, task)
);

CREATE TABLE tarry.series ( -- number of attempts in each minute
    tenant integer NOT NULL, -- 0: sum over all tenants
    minute bigint NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    shard smallint NOT NULL, -- of the connection, so that processes do not wait for each other
    count bigint NOT NULL,
    PRIMARY KEY (tenant, minute, outcome, shard)
) WITH (fillfactor = 50, {_HOT});
CREATE INDEX series_by_minute ON tarry.series (minute);

CREATE TABLE tarry.orphan (ref text COLLATE "C" PRIMARY KEY); -- bodies of deleted tasks
CREATE TABLE tarry.leader (id integer PRIMARY KEY, token text NOT NULL, until bigint NOT NULL)
    WITH (fillfactor = 50, {_HOT});
CREATE TABLE tarry.transfer (id integer PRIMARY KEY, mark bytea NOT NULL); -- the TransferMark
CREATE TABLE tarry.worker ( -- the registry of processes, see Store.record_worker
    name text COLLATE "C" PRIMARY KEY,
    seen_at bigint NOT NULL,
    is_claiming boolean NOT NULL, -- its role is not `api`
    record bytea NOT NULL -- the WorkerRecord
) WITH (fillfactor = 50, {_HOT});
"""


def _names_table(table: str) -> str:
    """Return statements for the table of the names of `lane` or `tenant`, see `_GENERATIONS`."""
    return f"""
    CREATE TABLE tarry.{table}_name (
        name text COLLATE "C" PRIMARY KEY,
        id integer NOT NULL UNIQUE
    );
    INSERT INTO tarry.{table}_name SELECT name, id FROM tarry.{table};
    -- A row with a name that exists already is not inserted, as with ON CONFLICT DO NOTHING.
    CREATE FUNCTION tarry.insert_{table}_name_1() RETURNS trigger {PLPGSQL} AS $$
    BEGIN
        INSERT INTO tarry.{table}_name (name, id) VALUES (NEW.name, NEW.id) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN NEW;
        END IF;
        RETURN NULL;
    END $$;
    CREATE FUNCTION tarry.delete_{table}_name_1() RETURNS trigger {PLPGSQL} AS $$
    BEGIN
        DELETE FROM tarry.{table}_name WHERE id = OLD.id;
        RETURN NULL;
    END $$;
    CREATE TRIGGER insert_name BEFORE INSERT ON tarry.{table}
    FOR EACH ROW EXECUTE FUNCTION tarry.insert_{table}_name_1();
    CREATE TRIGGER delete_name AFTER DELETE ON tarry.{table}
    FOR EACH ROW EXECUTE FUNCTION tarry.delete_{table}_name_1();
    ALTER TABLE tarry.{table} DROP CONSTRAINT {table}_pkey, DROP CONSTRAINT {table}_name_key;
    CREATE INDEX {table}_by_name ON tarry.{table} (name);
    CREATE INDEX {table}_newest ON tarry.{table} (id, generation);
    """


def _refuse_old_updates(table: str) -> str:
    """Return a trigger for updates that are not made by functions of this version."""
    names = ("ready", "last_turn", "due_check_at", "expiry_check_at")
    new, old = (", ".join(f"{row}.{name}" for name in names) for row in ("NEW", "OLD"))
    return f"""
    CREATE TRIGGER refuse_old_update AFTER UPDATE ON tarry.{table} FOR EACH ROW
    WHEN (NEW.updates = OLD.updates AND ({new}) IS DISTINCT FROM ({old}))
    EXECUTE FUNCTION tarry.refuse_update_1();
    """


_ADD_GENERATION = (
    "ADD COLUMN updates bigint NOT NULL DEFAULT 0, ADD COLUMN generation bigint NOT NULL DEFAULT 0"
)
_GENERATIONS = f"""
ALTER TABLE tarry.tenant {_ADD_GENERATION}, ADD COLUMN first_turn bigint;
ALTER TABLE tarry.lane {_ADD_GENERATION};
ALTER TABLE tarry.policy_use {_ADD_GENERATION};
{_names_table("tenant")}
{_names_table("lane")}
ALTER TABLE tarry.policy_use DROP CONSTRAINT policy_use_pkey;
UPDATE tarry.tenant AS t SET
    first_turn = (SELECT min(l.last_turn) FROM tarry.lane AS l WHERE l.tenant = t.id AND l.ready),
    due_check_at = (SELECT min(l.due_check_at) FROM tarry.lane AS l
        WHERE l.tenant = t.id AND NOT l.ready),
    expiry_check_at = (SELECT min(l.expiry_check_at) FROM tarry.lane AS l
        WHERE l.tenant = t.id AND NOT l.ready);
DROP INDEX tarry.lane_due_check, tarry.lane_expiry_check;
DROP INDEX tarry.tenant_due_check, tarry.tenant_expiry_check;
CREATE INDEX lane_due_check ON tarry.lane (tenant, due_check_at, generation DESC)
    WHERE NOT ready AND due_check_at IS NOT NULL;
CREATE INDEX lane_expiry_check ON tarry.lane (tenant, expiry_check_at, generation DESC)
    WHERE NOT ready AND expiry_check_at IS NOT NULL;
CREATE INDEX tenant_due_check ON tarry.tenant (due_check_at, generation DESC)
    WHERE NOT ready AND due_check_at IS NOT NULL;
CREATE INDEX tenant_expiry_check ON tarry.tenant (expiry_check_at, generation DESC)
    WHERE NOT ready AND expiry_check_at IS NOT NULL;
CREATE INDEX policy_use_newest ON tarry.policy_use (id, generation);
CREATE INDEX policy_use_by_name ON tarry.policy_use (tenant, policy, generation);

-- A call that has started before this migration, and waits for it, continues with the old
-- functions. They do not maintain the bounds with which the new ones search for lanes. So the call
-- fails when it changes a lane or a tenant, and is retried with the new functions.
CREATE FUNCTION tarry.refuse_update_1() RETURNS trigger {PLPGSQL} AS $$
BEGIN
    RAISE SQLSTATE '40001' USING MESSAGE = 'the tables were upgraded meanwhile';
END $$;
{_refuse_old_updates("tenant")}
{_refuse_old_updates("lane")}
"""
_SERIES_POINTS = f"""
CREATE TABLE tarry.series_point ( -- see Store.record_series
    step bigint NOT NULL,
    at bigint NOT NULL,
    sums jsonb NOT NULL,
    PRIMARY KEY (step, at)
) WITH (fillfactor = 50, {_HOT});
"""
_API_KEY_ROLES = "ALTER TABLE tarry.api_key ADD COLUMN role text NOT NULL DEFAULT 'admin';"
_LANE_ACTIVITY = f"""
CREATE TABLE tarry.lane_activity ( -- see Store.read_lane_activity
    lane integer PRIMARY KEY REFERENCES tarry.lane_name (id) ON DELETE CASCADE,
    activity bytea NOT NULL -- the LaneActivity
) WITH (fillfactor = 50, {_HOT});
"""
# The functions of triggers of earlier migrations; `FUNCTIONS` has the others.
_SEARCH_PATHS = "".join(
    f"ALTER FUNCTION tarry.{name}_1() SET search_path = {SEARCH_PATH};\n"
    for name in (
        "insert_tenant_name", "delete_tenant_name", "insert_lane_name", "delete_lane_name",
        "refuse_update",
    )
)  # fmt: skip
MIGRATIONS: tuple[str, ...] = (
    _TABLES, _GENERATIONS, _SERIES_POINTS, _API_KEY_ROLES, _LANE_ACTIVITY,
    _SEARCH_PATHS + FUNCTIONS,
)  # fmt: skip
"""`MIGRATIONS[n]` upgrades schema version n to n + 1; version 0 is a schema without tables.

The names of functions end with a version. A migration that changes the parameters or the effect of
a function adds one with the next version and leaves the old one, so that processes of the previous
release keep working. Other changes of functions need a migration too: the newest migration creates
all functions again."""
COMPATIBLE_VERSION = 1
"""The oldest schema version whose processes work with the tables of the newest. They also start on
these tables: during a rolling upgrade, a process of the previous release may crash."""


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
        if await self._read_version(connection) >= len(MIGRATIONS):
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
            for migration in MIGRATIONS[version:]:
                await connection.execute(self.sql(migration))
            await connection.execute(
                self.sql(
                    "INSERT INTO tarry.meta VALUES ('schema_version', $1), "
                    "('compatible_version', $2) "
                    "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
                ),
                len(MIGRATIONS),
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
        if versions.get("compatible_version", version) > len(MIGRATIONS):
            msg = (
                f"store: the tables in schema {self.name} have version {version}, but this tarry "
                f"supports up to version {len(MIGRATIONS)}: use the newer tarry that wrote them"
            )
            raise ConfigurationError(msg)
        return version


def quote_names(names: Iterable[str]) -> list[str]:
    """Return names as they are written in SQL."""
    return ['"' + name.replace('"', '""') + '"' for name in names]
