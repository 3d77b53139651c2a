"""`SqliteTaskStore`: durability, and several stores on one file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import pytest

from tarry.errors import StoreUnavailable
from tarry.runtime.effects import effects
from tarry.service.model import Status
from tarry.service.store import AddStatus, FinishStatus, NewTask
from tarry.service.stores.sqlite import SqliteDatabase, SqliteTaskStore, add, clock
from tests.service.stores.harness import (
    LEASE,
    OTHER_LEASE,
    START_MS,
    ManualClock,
    success_result,
    task,
    task_id,
    task_numbers,
)
from tests.service.stores.sqlite.harness import run_on_store

T = TypeVar("T")


def test_two_stores_share_a_file(tmp_path: Path) -> None:
    """Two stores on one file see the changes of each other, and lease no task twice."""

    async def main(first: SqliteTaskStore) -> None:
        second = SqliteTaskStore(tmp_path / "tasks.db", clock=ManualClock())
        await second.open()
        try:
            await asyncio.gather(
                *(
                    store.add([NewTask(task(number, f"h{number % 7}"))])
                    for number, store in enumerate([first, second] * 100)
                )
            )
            claims = await asyncio.gather(
                *(
                    store.claim(lease, limit=10, per_lane=5)
                    for _ in range(10)
                    for store, lease in ((first, LEASE), (second, OTHER_LEASE))
                )
            )
            leased = [task for claimed in claims for task in claimed.tasks]

            assert list(range(200)) == sorted(task_numbers(leased))
            assert {"worker", "other"} == {task.worker for task in leased}
            assert [FinishStatus.APPLIED] * 200 == await second.finish(
                [success_result(leased_task) for leased_task in leased]
            )
            assert 200 == (await first.counters()).task_counts[Status.SUCCEEDED]
            [repeated] = await second.add([NewTask(task(7, "h0"))])
            assert (AddStatus.EXISTING, Status.SUCCEEDED) == (repeated.status, repeated.task.status)
        finally:
            await second.close()

    run_on_store(tmp_path / "tasks.db", main)


def test_default_clock_is_the_system_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock argument the store's time is the Unix time in milliseconds."""
    monkeypatch.setattr(effects, "unix_time", lambda: 12.3456)
    monkeypatch.setattr(clock, "read_boot_ms", lambda: 99)

    async def main() -> int:
        store = SqliteTaskStore(str(tmp_path / "tasks.db"))
        await store.open()
        try:
            return await store.ping()
        finally:
            await store.close()

    assert 12_345 == asyncio.run(main())


def test_every_commit_is_flushed_to_disk(tmp_path: Path) -> None:
    """The database uses a WAL, which is flushed at every commit."""

    async def main(store: SqliteTaskStore) -> None:
        connection, _ = store.database.open()
        assert [("wal",)] == connection.execute("PRAGMA journal_mode").fetchall()
        assert [(2,)] == connection.execute("PRAGMA synchronous").fetchall()

    run_on_store(tmp_path / "tasks.db", main)


def test_several_stores_create_one_file(tmp_path: Path) -> None:
    """Stores that open a missing file at the same time share the created file."""

    async def main() -> None:
        stores = [SqliteTaskStore(tmp_path / "tasks.db", clock=ManualClock()) for _ in range(5)]
        await asyncio.gather(*(store.open() for store in stores))
        try:
            for number, store in enumerate(stores):
                await store.add([NewTask(task(number))])
            counts = [(await store.counters()).task_counts[Status.PENDING] for store in stores]
            assert [5] * 5 == counts
        finally:
            for store in stores:
                await store.close()

    asyncio.run(main())


def test_a_closed_store_raises(tmp_path: Path) -> None:
    """Before `open` and after `close`, an operation raises an error that names `open`."""

    async def main() -> None:
        store = SqliteTaskStore(tmp_path / "tasks.db")
        with pytest.raises(StoreUnavailable, match=r"call open\(\) first"):
            await store.ping()
        await store.open()
        await store.close()
        with pytest.raises(StoreUnavailable, match=r"call open\(\) first"):
            await store.get_task("acme", task_id(1))

    asyncio.run(main())


def test_the_database_works_without_threads() -> None:
    """The synchronous database runs operations and queries, also in memory."""
    database = SqliteDatabase(":memory:", lambda: START_MS)

    [(added, error)] = database.apply([lambda tx: add.add(tx, [NewTask(task(1))], None, None)])

    assert ([(START_MS, START_MS, START_MS, False)], None) == (added, error)
    [(found, error)] = database.read([lambda tx: tx.execute("SELECT key FROM task").fetchall()])
    assert ([("key 1",)], None) == (found, error)
    database.close()
