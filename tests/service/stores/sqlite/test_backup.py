"""The copy of a SQLite store that is in use."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import backup, database, schema
from tests.service.stores.harness import task
from tests.service.stores.sqlite.harness import DatabaseFile, open_store


def ignore_progress(_finished: int, _total: int) -> None:
    """Do nothing."""


def test_a_copy_ends_while_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that are added between two steps are not in the copy, and do not start it again."""
    monkeypatch.setattr(backup, "_PAGES_PER_STEP", 4)
    source, target = DatabaseFile(tmp_path / "tasks.db"), tmp_path / "copy.db"
    source.add([NewTask(task(number, packed_content=bytes(5_000))) for number in range(1, 41)])
    numbers = iter(range(100, 10_000))
    steps: list[tuple[int, int]] = []

    def add_task(finished: int, total: int) -> None:
        steps.append((finished, total))
        source.add([NewTask(task(next(numbers)))])

    backup.copy_database(tmp_path / "tasks.db", target, add_task)

    total = steps[0][1]
    assert [(min(4 * step, total), total) for step in range(1, len(steps) + 1)] == steps
    assert total == steps[-1][0]
    assert 40 == backup.read_task_count(target)
    source.database.close()


async def test_a_copy_is_one_file_that_the_store_accepts(tmp_path: Path) -> None:
    """The copy has no WAL, the schema version of the source, and is opened as a store."""
    source, target = DatabaseFile(tmp_path / "tasks.db"), tmp_path / "copy" / "copy.db"
    source.add([NewTask(task(1))])
    target.parent.mkdir()
    target.touch(0o600)

    backup.copy_database(tmp_path / "tasks.db", target, ignore_progress)
    source.database.close()

    assert [target] == list(target.parent.iterdir())
    with closing(sqlite3.connect(target)) as connection:
        assert [("delete",)] == connection.execute("PRAGMA journal_mode").fetchall()
        assert [(schema.newest_version(),)] == connection.execute("PRAGMA user_version").fetchall()

    async with open_store(target) as store:
        found = await store.get_task("acme", task(1).id)
        assert found is not None
        assert b"content 1" == found.packed_content


def test_an_older_schema_is_copied_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup before an upgrade has the schema version of the old tarry."""
    path, target = tmp_path / "tasks.db", tmp_path / "copy.db"
    database.connect(path).close()
    older = schema.newest_version()
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE added (a)"))

    backup.copy_database(path, target, ignore_progress)

    for file in (path, target):
        with closing(sqlite3.connect(file)) as connection:
            assert [(older,)] == connection.execute("PRAGMA user_version").fetchall()


def test_the_check_of_the_copy_does_not_read_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the copy is checked, the WAL of the store can be truncated."""
    path, target = tmp_path / "tasks.db", tmp_path / "copy.db"
    source = DatabaseFile(path)
    source.add([NewTask(task(1))])
    checkpoints: list[tuple[int, int, int]] = []
    read_version = schema.read_version

    def truncate_wal(connection: sqlite3.Connection, read_path: Path) -> int:
        if read_path == target:
            with closing(sqlite3.connect(path)) as other:
                checkpoints.extend(other.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        return read_version(connection, read_path)

    monkeypatch.setattr(schema, "read_version", truncate_wal)

    backup.copy_database(path, target, ignore_progress)
    source.database.close()

    assert [(0, 0, 0)] == checkpoints  # not busy, and no page is left in the WAL


def test_files_that_are_no_store_are_rejected(tmp_path: Path) -> None:
    """An empty file, a database of another program and a text file are not copied."""
    other, text, empty = (tmp_path / name for name in ("other.db", "text.db", "empty.db"))
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE task (other)")
    text.write_text("this is a text file, not a database " * 100)
    empty.touch()

    for path, error, message in (
        (other, ConfigurationError, "belongs to another program"),
        (empty, ConfigurationError, "is empty. Is this the store of your service?"),
        (text, StoreUnavailable, "file is not a database"),
    ):
        with pytest.raises(error, match=message):
            backup.copy_database(path, tmp_path / "copy.db", ignore_progress)


def test_a_damaged_store_is_reported(tmp_path: Path) -> None:
    """The check of the copy finds a damaged page, so a damaged backup is not kept."""
    path = tmp_path / "tasks.db"
    source = DatabaseFile(path)
    source.add([NewTask(task(number, packed_content=bytes(900))) for number in range(1, 200)])
    source.database.close()
    content = bytearray(path.read_bytes())
    content[-40 * 4096 :] = b"\xff" * (40 * 4096)
    path.write_bytes(content)

    with pytest.raises(StoreUnavailable, match=r"is damaged|malformed"):
        backup.copy_database(path, tmp_path / "copy.db", ignore_progress)


def test_references_to_bodies_are_listed(tmp_path: Path) -> None:
    """Only bodies that the service has written are listed."""
    source = DatabaseFile(tmp_path / "tasks.db")
    source.add([NewTask(task(1, owned_body_ref=".tarry/x/acme/1")), NewTask(task(2))])
    source.database.close()

    assert [".tarry/x/acme/1"] == list(backup.iter_body_refs(tmp_path / "tasks.db"))
