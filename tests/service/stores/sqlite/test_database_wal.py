"""The write-ahead log (WAL) of the SQLite store."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import NewTask, StoredTaskFilter
from tarry.service.stores.sqlite import SqliteDatabase, SqliteTaskStore, database
from tarry.service.stores.sqlite.transaction import ReadTransaction, WriteTransaction
from tests.service.stores.harness import START_MS, task
from tests.service.stores.sqlite.harness import open_store, run_on_store

MAX_WAL_BYTES = 1 << 20
DELETIONS = [("-wal",), ("-shm",), ("-wal", "-shm")]
OTHER_PROCESS = """
import sys
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteDatabase, add
from tests.service.stores.harness import LEASE, START_MS, task

database = SqliteDatabase(sys.argv[1], lambda: START_MS)

def insert(number):
    [(_, error)] = database.apply([lambda tx: add.add(tx, [NewTask(task(number))], LEASE, None)])
    return error

def count():
    [(row, error)] = database.read([lambda tx: tx.execute("SELECT count(*) FROM task").fetchone()])
    return error or row[0]

for line in sys.stdin:
    print(eval(line), flush=True)
"""


def wal_size(path: Path) -> int:
    """Return the size of the WAL of a database."""
    return Path(f"{os.path.realpath(path)}-wal").stat().st_size


def journal_mode(path: Path) -> str:
    """Return the journal mode of a database."""
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


async def test_the_wal_stays_short_during_constant_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WAL does not grow beyond its limit although reads never pause."""
    monkeypatch.setattr(database, "MAX_WAL_BYTES", MAX_WAL_BYTES)
    monkeypatch.setattr(database, "_MAX_CHECKPOINT_TRIES", 100_000)
    path = tmp_path / "link.db"
    path.symlink_to(tmp_path / "tasks.db")
    batch_size = 50

    async with open_store(path) as store:

        async def read() -> None:
            while True:
                await store.list_tasks("acme", StoredTaskFilter(reason="none"), limit=100)

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


async def test_a_long_read_delays_truncation_without_busy_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a long read, a truncation is tried again only after the WAL has grown."""
    monkeypatch.setattr(database, "MAX_WAL_BYTES", MAX_WAL_BYTES)
    monkeypatch.setattr(database, "_MAX_CHECKPOINT_TRIES", 2)
    monkeypatch.setattr(database, "_CHECKPOINT_TIMEOUT_MS", 1)
    path = tmp_path / "tasks.db"
    statements: list[str] = []

    async with open_store(path) as store:
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


async def test_a_write_succeeds_although_truncation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the checkpoint, which only keeps the WAL short, is not an error of the write."""
    monkeypatch.setattr(database, "MAX_WAL_BYTES", 0)
    denied: list[str | None] = []

    def deny_checkpoints(action: int, name: str | None, *_: str | None) -> int:
        if action != sqlite3.SQLITE_PRAGMA or name != "wal_checkpoint":
            return sqlite3.SQLITE_OK
        denied.append(name)
        return sqlite3.SQLITE_DENY

    async with open_store(tmp_path / "tasks.db") as store:
        await store.ping()
        store.database.open()[0].set_authorizer(deny_checkpoints)
        await store.add([NewTask(task(1))])
        assert 1 == (await store.counters()).task_counts[Status.PENDING]
        assert denied


def _count_checkpoints(statements: list[str]) -> int:
    return sum("wal_checkpoint" in statement for statement in statements)


def test_many_queries_use_several_read_transactions(tmp_path: Path) -> None:
    """20 queries use 3 read transactions, so that none delays truncation for long."""
    statements: list[str] = []
    database = SqliteDatabase(tmp_path / "tasks.db", lambda: START_MS)
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

    async def fill(store: SqliteTaskStore) -> None:
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))

    async def check(store: SqliteTaskStore) -> None:
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
    database = SqliteDatabase(tmp_path / "tasks.db", lambda: START_MS)

    with pytest.raises(ConfigurationError, match="stays in mode delete: keep the store on a local"):
        database.open()


