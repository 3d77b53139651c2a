"""Batches are written with few statements, with the same effect as single operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tarry.errors import ConfigurationError
from tarry.service.model import Status, Task
from tarry.service.store import AddResult, AddStatus, FinishStatus, NewTask, TaskResult
from tarry.service.stores.sqlite import Database, add, finish, transitions
from tarry.service.stores.sqlite.transaction import Transaction
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    START_MS,
    ManualClock,
    dead_result,
    retry_result,
    success_result,
    task,
    task_id,
)

TABLES = ("task", "state", "attempt", "tenant", "lane", "policy_use", "worker", "series")
SIZES = (1, 2, 3, 63, 64, 65, 127, 200)


class DatabaseFile:
    """A database file, and operations on it that must succeed."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path, ManualClock())

    def run(self, *operations: Callable[[Transaction], Any]) -> list[Any]:
        """Run operations in one transaction."""
        results = self.database.apply(operations)
        for _, error in results:
            if error is not None:
                raise error
        return [value for value, _ in results]

    def add(self, batch: list[NewTask], quota: int | None = None) -> list[AddResult]:
        """Add a batch."""
        [results] = self.run(lambda tx: add.add(tx, batch, LEASE, quota))
        return add.to_add_results(batch, LEASE, results)

    def add_singly(self, batch: list[NewTask], quota: int | None = None) -> list[AddResult]:
        """Add tasks one by one."""
        return [added for new in batch for added in self.add([new], quota)]

    def finish(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish a batch."""
        packed = [finish.pack_result(result) for result in results]
        [finished] = self.run(lambda tx: finish.finish(tx, packed))
        return list(finished)

    def finish_singly(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish attempts one by one."""
        return [finished for result in results for finished in self.finish([result])]

    def cancel(self, tasks: list[Task]) -> None:
        """Cancel tasks."""
        self.run(lambda tx: [transitions.cancel(tx, one.tenant, one.id) for one in tasks])

    def rows(self) -> dict[str, list[Any]]:
        """Return all rows of the tables that concern tasks."""
        connection, _ = self.database.open()
        read = "SELECT * FROM {}".format
        return {name: connection.execute(read(name)).fetchall() for name in TABLES}


@pytest.fixture
def two_files(tmp_path: Path) -> Iterator[list[DatabaseFile]]:
    """Yield two empty database files."""
    files = [DatabaseFile(tmp_path / "whole.db"), DatabaseFile(tmp_path / "singly.db")]
    yield files
    for file in files:
        file.database.close()


@pytest.fixture
def one_file(two_files: list[DatabaseFile]) -> DatabaseFile:
    """Yield one empty database file."""
    return two_files[0]


def mixed_batch(size: int) -> list[NewTask]:
    """Return a batch of new, existing and repeated keys in several lanes."""
    batch = [
        NewTask(
            task(n, f"h{n % 5}", f"t{n % 2}"), delay_ms=n * 100 or None, lease_on_add=n % 2 == 0
        )
        for n in range(size)
    ]
    for n in range(0, size, 7):
        batch[n] = NewTask(task(1000 + n, f"h{n % 5}", f"t{n % 2}", key=f"key {n // 2}"))
    for n in range(3, size, 11):
        batch[n] = batch[n - 1]
    return batch


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quota", [None, 1000, 40])
def test_adding_a_batch_equals_adding_its_tasks_singly(
    two_files: list[DatabaseFile], size: int, quota: int | None
) -> None:
    """New keys, existing keys, conflicts and refusals by quota may be mixed in any order."""
    batch = mixed_batch(size)
    for file in two_files:
        file.add_singly(batch[2::3])
    whole, singly = two_files

    results = whole.add(batch, quota)

    assert singly.add_singly(batch, quota) == results
    assert singly.rows() == whole.rows()
    if size > 100:
        found = {AddStatus.ADDED, AddStatus.EXISTING, AddStatus.CONFLICT}
        if quota == 40:
            found.add(AddStatus.FULL)
        assert found == {result.status for result in results}


def results_of_every_status(leased: list[Task]) -> list[TaskResult]:
    """Return results of every status for leased tasks."""
    builders: list[Callable[[Task], TaskResult]] = [
        success_result,
        dead_result,
        lambda leased: retry_result(leased, START_MS + HOUR_MS),
        lambda leased: retry_result(
            leased, START_MS + 5, keep=LEASE, previous_delay=0.5, restarted=1
        ),
        lambda leased: success_result(replace(leased, version=leased.version + 1)),
        lambda leased: success_result(leased, callback=task(int(leased.id[-12:], 16) + 5000)),
        lambda leased: replace(retry_result(leased, START_MS + HOUR_MS), attempt=None),
    ]
    return [builders[n % len(builders)](task) for n, task in enumerate(leased)]


@pytest.mark.parametrize("size", SIZES)
def test_finishing_a_batch_equals_finishing_singly(
    two_files: list[DatabaseFile], size: int
) -> None:
    """Results may be for leased, lost, deleted or cancelled tasks, in any order."""
    batch = [NewTask(task(n, f"h{n % 5}"), lease_on_add=True) for n in range(size)]
    ends: list[TaskResult] = []
    for one_file in two_files:
        ends = results_of_every_status([added.task for added in one_file.add(batch)])
        one_file.cancel([one.task for one in batch[3::4]])
    for n in range(5, size, 9):
        ends[n].task.id = "none" if n % 2 else task_id(9000 + n)
    whole, singly = two_files

    results = whole.finish(ends)

    assert singly.finish_singly(ends) == results
    assert singly.rows() == whole.rows()
    if size > 60:
        assert set(FinishStatus) == set(results)


def test_two_results_of_one_task_in_a_batch(one_file: DatabaseFile) -> None:
    """The second result sees the version that the first has set."""
    first, second = (
        added.task for added in one_file.add([NewTask(task(n), lease_on_add=True) for n in (1, 2)])
    )

    results = one_file.finish(
        [
            success_result(first),
            retry_result(second, START_MS, keep=LEASE),
            dead_result(first),
            success_result(replace(second, version=second.version + 1)),
        ]
    )

    done, late = FinishStatus.DONE, FinishStatus.SUPERSEDED
    assert [done, done, late, done] == results


def test_one_id_with_two_keys_in_a_batch(one_file: DatabaseFile) -> None:
    """The batch is refused, and nothing of it is stored."""
    with pytest.raises(ConfigurationError, match="id must be new"):
        one_file.add([NewTask(task(1)), NewTask(task(2)), NewTask(task(1, key="other"))])

    assert [] == one_file.rows()["task"]


def test_results_match_states_in_any_row_order(
    one_file: DatabaseFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not define the order of rows in json_group_array."""
    leased = [
        added.task
        for added in one_file.add([NewTask(task(n), lease_on_add=True) for n in range(70)])
    ]
    late = replace(leased[0], version=leased[0].version + 1)
    decode = finish._decode_states
    monkeypatch.setattr(finish, "_decode_states", lambda text: decode(text)[::-1])

    ends = [
        dead_result(one) if n % 2 else success_result(one)
        for n, one in enumerate([late, *leased[1:]])
    ]
    results = one_file.finish(ends)

    assert [FinishStatus.SUPERSEDED] + [FinishStatus.DONE] * 69 == results
    statement = "SELECT t.key, s.status FROM task AS t JOIN state AS s USING (seq)"
    found = dict(one_file.database.open()[0].execute(statement).fetchall())
    ended = {True: int(Status.EXHAUSTED), False: int(Status.SUCCEEDED)}
    expected = {f"key {n}": ended[n % 2 == 1] for n in range(1, 70)}
    assert {"key 0": int(Status.IN_FLIGHT), **expected} == found


def test_the_number_of_statements_does_not_grow_with_lanes(two_files: list[DatabaseFile]) -> None:
    """All lanes of a group are read and written with one statement each."""
    statements: list[list[str]] = []
    for one_file, lanes in zip(two_files, (1, 48), strict=True):
        one_file.add([NewTask(task(1000 + n, f"h{n}")) for n in range(lanes)])
        statements.append([])
        one_file.database.open()[0].set_trace_callback(statements[-1].append)
        batch = [NewTask(task(n, f"h{n % lanes}"), lease_on_add=True) for n in range(48)]
        one_file.finish(
            [retry_result(added.task, START_MS + HOUR_MS) for added in one_file.add(batch)]
        )

    assert len(statements[0]) == len(statements[1])
