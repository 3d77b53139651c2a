"""Backups of a store and of its folder of bodies."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service import backup
from tarry.service.backup import Backup, back_up, bodies_folder_of
from tarry.service.payloads import create_file
from tarry.service.store import NewTask, Retention
from tarry.service.stores.sqlite import finished_tasks
from tarry.service.stores.sqlite.backup import copy_database
from tests.service.stores.harness import task
from tests.service.stores.sqlite.harness import DatabaseFile

MARKER = ".tarry/places/x"


class StoreFolder:
    """A store with bodies, and the path of its backup."""

    def __init__(self, folder: Path) -> None:
        self.store, self.bodies = folder / "tarry.db", folder / "bodies"
        self.file = folder / "backups" / "copy.db"
        self.database = DatabaseFile(self.store)
        create_file(self.bodies, MARKER, b"marker")

    def add(self, number: int, body: bytes) -> str:
        """Add a task with a body in the folder; return the path of the body."""
        ref = f".tarry/x/acme/{number}"
        create_file(self.bodies, ref, body)
        self.database.add([NewTask(task(number, owned_body_ref=ref))])
        return ref

    def back_up(self, *, overwrite: bool = False, bodies: Path | None = None) -> Backup:
        """Write a backup."""
        return back_up(
            self.store,
            bodies or self.bodies,
            self.file,
            overwrite=overwrite,
            on_progress=lambda _finished, _total: None,
        )

    def copied_files(self) -> dict[str, bytes]:
        """Return the files of the folder of copied bodies, by relative path."""
        folder = bodies_folder_of(self.file)
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    """A store in a temporary folder."""
    store_folder = StoreFolder(tmp_path)
    yield store_folder
    store_folder.database.database.close()


def test_database_and_bodies_are_copied(folder: StoreFolder) -> None:
    """A backup has the tasks and the bodies; only their owner can read the files."""
    ref = folder.add(1, b"body")
    create_file(folder.bodies, "acme/invoice.json", b"of a caller")

    result = folder.back_up()

    assert Backup(1, folder.file.stat().st_size, 1, 0) == result
    assert folder.copied_files() == {
        ref: b"body",
        MARKER: b"marker",
        "acme/invoice.json": b"of a caller",
    }
    for path in (folder.file, bodies_folder_of(folder.file) / ref):
        assert 0o600 == path.stat().st_mode & 0o777
    assert 0o700 == bodies_folder_of(folder.file).stat().st_mode & 0o777
    assert {folder.file, bodies_folder_of(folder.file)} == set(folder.file.parent.iterdir())


def test_bodies_are_copied_after_the_database(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that is stored while the database is copied is in the backup, too."""
    folder.add(1, b"first")

    def add_then_copy(*arguments: Any) -> None:
        folder.add(2, b"second")
        copy_database(*arguments)

    monkeypatch.setattr(backup, "copy_database", add_then_copy)

    assert 2 == folder.back_up().body_count


def test_an_existing_file_is_not_replaced(folder: StoreFolder) -> None:
    """Without `overwrite`, an existing backup stays as it is."""
    folder.add(1, b"body")
    folder.back_up()
    before = folder.file.read_bytes()
    folder.add(2, b"other")

    with pytest.raises(ConfigurationError, match=r"exists: name another file, or .* --force"):
        folder.back_up()

    assert before == folder.file.read_bytes()
    assert 2 == len(folder.copied_files())


def test_a_backup_in_use_as_a_store_is_not_replaced(folder: StoreFolder) -> None:
    """SQLite would apply the WAL of the store to the new file, which would be damaged then."""
    folder.add(1, b"body")
    folder.back_up()
    with closing(sqlite3.connect(folder.file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("CREATE TABLE another (id)")
        before = folder.file.read_bytes()

        with pytest.raises(
            ConfigurationError, match=r"copy\.db-wal exists, so .*copy\.db is in use"
        ):
            folder.back_up(overwrite=True)
        assert before == folder.file.read_bytes()
    folder.back_up(overwrite=True)  # the last connection has removed the WAL


def test_a_replaced_backup_has_only_the_new_bodies(folder: StoreFolder) -> None:
    """With `overwrite`, bodies of deleted tasks are removed from the backup."""
    folder.add(1, b"body")
    folder.database.cancel([task(1)])
    folder.back_up()
    folder.database.run(lambda tx: finished_tasks.sweep(tx, Retention(0, 0), 10))
    (folder.bodies / ".tarry/x/acme/1").unlink()
    ref = folder.add(2, b"other")

    result = folder.back_up(overwrite=True)

    assert (1, 1) == (result.task_count, result.body_count)
    assert {ref: b"other", MARKER: b"marker"} == folder.copied_files()


def test_a_failed_backup_leaves_the_old_one(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If copying bodies fails, the older backup is complete, and no partial file stays."""
    folder.add(1, b"body")
    folder.back_up()
    before = folder.file.read_bytes()
    folder.add(2, b"other")

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)

    with pytest.raises(ConfigurationError, match=r"cannot write the backup .*No space left"):
        folder.back_up(overwrite=True)

    assert before == folder.file.read_bytes()
    assert {".tarry/x/acme/1": b"body", MARKER: b"marker"} == folder.copied_files()
    assert 2 == len(list(folder.file.parent.iterdir()))


def test_missing_bodies_are_counted(folder: StoreFolder) -> None:
    """A body that was deleted during the backup is counted, and the backup is kept."""
    folder.add(1, b"body")
    folder.add(2, b"other")
    (folder.bodies / ".tarry/x/acme/1").unlink()

    result = folder.back_up()

    assert (2, 1, 1) == (result.task_count, result.body_count, result.missing_body_count)


def test_another_folder_of_bodies_is_rejected(folder: StoreFolder, tmp_path: Path) -> None:
    """If the marker of the storage is missing as well, the folder is the wrong one."""
    folder.add(1, b"body")

    with pytest.raises(ConfigurationError, match=r"1 bodies of the store are not .*set `bodies`"):
        folder.back_up(bodies=tmp_path / "elsewhere")

    assert not folder.file.exists()


def test_invalid_targets_are_rejected(folder: StoreFolder, tmp_path: Path) -> None:
    """Neither the store itself nor a folder can be the backup."""
    folder.file = folder.store
    with pytest.raises(ConfigurationError, match="is the store itself"):
        folder.back_up(overwrite=True)

    folder.file = tmp_path
    with pytest.raises(ConfigurationError, match="is a folder: name a file in it"):
        folder.back_up(overwrite=True)