# --- deleted while open ---------------------------------------------------------------------------


def delete(path: Path, suffixes: tuple[str, ...]) -> None:
    """Delete the WAL of a database, its index, or both."""
    for suffix in suffixes:
        Path(f"{path}{suffix}").unlink()


def count_tasks_after_crash(path: Path) -> int:
    """Return how many tasks a copy of the files has, which is what a crash would leave."""
    copy = path.with_name("crashed.db")
    for suffix in ("", "-wal"):
        source, target = Path(f"{path}{suffix}"), Path(f"{copy}{suffix}")
        target.unlink(missing_ok=True)
        if source.exists():
            shutil.copy(source, target)
    with closing(sqlite3.connect(copy)) as connection:
        assert "ok" == connection.execute("PRAGMA integrity_check").fetchone()[0]
        return int(connection.execute("SELECT count(*) FROM task").fetchone()[0])


@contextmanager
def other_process(path: Path) -> Iterator[Callable[[str], str]]:
    """Yield a function that evaluates an expression in a process with its own `database`."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:

        def evaluate(expression: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{expression}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield evaluate


@pytest.mark.parametrize("suffixes", DELETIONS)
async def test_no_commit_is_lost_with_a_deleted_wal(
    tmp_path: Path, suffixes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The WAL is copied into the file before the next write is answered, and replaced."""
    path = tmp_path / "tasks.db"

    async with open_store(path) as store:
        await store.add([NewTask(task(1))])
        assert 1 == (await store.counters()).task_counts[Status.PENDING]
        delete(path, suffixes)
        assert 1 == (await store.counters()).task_counts[Status.PENDING]
        await store.add([NewTask(task(2))])
        assert 2 == count_tasks_after_crash(path)
        await store.add([NewTask(task(3))])
        assert 3 == count_tasks_after_crash(path)
        assert 3 == (await store.counters()).task_counts[Status.PENDING]
        assert os.access(f"{path}-shm", os.F_OK)  # a new process would use the same index
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "write-ahead log deleted while open, its content was copied" in record.getMessage()


async def test_a_wal_deleted_during_a_transaction_is_copied(tmp_path: Path) -> None:
    """A commit into the deleted WAL is answered after the WAL was copied into the file."""
    path = tmp_path / "tasks.db"

    async with open_store(path) as store:
        add = store.add([NewTask(task(1))])
        await asyncio.gather(add, store.write(lambda _: delete(path, ("-wal",))))
        assert 1 == count_tasks_after_crash(path)


@pytest.mark.parametrize("suffixes", DELETIONS)
async def test_all_processes_replace_a_deleted_wal(
    tmp_path: Path, suffixes: tuple[str, ...]
) -> None:
    """Each process continues with the new WAL, whichever has replaced the deleted one."""
    path = tmp_path / "tasks.db"

    store = SqliteTaskStore(path, writer_process=True)
    await store.open()

    async def count() -> int:
        return (await store.counters()).task_counts[Status.PENDING]

    try:
        with other_process(path) as evaluate:
            for total in range(0, 50, 10):
                await store.add([NewTask(task(total))])
                assert (total + 1, str(total + 1)) == (await count(), evaluate("count()"))
                delete(path, suffixes)
                assert (total + 1, str(total + 1)) == (await count(), evaluate("count()"))
                await store.add([NewTask(task(total + 1))])
                assert (total + 2, str(total + 2)) == (await count(), evaluate("count()"))
                for number in range(total + 2, total + 5):
                    assert "None" == evaluate(f"insert({number})")
                assert (total + 5, str(total + 5)) == (await count(), evaluate("count()"))
                delete(path, suffixes)
                assert "None" == evaluate(f"insert({total + 5})")
                assert (total + 6, str(total + 6)) == (await count(), evaluate("count()"))
                for number in range(total + 6, total + 10):
                    await store.add([NewTask(task(number))])
                assert total + 10 == count_tasks_after_crash(path)
    finally:
        await store.close()


