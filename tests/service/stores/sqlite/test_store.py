"""`SqliteStore`: conformance, durability, and several stores on one file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.runtime.clocks import system
from tarry.service.model import ReplayRecord, Status
from tarry.service.store import AddStatus, FinishStatus, NewTask, TaskFilter
from tarry.service.stores.sqlite import Database, SqliteStore, add
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import (
    LANE,
    LEASE,
    OTHER_LEASE,
    START_MS,
    ManualClock,
    dead_result,
    success_result,
    task,
    task_id,
    task_numbers,
)
from tests.service.stores.synchronous_store import SynchronousSqliteStore

T = TypeVar("T")


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes the conformance suite."""
    asyncio.run(
        StoreHarness(lambda clock: SqliteStore(tmp_path / "tasks.db", clock=clock)).run(case)
    )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_without_threads(case: Case, tmp_path: Path) -> None:
    """The synchronous database passes the conformance suite."""
    asyncio.run(
        StoreHarness(lambda clock: SynchronousSqliteStore(tmp_path / "tasks.db", clock)).run(case)
    )


def run_on_store(path: Path, main: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store."""

    async def run() -> None:
        store = SqliteStore(path, clock=ManualClock())
        await store.open()
        try:
            await main(store)
        finally:
            await store.close()

    asyncio.run(run())


def test_an_existing_or_malformed_id_is_refused(tmp_path: Path) -> None:
    """The error names the field `id`."""

    async def main(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])
        for wrong in (task(1, key="other"), task(1, tenant="beta")):
            with pytest.raises(ConfigurationError, match="id must be new"):
                await store.add([NewTask(wrong)])
        wrong = task(2)
        wrong.id = task_id(2).upper()
        wrong.id = wrong.id.replace("-", "")
        with pytest.raises(ConfigurationError, match="id must be a UUID"):
            await store.add([NewTask(wrong)])
        assert 1 == (await store.counters()).tasks[Status.PENDING]

    run_on_store(tmp_path / "tasks.db", main)


def test_two_stores_share_a_file(tmp_path: Path) -> None:
    """Each store sees the other's changes, and no task is leased twice."""

    async def main(one: SqliteStore) -> None:
        two = SqliteStore(tmp_path / "tasks.db", clock=ManualClock())
        await two.open()
        try:
            await asyncio.gather(
                *(
                    store.add([NewTask(task(number, f"h{number % 7}"))])
                    for number, store in enumerate([one, two] * 100)
                )
            )
            claims = await asyncio.gather(
                *(
                    store.claim(lease, limit=10, per_lane=5)
                    for _ in range(10)
                    for store, lease in ((one, LEASE), (two, OTHER_LEASE))
                )
            )
            leased = [task for claimed in claims for task in claimed.tasks]

            assert list(range(200)) == sorted(task_numbers(leased))
            assert {"worker", "other"} == {task.worker for task in leased}
            assert [FinishStatus.DONE] * 200 == await two.finish(
                [success_result(one) for one in leased]
            )
            assert 200 == (await one.counters()).tasks[Status.SUCCEEDED]
            [again] = await two.add([NewTask(task(7, "h0"))])
            assert (AddStatus.EXISTING, Status.SUCCEEDED) == (again.status, again.task.status)
        finally:
            await two.close()

    run_on_store(tmp_path / "tasks.db", main)


def test_pages_of_a_selective_filter_are_short(tmp_path: Path) -> None:
    """A page reads a bounded number of rows, and its cursor continues after them."""

    async def main(store: SqliteStore) -> None:
        await store.add([NewTask(task(0, "rare"))])
        await store.add([NewTask(task(number)) for number in range(1, 4001)])
        query = TaskFilter(lane="acme/https:rare.example:443")

        pages = [await store.list_tasks("acme", query, limit=10)]
        while pages[-1].cursor is not None:
            pages.append(await store.list_tasks("acme", query, cursor=pages[-1].cursor, limit=10))

        assert [[], [], [0]] == [task_numbers(page.items) for page in pages]

    run_on_store(tmp_path / "tasks.db", main)


def test_many_dead_letters_are_read_in_steps(tmp_path: Path) -> None:
    """All of them are counted, and a filter finds the only match."""

    async def main(store: SqliteStore) -> None:
        new = [NewTask(task(number), lease_on_add=True) for number in range(4100)]
        leased = [added.task for added in await store.add(new, LEASE)]
        await store.finish(
            [dead_result(one, "rare" if one is leased[4000] else "usual") for one in leased]
        )

        assert 4100 == await store.count_dead(ReplayRecord(id="", tenant="acme"))
        assert 1 == await store.count_dead(ReplayRecord(id="", tenant="acme", reason="rare"))
        created = await store.start_replay(ReplayRecord(id="job", tenant="acme", reason="rare"))
        steps = 1
        while (current := await store.replay_step("job", 10)) and current.status == "running":
            steps += 1
        assert (1, 1, 3) == (created.matched, current and current.replayed, steps)
        assert 1 == await store.purge("acme", TaskFilter(reason="usual"), 1)
        assert 0 == await store.purge("acme", TaskFilter(reason="rare"), 1)

    run_on_store(tmp_path / "tasks.db", main)


def test_a_parked_lane_is_not_claimed_ahead_of_time(tmp_path: Path) -> None:
    """A task due after the parking but within the horizon waits until the parking ends."""
    clock = ManualClock()

    async def main() -> None:
        store = SqliteStore(tmp_path / "tasks.db", clock=clock)
        await store.open()
        try:
            await store.add([NewTask(task(1), delay_ms=800)])
            await store.park(LANE, START_MS + 500, probes=1, opened=1)
            for _ in range(2):
                early = await store.claim(LEASE, limit=10, per_lane=10)
                assert ([], START_MS + 500) == (early.tasks, early.next_at)
            clock.advance(500)
            claimed = await store.claim(LEASE, limit=10, per_lane=10)
            assert ([1], {LANE: 1}) == (task_numbers(claimed.tasks), claimed.probing)
        finally:
            await store.close()

    asyncio.run(main())


def test_default_clock_is_the_system_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock argument the store's time is the Unix time in milliseconds."""
    monkeypatch.setattr(system, "unix_time", lambda: 12.3456)

    async def main() -> int:
        store = SqliteStore(str(tmp_path / "tasks.db"))
        await store.open()
        try:
            return await store.ping()
        finally:
            await store.close()

    assert 12_345 == asyncio.run(main())


def test_a_commit_is_on_the_disk(tmp_path: Path) -> None:
    """The database uses a WAL that is flushed with every commit."""

    async def main(store: SqliteStore) -> None:
        connection, _ = store.database.open()
        assert [("wal",)] == connection.execute("PRAGMA journal_mode").fetchall()
        assert [(2,)] == connection.execute("PRAGMA synchronous").fetchall()

    run_on_store(tmp_path / "tasks.db", main)


def test_several_stores_create_one_file(tmp_path: Path) -> None:
    """Stores that open a missing file at the same time end up with the same file."""

    async def main() -> None:
        stores = [SqliteStore(tmp_path / "tasks.db", clock=ManualClock()) for _ in range(5)]
        await asyncio.gather(*(store.open() for store in stores))
        try:
            for number, store in enumerate(stores):
                await store.add([NewTask(task(number))])
            counts = [(await store.counters()).tasks[Status.PENDING] for store in stores]
            assert [5] * 5 == counts
        finally:
            for store in stores:
                await store.close()

    asyncio.run(main())


def test_a_closed_store_raises(tmp_path: Path) -> None:
    """Before `open` and after `close`, an operation raises an error that names `open`."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "tasks.db")
        with pytest.raises(StoreUnavailable, match=r"call open\(\) first"):
            await store.ping()
        await store.open()
        await store.close()
        with pytest.raises(StoreUnavailable, match=r"call open\(\) first"):
            await store.get_task("acme", task_id(1))

    asyncio.run(main())


def test_the_database_works_without_threads() -> None:
    """The synchronous database runs operations and queries, also in memory."""
    database = Database(":memory:", lambda: START_MS)

    [(added, error)] = database.apply([lambda tx: add.add(tx, [NewTask(task(1))], None, None)])

    assert ([(START_MS, START_MS, START_MS, False)], None) == (added, error)
    [(found, error)] = database.read([lambda tx: tx.execute("SELECT key FROM task").fetchall()])
    assert ([("key 1",)], None) == (found, error)
    database.close()
