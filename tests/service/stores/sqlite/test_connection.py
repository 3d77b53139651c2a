"""The write-ahead log of the SQLite store: always on, and kept short whoever reads."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status
from tarry.service.store import NewTask, TaskFilter
from tarry.service.stores.sqlite import Database, SqliteStore, connection
from tarry.service.stores.sqlite.transaction import ReadTransaction
from tests.service.stores.harness import START_MS, task
from tests.service.stores.sqlite.test_store import on

MOST = 1 << 20


def size(path: Path) -> int:
    """How long the log of a file is."""
    return Path(f"{os.path.realpath(path)}-wal").stat().st_size


def mode(path: Path) -> str:
    """How a file keeps its changes."""
    with closing(sqlite3.connect(path)) as other:
        return str(other.execute("PRAGMA journal_mode").fetchone()[0])


def test_steady_reading_does_not_let_it_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read follows another, and still no group of changes finds more than the most."""
    monkeypatch.setattr(connection, "MAX_WAL_BYTES", MOST)
    monkeypatch.setattr(connection, "_MAX_CHECKPOINT_TRIES", 100_000)
    path = tmp_path / "link.db"
    path.symlink_to(tmp_path / "tasks.db")
    group = 50

    async def main(store: SqliteStore) -> None:
        async def read() -> None:
            while True:
                await store.list_tasks("acme", TaskFilter(reason="none"), limit=100)

        readers = [asyncio.ensure_future(read()) for _ in range(12)]
        try:
            for begin in range(0, 100 * group, group):
                numbers = range(begin, begin + group)
                await store.add([NewTask(task(number, content=bytes(1000))) for number in numbers])
                assert size(path) < MOST + MOST // 2
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)

    on(path, main)


def test_a_long_read_keeps_it_and_nobody_spins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process reads, changes go on; a new try waits for as much again."""
    monkeypatch.setattr(connection, "MAX_WAL_BYTES", MOST)
    monkeypatch.setattr(connection, "_MAX_CHECKPOINT_TRIES", 2)
    monkeypatch.setattr(connection, "_CHECKPOINT_TIMEOUT_MS", 1)
    path = tmp_path / "tasks.db"
    said: list[str] = []

    async def main(store: SqliteStore) -> None:
        store.database.open()[0].set_trace_callback(said.append)
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM task").fetchall()
            for number in (2, 3):
                await store.add([NewTask(task(number, content=bytes(MOST)))])
                assert number == (await store.counters()).tasks[Status.PENDING]
            for _ in range(20):
                await store.ping()
            assert 2 * 2 == _tries(said)
            assert size(path) > 2 * MOST
        await store.add([NewTask(task(4, content=bytes(MOST)))])
        await store.ping()

        assert 2 * 2 + 1 == _tries(said)
        assert size(path) < MOST
        assert [(5000,)] == store.database.open()[0].execute("PRAGMA busy_timeout").fetchall()

    on(path, main)


def _tries(said: list[str]) -> int:
    return sum("wal_checkpoint" in statement for statement in said)


def test_many_questions_are_no_long_read(tmp_path: Path) -> None:
    """They are answered in order, a few in a transaction: none keeps the log for long."""
    said: list[str] = []
    database = Database(tmp_path / "tasks.db", lambda: START_MS)
    database.open()[0].set_trace_callback(said.append)

    answers = database.read([partial(_echo, number) for number in range(20)])

    assert [(number, None) for number in range(20)] == answers
    assert ["BEGIN", "COMMIT"] * 3 == said
    database.close()


def _echo(number: int, _view: ReadTransaction) -> int:
    return number


def test_a_copy_of_the_file_has_it_too(tmp_path: Path) -> None:
    """`VACUUM INTO` writes a file without a log; opened as a store, it gets one."""
    path, copy = tmp_path / "tasks.db", tmp_path / "copy.db"

    async def fill(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(path)) as other:
            other.execute("VACUUM INTO ?", (str(copy),))

    async def look(store: SqliteStore) -> None:
        assert 1 == (await store.counters()).tasks[Status.PENDING]
        assert "wal" == mode(copy)

    on(path, fill)
    assert "delete" == mode(copy)
    on(copy, look)


def test_a_disk_that_cannot_have_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory cannot be shared between processes, the error says what is needed."""
    connect = sqlite3.connect

    def without_shared_memory(path: Path, **options: Any) -> sqlite3.Connection:
        made: sqlite3.Connection = connect(f"file:{path}?vfs=unix-dotfile", uri=True, **options)
        return made

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    database = Database(tmp_path / "tasks.db", lambda: START_MS)

    with pytest.raises(ConfigurationError, match="stays in mode delete: keep the store on a local"):
        database.open()