async def test_a_deleted_wal_that_is_read_is_copied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail until another connection has ended its read of the deleted WAL; reads do not."""
    monkeypatch.setattr(database, "_CHECKPOINT_TIMEOUT_MS", 1)
    path = tmp_path / "tasks.db"
    calls: list[int] = []

    async with open_store(path) as store:
        await store.add([NewTask(task(1))])
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM task").fetchall()

            def delete_wal(tx: WriteTransaction) -> None:
                calls.append(1)
                tx.execute("UPDATE meta SET value = 7 WHERE name = 'pinged'")
                delete(path, ("-wal",))

            answers = store.database.apply([delete_wal, lambda _: calls.append(2)])
            assert [1, 2] == calls  # they are not repeated: their transaction was committed
            assert 2 == len(answers)
            for _, error in answers:
                assert isinstance(error, StoreUnavailable)
                assert "could not be copied into the file yet (another process uses it" in str(
                    error
                )
            with pytest.raises(StoreUnavailable, match="could not be copied into the file yet"):
                await store.add([NewTask(task(2))])
            assert 1 == (await store.counters()).task_counts[Status.PENDING]
            connection.execute("COMMIT")
        await store.add([NewTask(task(2))])
        assert 2 == count_tasks_after_crash(path)
        pinged = await store.read(lambda tx: tx.execute("SELECT value FROM meta").fetchall())
        assert (7,) in pinged


async def test_a_deleted_wal_survives_the_writer_process(tmp_path: Path) -> None:
    """If the writer process is killed before it has copied the WAL, the reader copies it."""
    path = tmp_path / "tasks.db"

    store = SqliteTaskStore(path, writer_process=True)
    await store.open()
    try:
        await store.add([NewTask(task(1))])
        assert 1 == (await store.counters()).task_counts[Status.PENDING]
        process: Any = store._writer
        os.kill(process.process.pid, signal.SIGSTOP)
        delete(path, ("-wal", "-shm"))
        os.kill(process.process.pid, signal.SIGKILL)
        while process.process is not None:  # noqa: ASYNC110 - the executor has no event for it
            await asyncio.sleep(0.01)
        await store.add([NewTask(task(2))])
        assert 2 == count_tasks_after_crash(path)
        assert 2 == (await store.counters()).task_counts[Status.PENDING]
    finally:
        await store.close()


async def test_a_deleted_wal_is_lost_if_another_process_has_opened_the_file(tmp_path: Path) -> None:
    """Copying the WAL would then damage the file, so that the store reports the loss."""
    path = tmp_path / "tasks.db"

    async with open_store(path) as store:
        store.database.apply([lambda tx: tx.execute("PRAGMA wal_checkpoint")])
        await store.add([NewTask(task(1))])
        delete(path, ("-wal", "-shm"))
        with other_process(path) as evaluate:
            assert "0" == evaluate("count()")
            with pytest.raises(StoreUnavailable, match="since the last checkpoint are lost"):
                await store.add([NewTask(task(2))])
            await store.add([NewTask(task(3))])
            assert "None" == evaluate("insert(4)")
        assert 2 == count_tasks_after_crash(path)


async def test_closing_an_idle_reader_does_not_delete_the_new_wal(tmp_path: Path) -> None:
    """A reader that has not noticed that the WAL was replaced is not the last to be closed."""
    path = tmp_path / "tasks.db"

    store = SqliteTaskStore(path, writer_process=True)
    await store.open()
    await store.add([NewTask(task(1))])
    assert 1 == (await store.counters()).task_counts[Status.PENDING]
    delete(path, ("-wal", "-shm"))
    await store.add([NewTask(task(2))])
    await store.close()
    assert 2 == count_tasks_after_crash(path)


def test_a_wal_that_cannot_be_opened_makes_the_store_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next operation opens the file again."""

    def fail(*_args: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    database = SqliteDatabase(tmp_path / "tasks.db", lambda: START_MS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        [(_, error)] = database.read([partial(_echo, 1)])

    assert isinstance(error, StoreUnavailable)
    assert "its write-ahead log cannot be opened" in str(error)
    assert [(1, None)] == database.read([partial(_echo, 1)])
    database.close()
