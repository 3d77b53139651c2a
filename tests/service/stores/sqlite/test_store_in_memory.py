"""The SQLite store in memory: conformance, concurrent reads and writes, and no files."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.app import make_store
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import IN_MEMORY, SqliteDatabase, SqliteTaskStore
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import START_MS, ManualClock, task, task_id


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case) -> None:
    """The store in memory passes the conformance suite; reopening returns the same store."""
    opened: list[SqliteTaskStore] = []

    def open_once(clock: ManualClock) -> SqliteTaskStore:
        if not opened:
            opened.append(SqliteTaskStore(IN_MEMORY, clock=clock))
        return opened[0]

    asyncio.run(StoreHarness(open_once).run(case))


def test_memory_url_creates_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `memory:` store creates no file, and loses its tasks when it is closed."""
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        store = make_store("memory:", writer_process=True)
        await store.open()
        [added] = await store.add([NewTask(task(1))])
        assert added.task == await store.get_task("acme", task_id(1))
        await store.close()
        await store.open()
        assert None is await store.get_task("acme", task_id(1))
        await store.close()

    asyncio.run(main())
    assert [] == list(tmp_path.iterdir())


def test_reads_see_writes_of_the_other_thread() -> None:
    """A read in the second thread sees every task that was added before it."""

    async def main() -> None:
        store = SqliteTaskStore(IN_MEMORY, clock=ManualClock())
        await store.open()

        async def add_and_get(number: int) -> None:
            await store.add([NewTask(task(number))])
            assert await store.get_task("acme", task_id(number)) is not None

        await asyncio.gather(*(add_and_get(number) for number in range(200)))
        await store.close()

    asyncio.run(main())


def test_an_error_of_sqlite_does_not_delete_the_data() -> None:
    """After an error that makes a file database reconnect, the data in memory is kept."""
    database = SqliteDatabase(IN_MEMORY, lambda: START_MS)
    database.apply([lambda tx: tx.names.tenant_id("acme")])

    def fail(_: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    [(_, error)] = database.apply([fail])

    assert isinstance(error, StoreUnavailable)
    [(found, _)] = database.read([lambda tx: tx.execute("SELECT name FROM tenant").fetchall()])
    assert [("acme",)] == found
    database.close()


def test_a_store_in_memory_has_no_writer_process() -> None:
    """A writer process is rejected, because it would have a separate database."""
    with pytest.raises(ConfigurationError, match="cannot have a writer process"):
        SqliteTaskStore(IN_MEMORY, writer_process=True)
