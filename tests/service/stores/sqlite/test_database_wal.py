"""The write-ahead log (WAL) of the SQLite store."""

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
from tarry.service.stores.sqlite import Database, SqliteStore, database
from tarry.service.stores.sqlite.transaction import ReadTransaction
from tests.service.stores.harness import START_MS, task
from tests.service.stores.sqlite.harness import run_on_store

MAX_WAL_BYTES = 1 << 20


def wal_size(path: Path) -> int:
    """Return the size of the WAL of a database."""
    return Path(f"{os.path.realpath(path)}-wal").stat().st_size


def journal_mode(path: Path) -> str:
    """Return the journal mode of a database."""
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def test_the_wal_stays_short_during_constant_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WAL does not grow beyond its limit although reads never pause."""
    monkeypatch.setattr(database, "MAX_WAL_BYTES", MAX_WAL_BYTES)
    monkeypatch.setattr(database, "_MAX_CHECKPOINT_TRIES", 100_000)
    path = tmp_path / "link.db"
    path.symlink_to(tmp_path / "tasks.db")
    batch_size = 50

    async def main(store: SqliteStore) -> None:
        async def read() -> None:
            while True:
                await store.list_tasks("acme", TaskFilter(reason="none"), limit=100)

        readers = [asyncio.ensure_future(read()) for _ in range(12)]
        try:
            for begin in range(0, 100 * batch_size, batch_size):
                numbers = range(begin, begin + batch_size)
                await store.add(
                    [NewTask(task(number, packed_content=bytes(1000))) for number in numbers]
                )
                assert wal_size(path) < MAX_WAL_BYTES + MAX_WAL_BYTES // 2
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)

    run_on_store(path, main)


def test_a_long_read_delays_truncation_without_busy_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a long read, a truncation is tried again only after the WAL has grown."""
    monkeypatch.setattr(database, "MAX_WAL_BYTES", MAX_WAL_BYTES)
    monkeypatch.setattr(database, "_MAX_CHECKPOINT_TRIES", 2)
    monkeypatch.setattr(database, "_CHECKPOINT_TIMEOUT_MS", 1)
    path = tmp_path / "tasks.db"
    statements: list[str] = []

    async def main(store: SqliteStore) -> None:
        store.database.open()[0].set_trace_callback(statements.append)
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM task").fetchall()
            for number in (2, 3):
                await store.add([NewTask(task(number, packed_content=bytes(MAX_WAL_BYTES)))])
                assert number == (await store.counters()).task_counts[Status.PENDING]
            for _ in range(20):
                await store.ping()
            assert 2 * 2 == _count_checkpoints(statements)
            assert wal_size(path) > 2 * MAX_WAL_BYTES
        await store.add([NewTask(task(4, packed_content=bytes(MAX_WAL_BYTES)))])
        await store.ping()

        assert 2 * 2 + 1 == _count_checkpoints(statements)
        assert wal_size(path) < MAX_WAL_BYTES
        assert [(5000,)] == store.database.open()[0].execute("PRAGMA busy_timeout").fetchall()

    run_on_store(path, main)


def _count_checkpoints(statements: list[str]) -> int:
    return sum("wal_checkpoint" in statement for statement in statements)


def test_many_queries_use_several_read_transactions(tmp_path: Path) -> None:
    """20 queries use 3 read transactions, so that none delays truncation for long."""
    statements: list[str] = []
    database = Database(tmp_path / "tasks.db", lambda: START_MS)
    database.open()[0].set_trace_callback(statements.append)

    results = database.read([partial(_echo, number) for number in range(20)])

    assert [(number, None) for number in range(20)] == results
    assert ["BEGIN", "COMMIT"] * 3 == statements
    database.close()


def _echo(number: int, tx: ReadTransaction) -> int:
    return number


def test_a_copy_of_the_file_gets_a_wal(tmp_path: Path) -> None:
    """A file that `VACUUM INTO` wrote without a WAL gets one when a store opens it."""
    path, copy = tmp_path / "tasks.db", tmp_path / "copy.db"

    async def fill(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))

    async def check(store: SqliteStore) -> None:
        assert 1 == (await store.counters()).task_counts[Status.PENDING]
        assert "wal" == journal_mode(copy)

    run_on_store(path, fill)
    assert "delete" == journal_mode(copy)
    run_on_store(copy, check)


def test_a_file_system_without_wal_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a file system without WAL support asks for a local disk."""
    connect = sqlite3.connect

    def connect_without_shared_memory(path: Path, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(
            f"file:{path}?vfs=unix-dotfile", uri=True, **options
        )
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_without_shared_memory)
    database = Database(tmp_path / "tasks.db", lambda: START_MS)

    with pytest.raises(ConfigurationError, match="stays in mode delete: keep the store on a local"):
        database.open()
