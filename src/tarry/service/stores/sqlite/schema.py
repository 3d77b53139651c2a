"""The schema of the SQLite store: `tables.sql` creates it, and migrations upgrade it.

The data of a task is in three tables, according to how often it changes:

    task      the request: written once, read when the task is claimed
    state     status and times: small rows, because every transition of a task rewrites its row
    attempt   the attempt log. The row id is `seq << 24 | attempt number`: the rows of a task are
              next to each other in the table, which therefore needs no index

Names of tenants, lanes, policies and workers are stored once; other tables refer to them by a small
integer (see `InternedNames` in `transaction`).

The indexes serve these queries. There are few, because each index of `state` makes every transition
more expensive:

    state_first, state_retry     claim: due tasks of a lane, without and with a failed attempt
    state_leased                 claim: expired leases of a lane
    state_live, state_ended      list of a tenant's tasks; not changed by claims and retries
    state_swept                  retention: finished tasks, ordered by `finished_at`
    lane_due_check, lane_expiry_check, tenant_due_check, tenant_expiry_check
                                 claim: lanes and tenants that are not ready, but may now have tasks
    lane_rotation, tenant_rotation
                                 claim: ready lanes and tenants, least recently served first
    lane_unused, policy_unused, policy_use_deleted
                                 retention: lanes, replaced versions and deleted policies that no
                                 task refers to
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    import sqlite3
    from os import PathLike

    StorePath = str | PathLike[str]

_APPLICATION_ID = 0x74617279  # "tary": marks the file, in its header, as a store of tarry
_UNRELEASED_APPLICATION_ID = 0x74617272  # marks files from before the first release
_FIRST_VERSION = 17
"""The schema version of `tables.sql`. Files of lower versions are unreleased."""

MIGRATIONS: tuple[str, ...] = ()
"""Each one upgrades a schema version to the next, beginning with the version of `tables.sql`."""


def newest_version() -> int:
    """Return the schema version of this tarry."""
    return _FIRST_VERSION + len(MIGRATIONS)


def read_version(connection: sqlite3.Connection, path: StorePath) -> int:
    """Return the schema version of the file (0: empty); raise if the file cannot be used."""
    is_in_transaction = connection.in_transaction
    if not is_in_transaction:
        # Read all three values in one transaction: between two statements, another process may
        # create the tables of a new file.
        connection.execute("BEGIN")
    try:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        is_empty = not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    finally:
        if not is_in_transaction:
            connection.rollback()
    is_unreleased = application == _APPLICATION_ID and version < _FIRST_VERSION
    if is_unreleased or application == _UNRELEASED_APPLICATION_ID:
        raise ConfigurationError(
            f"{path} was written by an unreleased version of tarry, whose files cannot be "
            "upgraded: move the file away, so that a new one is created"
        )
    if application != _APPLICATION_ID and not (is_empty and version == application == 0):
        raise ConfigurationError(
            f"{path} belongs to another program: name another file for the store"
        )
    if version > newest_version():
        raise ConfigurationError(
            f"{path} has schema version {version}, but this tarry supports up to version "
            f"{newest_version()}: use the newer tarry that wrote the file"
        )
    return version


def upgrade(connection: sqlite3.Connection, path: StorePath, version: int) -> bool:
    """Upgrade a file from this schema version to the newest one, in one transaction.

    Return whether the file was empty.
    """
    if version == newest_version():
        return False
    connection.execute("BEGIN IMMEDIATE")  # after an error, closing the connection rolls back
    # The version is read again, now with the write lock: another process may have upgraded the
    # file since the caller read the version.
    found_version = read_version(connection, path)
    if found_version == 0:
        tables = files("tarry.service.stores.sqlite") / "tables.sql"
        scripts = (tables.read_text("utf-8"), *MIGRATIONS)
    else:
        scripts = MIGRATIONS[found_version - _FIRST_VERSION :]
    for script in scripts:
        for statement in script.split(";"):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {newest_version()}")
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute("COMMIT")
    return found_version == 0
