"""Terminal tasks: conformance, and many dead letters."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tarry.service.model import ReplayRecord, Status
from tarry.service.rules import replays as rules
from tarry.service.store import NewTask, Retention, StoredTaskFilter, SweepResult
from tarry.service.stores.sqlite import add, finished_tasks, transitions
from tarry.service.stores.sqlite.queries import SELECT_TASK, decode_task
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tarry.wire.tasks import Search
from tests.service.stores.conformance import dead_letters, retention
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import (
    LEASE,
    START_MS,
    ManualClock,
    exhausted_result,
    step_replay,
    success_result,
    task,
    task_id,
    task_numbers,
)
from tests.service.stores.sqlite.harness import (
    DatabaseFile,
    cases_of,
    open_store,
    run_case,
)

PAGE_BYTES = 4096


@pytest.mark.parametrize("case", cases_of(dead_letters, retention), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)


async def test_many_dead_letters_are_read_in_steps(tmp_path: Path) -> None:
    """Of 4100 dead letters all are counted, and a filter finds the only match."""
    async with open_store(tmp_path / "tasks.db") as store:
        new_tasks = [NewTask(task(number), lease_on_add=True) for number in range(4100)]
        leased = [added.task for added in await store.add(new_tasks, LEASE)]
        await store.finish(
            [exhausted_result(task, "rare" if task is leased[4000] else "usual") for task in leased]
        )

        assert 4100 == await store.count_tasks("acme", StoredTaskFilter(status=Status.EXHAUSTED))
        assert 1 == await store.count_tasks("acme", StoredTaskFilter(reason="rare"))
        search = Search(status="EXHAUSTED", reason="rare")
        await store.start_replay(ReplayRecord(id="replay", tenant="acme", search=search))
        step_count = 1
        while (current := await step_replay(store, "replay", 10)) and current.status == "running":
            step_count += 1
        assert (1, 3) == (current and current.replayed, step_count)


async def test_finished_tasks_of_a_replay_are_counted_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads a limited number of tasks; tasks behind unfinished ones are counted, too."""
    monkeypatch.setattr(rules, "MAX_COUNTED_TASKS", 2)

    async with open_store(tmp_path / "tasks.db") as store:
        clock = store.database._clock
        assert isinstance(clock, ManualClock)
        new_tasks = [NewTask(task(number), lease_on_add=True) for number in range(5)]
        leased = [added.task for added in await store.add(new_tasks, LEASE)]
        await store.finish([exhausted_result(task) for task in leased])
        await store.start_replay(ReplayRecord(id="replay", tenant="acme"))
        await step_replay(store, "replay")
        replayed = (await store.claim(LEASE, limit=10, per_lane=10)).tasks
        await store.finish([success_result(task) for task in replayed[3:]])
        replay = await step_replay(store, "replay")
        assert replay is not None
        assert ({"SUCCEEDED": 1}, START_MS) == (replay.finished, replay.next_at)
        replay = await step_replay(store, "replay")
        assert replay is not None
        assert ({"SUCCEEDED": 2}, START_MS + 1000) == (replay.finished, replay.next_at)
        await store.finish([success_result(task) for task in replayed[:3]])
        clock.advance(1000)
        replay = await step_replay(store, "replay")
        assert replay is not None
        assert ("waiting", 1) == (replay.status, replay.unfinished)
        replay = await step_replay(store, "replay")
        assert replay is not None
        assert ("done", {"SUCCEEDED": 5}) == (replay.status, replay.finished)


# --- lanes that were removed ----------------------------------------------------------------------


def finish_task(file: DatabaseFile, number: int, host: str) -> None:
    """Add and finish a task."""
    [added] = file.add([NewTask(task(number, host), lease_on_add=True)])
    file.finish([success_result(added.task)])


def list_lanes_of_tasks(file: DatabaseFile) -> list[tuple[int, str]]:
    """Return the number and the host of each task in the file."""
    connection, _ = file.database.open()
    rows = connection.execute(f"{SELECT_TASK} ORDER BY s.seq").fetchall()
    found = [decode_task(row) for row in rows]
    return [(task_numbers([task])[0], task.lane.partition(":")[2][0]) for task in found]


def test_another_process_detects_that_a_lane_was_removed(
    tmp_path: Path, database_file: DatabaseFile
) -> None:
    """A process that has used a lane does not use its id, which now belongs to another lane."""
    other_process = DatabaseFile(Path(database_file.database.path))
    finish_task(other_process, 1, "a")
    assert 1 == sweep(database_file).removed_task_count
    finish_task(database_file, 2, "b")

    finish_task(other_process, 3, "a")

    assert [(2, "b"), (3, "a")] == list_lanes_of_tasks(database_file)
    other_process.database.close()


