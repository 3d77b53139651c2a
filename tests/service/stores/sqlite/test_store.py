"""The store in a SQLite file: the conformance cases, group commits, and several on one file."""

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
    """The store does what every store must do."""
    asyncio.run(
        StoreHarness(lambda clock: SqliteStore(tmp_path / "tasks.db", clock=clock)).run(case)
    )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_without_threads(case: Case, tmp_path: Path) -> None:
    """The synchronous database alone does what every store must do."""
    asyncio.run(
        StoreHarness(lambda clock: SynchronousSqliteStore(tmp_path / "tasks.db", clock)).run(case)
    )


def on(path: Path, main: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a test on an open store."""

    async def run() -> None:
        store = SqliteStore(path, clock=ManualClock())
        await store.open()
        try:
            await main(store)
        finally:
            await store.close()

    asyncio.run(run())


def test_an_id_is_used_once(tmp_path: Path) -> None:
    """A new key with the id of another task, or with what is no id, is refused by its field."""

    async def main(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])
        for wrong in (task(1, key="other"), task(1, tenant="beta")):
            with pytest.raises(ConfigurationError, match="id must be a new one"):
                await store.add([NewTask(wrong)])
        wrong = task(2)
        wrong.id = task_id(2).upper()
        wrong.id = wrong.id.replace("-", "")
        with pytest.raises(ConfigurationError, match="id must be a UUID"):
            await store.add([NewTask(wrong)])
        assert 1 == (await store.counters()).tasks[Status.PENDING]

    on(tmp_path / "tasks.db", main)


def test_two_stores_share_a_file(tmp_path: Path) -> None:
    """Each sees what the other wrote, no task is leased twice, and leases hold between them."""

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
            held = [task for claimed in claims for task in claimed.tasks]

            assert list(range(200)) == sorted(task_numbers(held))
            assert {"worker", "other"} == {task.worker for task in held}
            assert [FinishStatus.DONE] * 200 == await two.finish(
                [success_result(one) for one in held]
            )
            assert 200 == (await one.counters()).tasks[Status.SUCCEEDED]
            [again] = await two.add([NewTask(task(7, "h0"))])
            assert (AddStatus.EXISTING, Status.SUCCEEDED) == (again.status, again.task.status)
        finally:
            await two.close()

    on(tmp_path / "tasks.db", main)


def test_a_filter_that_matches_rarely_has_short_pages(tmp_path: Path) -> None:
    """A page looks at a bounded number of rows, and its cursor goes on behind them."""

    async def main(store: SqliteStore) -> None:
        await store.add([NewTask(task(0, "rare"))])
        await store.add([NewTask(task(number)) for number in range(1, 4001)])
        query = TaskFilter(lane="acme/https:rare.example:443")

        pages = [await store.list_tasks("acme", query, limit=10)]
        while pages[-1].cursor is not None:
            pages.append(await store.list_tasks("acme", query, cursor=pages[-1].cursor, limit=10))

        assert [[], [], [0]] == [task_numbers(page.items) for page in pages]

    on(tmp_path / "tasks.db", main)


def test_many_letters_are_looked_at_in_steps(tmp_path: Path) -> None:
    """However many there are, all are counted, and a filter finds the one among them."""

    async def main(store: SqliteStore) -> None:
        new = [NewTask(task(number), direct=True) for number in range(4100)]
        held = [added.task for added in await store.add(new, LEASE)]
        await store.finish(
            [dead_result(one, "rare" if one is held[4000] else "usual") for one in held]
        )

        assert 4100 == await store.count_dead(ReplayRecord(id="", tenant="acme"))
        assert 1 == await store.count_dead(ReplayRecord(id="", tenant="acme", reason="rare"))
        made = await store.start_replay(ReplayRecord(id="job", tenant="acme", reason="rare"))
        steps = 1
        while (stands := await store.replay_step("job", 10)) and stands.status == "running":
            steps += 1
        assert (1, 1, 3) == (made.matched, stands and stands.replayed, steps)
        assert 1 == await store.purge("acme", TaskFilter(reason="usual"), 1)
        assert 0 == await store.purge("acme", TaskFilter(reason="rare"), 1)

    on(tmp_path / "tasks.db", main)


def test_a_lane_is_not_claimed_from_ahead_of_its_parking(tmp_path: Path) -> None:
    """A task that is due after the parking, but within the horizon, waits for the parking's end."""
    clock = ManualClock()

    async def main() -> None:
        store = SqliteStore(tmp_path / "tasks.db", clock=clock)
        await store.open()
        try:
            await store.add([NewTask(task(1), delay=800)])
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


def test_the_machine_has_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock of its own, the store counts the milliseconds of the machine."""
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
    """The file keeps a log that is flushed with every commit."""

    async def main(store: SqliteStore) -> None:
        connection, _ = store.database.open()
        assert [("wal",)] == connection.execute("PRAGMA journal_mode").fetchall()
        assert [(2,)] == connection.execute("PRAGMA synchronous").fetchall()

    on(tmp_path / "tasks.db", main)


def test_a_new_file_is_made_once(tmp_path: Path) -> None:
    """Several that open a file that is not there yet end with the same one."""

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


def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    """Before `open` and after `close` a call is told what is missing."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "tasks.db")
        with pytest.raises(StoreUnavailable, match=r"call open\(\) first"):
            await store.ping()
        await store.open()
        await store.close()
        with pytest.raises(StoreUnavailable, match=r"call open\(\) first"):
            await store.get_task("acme", task_id(1))

    asyncio.run(main())


def test_the_file_can_be_run_without_threads() -> None:
    """The synchronous database alone applies operations and answers questions, also in memory."""
    database = Database(":memory:", lambda: START_MS)

    [(added, error)] = database.apply([lambda tx: add.add(tx, [NewTask(task(1))], None, None)])

    assert ([(START_MS, START_MS, START_MS, False)], None) == (added, error)
    [(found, error)] = database.read([lambda tx: tx.execute("SELECT key FROM task").fetchall()])
    assert ([("key 1",)], None) == (found, error)
    database.close()
