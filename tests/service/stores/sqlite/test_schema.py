"""The schema: upgrades, and files that are refused."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import PolicyVersion, Status
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteStore, database, schema
from tests.service.stores.harness import task
from tests.service.stores.sqlite.harness import open_error, run_on_store


def test_a_file_of_an_older_version_is_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening an older file runs the missing migrations, and the store works on it."""
    path = tmp_path / "tasks.db"
    database.connect(path).close()
    new_column = "ALTER TABLE policy_use ADD COLUMN added INTEGER NOT NULL DEFAULT 7"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, new_column))

    async def change(store: SqliteStore) -> None:
        policy = PolicyVersion(tenant="acme", id="p", version=0, document=b"{}")
        await store.put_policy(policy, replace=False)
        await store.delete_policy("acme", "p")
        _, again = await store.put_policy(policy, replace=False)
        assert 2 == again.version

    run_on_store(path, change)
    with closing(sqlite3.connect(path)) as other:
        assert [(7,)] == other.execute("SELECT added FROM policy_use").fetchall()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A file of a newer schema version is refused, named and left unchanged."""
    path = tmp_path / "tasks.db"

    async def fill(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(path, fill)
    newer = len(schema.MIGRATIONS) + 1
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {newer}")

    message = open_error(path)

    assert f"{path} has schema version {newer}" in message
    assert "use the newer tarry" in message


def test_a_file_of_an_unreleased_version_is_refused(tmp_path: Path) -> None:
    """Its tables have other columns, whatever its schema version: a new file is needed."""
    path = tmp_path / "tasks.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE task (old)")
        other.execute("PRAGMA application_id = 0x74617272")
        other.execute("PRAGMA user_version = 3")

    message = open_error(path)

    assert f"{path} was written by an unreleased version of tarry" in message
    assert "move the file away" in message


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    """Databases of other programs and files that are no database are left unchanged."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE task (theirs)")
    assert f"{path} belongs to another program" in open_error(path)
    with closing(sqlite3.connect(path)) as other:
        assert [("task",)] == other.execute("SELECT name FROM sqlite_schema").fetchall()

    text = tmp_path / "text.db"
    text.write_text("no database, but long enough to be looked at as one " * 100)
    assert f"{text} is not a SQLite file" in open_error(text)


def test_a_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration is applied completely or not at all, and is tried again later."""
    path = tmp_path / "tasks.db"

    async def fill(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(path, fill)
    good = "CREATE TABLE extra (a); INSERT INTO extra VALUES (1)"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, f"{good}; nonsense"))

    async def refused() -> None:
        store = SqliteStore(path)
        with pytest.raises(StoreUnavailable, match="nonsense"):
            await store.open()
        await store.close()

    asyncio.run(refused())
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], good))

    async def look(store: SqliteStore) -> None:
        assert 1 == (await store.counters()).task_counts[Status.PENDING]

    run_on_store(path, look)
    with closing(sqlite3.connect(path)) as other:
        assert [(1,)] == other.execute("SELECT a FROM extra").fetchall()
        assert [(len(schema.MIGRATIONS),)] == other.execute("PRAGMA user_version").fetchall()
