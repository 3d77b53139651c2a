"""The schema: migrations, and files that are rejected."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import (
    PolicyVersion,
    Status,
    WorkerRecord,
)
from tarry.service.records.workers import list_workers, record_worker
from tarry.service.store import (
    NewTask,
    Retention,
)
from tarry.service.stores.sqlite import SqliteTaskStore, database, schema
from tests.service.stores.harness import (
    DAY_MS,
    LEASE,
    success_result,
    task,
)
from tests.service.stores.sqlite.harness import open_error, run_on_store


def test_a_new_file_may_be_opened_by_two_processes_at_once(tmp_path: Path) -> None:
    """A new file is valid if another process creates the tables while its version is read."""
    path = tmp_path / "tasks.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other,
    ):

        def create_tables(statement: str) -> None:
            if "sqlite_schema" in statement:  # the last query of `read_version`
                with contextlib.suppress(sqlite3.OperationalError):  # "database is locked"
                    schema.upgrade(other, path, 0)

        connection.set_trace_callback(create_tables)
        assert 0 == schema.read_version(connection, path)
        connection.set_trace_callback(None)
        other.rollback()
        schema.upgrade(connection, path, 0)
        assert schema.newest_version() == schema.read_version(other, path)


def test_a_file_of_an_older_version_is_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening an older file runs the missing migrations, and the store works on it."""
    path = tmp_path / "tasks.db"
    database.connect(path).close()
    new_column = "ALTER TABLE policy_use ADD COLUMN added INTEGER NOT NULL DEFAULT 7"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, new_column))

    async def write_policies(store: SqliteTaskStore) -> None:
        policy = PolicyVersion(tenant="acme", id="p", version=0, document=b"{}")
        await store.put_policy(policy, replace=False)
        await store.delete_policy("acme", "p")
        _, recreated = await store.put_policy(policy, replace=False)
        assert 2 == recreated.version

    run_on_store(path, write_policies)
    with closing(sqlite3.connect(path)) as connection:
        assert [(7,)] == connection.execute("SELECT added FROM policy_use").fetchall()


def test_an_older_process_continues_after_an_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is open while a newer version upgrades the file can still use it."""
    path = tmp_path / "tasks.db"

    async def main(store: SqliteTaskStore) -> None:
        await store.counters()  # opens the second connection
        columns = (
            "ALTER TABLE record ADD COLUMN added INTEGER;"
            "ALTER TABLE lane ADD COLUMN added INTEGER;"
            "ALTER TABLE state ADD COLUMN added INTEGER NOT NULL DEFAULT 7;"
            "ALTER TABLE task ADD COLUMN added INTEGER NOT NULL DEFAULT 7"
        )
        monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, columns))
        database.connect(path).close()
        await store.add([NewTask(task(1))])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        await store.finish([success_result(leased)])
        await record_worker(store, WorkerRecord(name="worker", host="host", pid=1))
        assert 1 == len(await list_workers(store))
        await store.sweep(Retention(DAY_MS, DAY_MS), 10)
        found = await store.get_task("acme", leased.id)
        assert found is not None
        assert Status.SUCCEEDED is found.status

    run_on_store(path, main)


def test_a_newer_schema_is_rejected(tmp_path: Path) -> None:
    """The error for a file with a newer schema names the file and its schema version."""
    path = tmp_path / "tasks.db"

    async def fill(store: SqliteTaskStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(path, fill)
    newer = schema.newest_version() + 1
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {newer}")

    message = open_error(path)

    assert f"{path} has schema version {newer}" in message
    assert "use the newer tarry" in message


@pytest.mark.parametrize(("application_id", "version"), [(0x74617272, 3), (0x74617279, 15)])
def test_a_file_of_an_unreleased_version_is_rejected(
    application_id: int, version: int, tmp_path: Path
) -> None:
    """The error for a file of an unreleased version asks for a new file."""
    path = tmp_path / "tasks.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE task (old)")
        connection.execute(f"PRAGMA application_id = {application_id}")
        connection.execute(f"PRAGMA user_version = {version}")

    message = open_error(path)

    assert f"{path} was written by an unreleased version of tarry" in message
    assert "move the file away" in message


def test_a_file_of_another_program_is_rejected(tmp_path: Path) -> None:
    """A database of another program, or a text file, is rejected and not changed."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE task (other)")
    assert f"{path} belongs to another program" in open_error(path)
    with closing(sqlite3.connect(path)) as connection:
        assert [("task",)] == connection.execute("SELECT name FROM sqlite_schema").fetchall()

    text = tmp_path / "text.db"
    text.write_text("this is a text file, not a database " * 100)
    assert f"{text} is not a SQLite file" in open_error(text)


def test_a_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed migration changes nothing, and is applied again at the next open."""
    path = tmp_path / "tasks.db"

    async def fill(store: SqliteTaskStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(path, fill)
    migration = "CREATE TABLE extra (a); INSERT INTO extra VALUES (1)"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, f"{migration}; nonsense"))

    async def fail_to_open() -> None:
        store = SqliteTaskStore(path)
        with pytest.raises(StoreUnavailable, match="nonsense"):
            await store.open()
        await store.close()

    asyncio.run(fail_to_open())
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], migration))

    async def check(store: SqliteTaskStore) -> None:
        assert 1 == (await store.counters()).task_counts[Status.PENDING]

    run_on_store(path, check)
    with closing(sqlite3.connect(path)) as connection:
        assert [(1,)] == connection.execute("SELECT a FROM extra").fetchall()
        assert [(schema.newest_version(),)] == connection.execute("PRAGMA user_version").fetchall()
