"""The tables of the file, and how each version of them is made out of the one before.

    task      what a caller asked for: written once, read when an attempt is due
    state     where the task stands: small, so that a change rewrites little
    attempt   the log; a row's number is `seq << 24 | number`, so that one tree holds and finds it

Names of tenants, lanes, policies and workers are written once, and are small integers elsewhere.
Each index is there for one question, and a task is in as few of them as can be:

    state_due, state_leased   what a lane has to give: due, or abandoned
    state_live, state_ended   the list of a tenant; a claim and a finish that waits leave it alone
    state_swept               whose time is up
    lane_ahead, lane_look     which lanes of a tenant have something to give, a horizon ahead of a
                              time, or at it; tenant_ahead, tenant_look: which tenants have such
    lane_ring, tenant_ring    whose turn it is among those
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    import sqlite3
    from os import PathLike

_APPLICATION = 0x74617272  # "tarr": whose file it is, in its header
MIGRATIONS = (
    """
    CREATE TABLE tenant (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        pending INTEGER NOT NULL DEFAULT 0,
        in_flight INTEGER NOT NULL DEFAULT 0,
        succeeded INTEGER NOT NULL DEFAULT 0,
        exhausted INTEGER NOT NULL DEFAULT 0,
        cancelled INTEGER NOT NULL DEFAULT 0,
        superseded INTEGER NOT NULL DEFAULT 0,
        served INTEGER NOT NULL DEFAULT 0, -- its last turn
        ahead_at INTEGER, -- no lane of its own has an earlier one
        look_at INTEGER,  -- likewise
        ready INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX tenant_ahead ON tenant (ahead_at) WHERE ready = 0 AND ahead_at IS NOT NULL;
    CREATE INDEX tenant_look ON tenant (look_at) WHERE ready = 0 AND look_at IS NOT NULL;
    CREATE INDEX tenant_ring ON tenant (served) WHERE ready = 1;

    CREATE TABLE lane (
        id INTEGER PRIMARY KEY,
        tenant INTEGER NOT NULL,
        name TEXT NOT NULL UNIQUE,
        parked_until INTEGER,
        probes INTEGER NOT NULL DEFAULT 0,
        opened INTEGER NOT NULL DEFAULT 0,
        paused INTEGER NOT NULL DEFAULT 0,
        pending INTEGER NOT NULL DEFAULT 0,
        in_flight INTEGER NOT NULL DEFAULT 0,
        dead INTEGER NOT NULL DEFAULT 0,
        served_at INTEGER,
        served INTEGER NOT NULL DEFAULT 0,
        due_at INTEGER,   -- no task is due before, NULL: none waits
        lapse_at INTEGER, -- no lease ends before, NULL: there is none
        ahead_at INTEGER, -- look at it a horizon ahead of this time
        look_at INTEGER,  -- look at it then
        ready INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX lane_by_tenant ON lane (tenant, name);
    CREATE INDEX lane_ahead ON lane (tenant, ahead_at) WHERE ready = 0 AND ahead_at IS NOT NULL;
    CREATE INDEX lane_look ON lane (tenant, look_at) WHERE ready = 0 AND look_at IS NOT NULL;
    CREATE INDEX lane_ring ON lane (tenant, served) WHERE ready = 1;

    CREATE TABLE worker (id INTEGER PRIMARY KEY, name TEXT NOT NULL, lock TEXT);
    CREATE UNIQUE INDEX worker_by_name ON worker (name, ifnull(lock, ''));

    CREATE TABLE task (
        seq INTEGER PRIMARY KEY,
        id BLOB NOT NULL UNIQUE,
        tenant INTEGER NOT NULL,
        key TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        policy_version INTEGER,
        fingerprint BLOB NOT NULL,
        body_ref TEXT,
        content BLOB NOT NULL
    );
    CREATE UNIQUE INDEX task_by_key ON task (tenant, key);

    CREATE TABLE state (
        seq INTEGER PRIMARY KEY,
        tenant INTEGER NOT NULL,
        lane INTEGER NOT NULL,
        policy INTEGER NOT NULL,
        status INTEGER NOT NULL,
        wake_at INTEGER NOT NULL,
        next_attempt_at INTEGER NOT NULL,
        started_at INTEGER NOT NULL,
        version INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0,
        forgiven INTEGER NOT NULL DEFAULT 0,
        lost INTEGER NOT NULL DEFAULT 0,
        restarted INTEGER NOT NULL DEFAULT 0,
        replays INTEGER NOT NULL DEFAULT 0,
        cancelling INTEGER NOT NULL DEFAULT 0,
        worker INTEGER,
        previous_delay REAL,
        last_kind TEXT,
        reason TEXT,
        finished_at INTEGER
    );
    CREATE INDEX state_due ON state (lane, wake_at) WHERE status = 0;
    CREATE INDEX state_leased ON state (lane, wake_at) WHERE status = 1;
    CREATE INDEX state_live ON state (tenant) WHERE finished_at IS NULL;
    CREATE INDEX state_ended ON state (tenant, status) WHERE finished_at IS NOT NULL;
    CREATE INDEX state_swept ON state (status, finished_at) WHERE finished_at IS NOT NULL;

    CREATE TABLE attempt (id INTEGER PRIMARY KEY, log BLOB NOT NULL);

    CREATE TABLE used (
        id INTEGER PRIMARY KEY,
        tenant INTEGER NOT NULL,
        policy TEXT NOT NULL,
        live INTEGER NOT NULL DEFAULT 0,
        UNIQUE (tenant, policy)
    );
    CREATE TABLE policy (
        tenant INTEGER NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        document BLOB NOT NULL,
        created_at INTEGER NOT NULL
    );
    CREATE UNIQUE INDEX policy_by_id ON policy (tenant, id, version DESC);
    CREATE TABLE api_key (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        name TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        revoked_at INTEGER
    );
    CREATE TABLE replay (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        next_at INTEGER NOT NULL,
        running INTEGER NOT NULL,
        job BLOB NOT NULL
    );
    CREATE INDEX replay_by_age ON replay (created_at, id);
    CREATE INDEX replay_of_tenant ON replay (tenant, created_at, id);
    CREATE INDEX replay_running ON replay (next_at, id) WHERE running = 1;

    CREATE TABLE series (
        tenant INTEGER NOT NULL, -- 0: all of them
        minute INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (tenant, minute, outcome)
    ) WITHOUT ROWID;
    CREATE INDEX series_by_minute ON series (minute);

    CREATE TABLE orphan (ref TEXT PRIMARY KEY) WITHOUT ROWID;
    CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    INSERT INTO meta VALUES ('turn', 0), ('pinged', 0);
    """,
    """
    ALTER TABLE used ADD COLUMN version INTEGER NOT NULL DEFAULT 0; -- the last before a deletion
    """,
)
"""What makes each version of the schema out of the one before."""


def read_version(connection: sqlite3.Connection, path: str | PathLike[str]) -> int:
    """Return the version of the schema, 0 for an empty file; refuse what is not ours."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    if application != _APPLICATION and not (empty and version == application == 0):
        msg = f"{path} belongs to another program: name another file for the store"
        raise ConfigurationError(msg)
    if version > len(MIGRATIONS):
        msg = (
            f"{path} has version {version} of the schema, and this tarry knows "
            f"{len(MIGRATIONS)}: use the newer tarry that wrote it"
        )
        raise ConfigurationError(msg)
    return version


def upgrade(connection: sqlite3.Connection, path: str | PathLike[str], version: int) -> None:
    """Bring the tables of this version up to date."""
    if version < len(MIGRATIONS):
        connection.execute("BEGIN IMMEDIATE")
        try:
            _migrate(connection, path)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


def _migrate(connection: sqlite3.Connection, path: str | PathLike[str]) -> None:
    """Take the steps that are missing; under the write lock, for others may be at it too."""
    for number in range(read_version(connection, path), len(MIGRATIONS)):
        for statement in MIGRATIONS[number].split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number + 1}")
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