def test_a_lane_can_be_removed_and_used_in_one_transaction(database_file: DatabaseFile) -> None:
    """The operations before and after the removal use the same name, but not the same id."""
    finish_task(database_file, 1, "a")
    add_task = partial(add.add, terms=None, quota=None)

    database_file.run(
        partial(add_task, tasks=[NewTask(task(2, "b"))]),
        partial(transitions.cancel, tenant="acme", task_id=task_id(2)),
        partial(finished_tasks.sweep, retention=Retention(0, 0), limit=500),
        partial(add_task, tasks=[NewTask(task(3, "b")), NewTask(task(4, "a"))]),
    )

    assert [(3, "b"), (4, "a")] == list_lanes_of_tasks(database_file)


def test_a_failed_removal_changes_nothing(database_file: DatabaseFile) -> None:
    """The lane of a transaction that was rolled back is used again."""
    finish_task(database_file, 1, "a")

    def sweep_and_fail(tx: WriteTransaction) -> None:
        finished_tasks.sweep(tx, Retention(0, 0), 500)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        database_file.run(sweep_and_fail)
    finish_task(database_file, 2, "a")

    assert [(1, "a"), (2, "a")] == list_lanes_of_tasks(database_file)


# --- the size of the file -------------------------------------------------------------------------


def add_finished_tasks(file: DatabaseFile, count: int) -> None:
    """Add tasks whose rows take one page each, and finish them."""
    batch = [
        NewTask(task(number, packed_content=bytes(3000)), lease_on_add=True)
        for number in range(count)
    ]
    file.finish([success_result(added.task) for added in file.add(batch)])


def sweep(file: DatabaseFile, retention_ms: int = 0) -> SweepResult:
    """Delete up to 500 finished tasks that are older than `retention_ms`."""
    retention = Retention(retention_ms, retention_ms)
    [result] = file.run(partial(finished_tasks.sweep, retention=retention, limit=500))
    assert isinstance(result, SweepResult)
    return result


def count_pages(file: DatabaseFile) -> tuple[int, int]:
    """Return the number of pages of the file, and how many of them are free."""
    connection, _ = file.database.open()
    [(page_count,)] = connection.execute("PRAGMA page_count").fetchall()
    [(free_count,)] = connection.execute("PRAGMA freelist_count").fetchall()
    return page_count, free_count


def test_the_file_shrinks_after_retention(database_file: DatabaseFile) -> None:
    """Sweeps release free pages in small steps; then a checkpoint shrinks the file."""
    add_finished_tasks(database_file, 3000)
    free_counts = [0]
    removed_count, has_more = 0, True
    while has_more:
        result = sweep(database_file)
        removed_count, has_more = removed_count + result.removed_task_count, result.has_more
        free_counts.append(count_pages(database_file)[1])
    page_count, free_count = count_pages(database_file)

    assert 3000 == removed_count
    assert free_count == finished_tasks.MIN_FREE_PAGES
    assert page_count < free_count + 200
    assert 64 == max(before - after for before, after in pairwise(free_counts))
    connection, _ = database_file.database.open()
    connection.execute("PRAGMA wal_checkpoint").fetchall()
    assert page_count * PAGE_BYTES == Path(database_file.database.path).stat().st_size
    assert [("ok",)] == connection.execute("PRAGMA integrity_check").fetchall()


def test_a_file_with_few_free_pages_keeps_them(
    database_file: DatabaseFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a quarter of the file stays free for new tasks."""
    monkeypatch.setattr(finished_tasks, "MIN_FREE_PAGES", 0)
    add_finished_tasks(database_file, 100)
    database_file.run(lambda tx: tx.execute("CREATE TABLE ballast (content BLOB)"))
    database_file.run(
        lambda tx: tx.execute("INSERT INTO ballast VALUES (zeroblob(400 * 4096))").fetchall()
    )
    page_count, _ = count_pages(database_file)

    result = sweep(database_file)

    assert (100, False) == (result.removed_task_count, result.has_more)
    assert page_count == count_pages(database_file)[0]
    assert 90 < count_pages(database_file)[1] < page_count // 4


def test_a_file_without_incremental_vacuum_does_not_shrink(tmp_path: Path) -> None:
    """A sweep of such a file reports no more work; after `VACUUM`, sweeps shrink the file."""
    path = tmp_path / "tasks.db"
    with closing(sqlite3.connect(path)) as connection:  # as created by earlier versions
        connection.execute("PRAGMA journal_mode = WAL")
    file = DatabaseFile(path)
    add_finished_tasks(file, 2000)
    for _ in range(4):
        sweep(file)
    page_count, free_count = count_pages(file)

    assert free_count > finished_tasks.MIN_FREE_PAGES
    assert not sweep(file).has_more
    assert (page_count, free_count) == count_pages(file)
    file.database.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")
    assert 0 == count_pages(file)[1]
    add_finished_tasks(file, 2000)
    for _ in range(100):
        if not sweep(file).has_more:
            break
    assert finished_tasks.MIN_FREE_PAGES == count_pages(file)[1]
    file.database.close()
