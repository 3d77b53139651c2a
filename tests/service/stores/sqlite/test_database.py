"""Faults of the database file: errors, and recovery without a restart."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - cannot be imported after root privileges are dropped
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import NewTask, StoredTaskFilter
from tarry.service.stores.sqlite import SqliteTaskStore, database
from tests.service.stores.harness import LEASE, ManualClock, success_result, task
from tests.service.stores.sqlite.harness import open_error, open_store

NOBODY_UID = 65_534


async def test_a_write_that_exceeds_the_disk_space_fails(tmp_path: Path) -> None:
    """On a full disk, a large write fails and a small one of the same group is committed."""
    async with open_store(tmp_path / "tasks.db") as store:
        await store.add([NewTask(task(1))])
        leased = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        connection, _ = store.database.open()
        page_count = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {page_count + 2}").fetchall()

        large_tasks = [NewTask(task(number, packed_content=bytes(100_000))) for number in (2, 3)]
        results = await asyncio.gather(
            store.add(large_tasks),
            store.finish([success_result(leased[0])]),
            return_exceptions=True,
        )

        assert isinstance(results[0], StoreUnavailable)
        assert "the disk is full" in str(results[0])
        assert isinstance(results[0].__cause__, sqlite3.OperationalError)
        assert ["applied"] == results[1]
        assert 0 == (await store.counters()).task_counts[Status.PENDING]
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            await store.add(large_tasks)
        connection.execute("PRAGMA max_page_count = 1000000").fetchall()
        assert 2 == len(await store.add(large_tasks))


@pytest.fixture
def unprivileged_folder() -> Iterator[Path]:
    """Yield a folder, and drop root privileges, which would bypass file permissions."""
    path = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(path, NOBODY_UID, NOBODY_UID)
        os.seteuid(NOBODY_UID)
    try:
        yield path
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(path)


@contextmanager
def keep_open(path: Path) -> Iterator[None]:
    """Keep a database open in another process, so that its WAL file is not deleted."""
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
    code += "c.execute('SELECT count(*) FROM task').fetchone(); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=0 if os.getuid() == 0 else None,
    ) as process:
        assert process.stdout is not None
        assert "open\n" == process.stdout.readline()
        yield
        process.communicate("\n")


async def test_a_read_only_file_can_be_read(unprivileged_folder: Path) -> None:
    """On a read-only file, reads succeed, and writes fail until the file is writable."""
    path = unprivileged_folder / "tasks.db"

    async with open_store(path) as store:
        await store.add([NewTask(task(1))])
        assert 1 == len((await store.list_tasks("acme", StoredTaskFilter())).items)
        with keep_open(path):
            path.chmod(0o444)
            for database in (store.database, store._read_database):
                database.close()  # an open connection could still write

            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="it is read-only"):
                    await store.add([NewTask(task(2))])
            with pytest.raises(StoreUnavailable, match="it is read-only"):
                await store.ping()
            assert 1 == len((await store.list_tasks("acme", StoredTaskFilter())).items)

            path.chmod(0o644)
            await store.add([NewTask(task(2))])
            assert 2 == len((await store.list_tasks("acme", StoredTaskFilter())).items)


async def test_a_moved_file_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    """Operations fail while the file is moved, and succeed once it is back."""
    path, moved_path = tmp_path / "tasks.db", tmp_path / "moved.db"

    async with open_store(path) as store:
        await store.add([NewTask(task(1))])
        path.rename(moved_path)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="moved or deleted while it was open"):
                await store.add([NewTask(task(2))])
            store.database.close()
        assert not path.exists()
        moved_path.rename(path)
        await store.add([NewTask(task(2))])
        assert 2 == (await store.counters()).task_counts[Status.PENDING]


async def test_writes_fail_while_another_process_has_the_write_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail while another connection has the write lock; reads do not wait for it."""
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_MS", 1)

    async with open_store(tmp_path / "tasks.db") as store:
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(tmp_path / "tasks.db", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            calls = (store.add([NewTask(task(2))]), store.ping())
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [StoreUnavailable] * 2 == [type(result) for result in results]
            assert "another process holds its write lock" in str(results[0])
            assert 1 == len((await store.list_tasks("acme", StoredTaskFilter())).items)
            connection.execute("ROLLBACK")
        await store.add([NewTask(task(2))])


async def test_a_store_opens_once_its_folder_exists(tmp_path: Path) -> None:
    """A store that could not be opened works once its folder exists."""
    path = tmp_path / "later" / "tasks.db"

    store = SqliteTaskStore(path, clock=ManualClock())
    try:
        with pytest.raises(StoreUnavailable, match="cannot be opened"):
            await store.open()
        with pytest.raises(StoreUnavailable, match="cannot be opened"):
            await store.counters()
        path.parent.mkdir()
        await store.add([NewTask(task(1))])
        assert 1 == (await store.counters()).task_counts[Status.PENDING]
    finally:
        await store.close()


def test_an_old_sqlite_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for an old SQLite names the required version."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 37, 2))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.37.2")

    assert "needs SQLite 3.38.0 or newer, and this Python has 3.37.2" in open_error(
        tmp_path / "tasks.db"
    )
