"""Batches: written with few statements, and each of their parts as if it had come alone."""

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


class File:
    """A file, and operations on it that must succeed."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path, ManualClock())

    def run(self, *operations: Callable[[Transaction], Any]) -> list[Any]:
        """Run operations in one transaction."""
        answers = self.database.apply(operations)
        for _, error in answers:
            if error is not None:
                raise error
        return [value for value, _ in answers]

    def add(self, news: list[NewTask], quota: int | None = None) -> list[AddResult]:
        """Add a batch."""
        [answers] = self.run(lambda tx: add.add(tx, news, LEASE, quota))
        return add.to_add_results(news, LEASE, answers)

    def add_singly(self, news: list[NewTask], quota: int | None = None) -> list[AddResult]:
        """Add tasks as so many batches."""
        return [added for new in news for added in self.add([new], quota)]

    def finish(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish a batch."""
        ends = [finish.pack_result(result) for result in results]
        [finished] = self.run(lambda tx: finish.finish(tx, ends))
        return list(finished)

    def finish_singly(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish attempts as so many batches."""
        return [finished for result in results for finished in self.finish([result])]

    def cancel(self, tasks: list[Task]) -> None:
        """Cancel tasks."""
        self.run(lambda tx: [transitions.cancel(tx, one.tenant, one.id) for one in tasks])

    def rows(self) -> dict[str, list[Any]]:
        """Everything that is kept about tasks."""
        connection, _ = self.database.open()
        read = "SELECT * FROM {}".format
        return {name: connection.execute(read(name)).fetchall() for name in TABLES}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[File]]:
    """Two empty files."""
    made = [File(tmp_path / "whole.db"), File(tmp_path / "singly.db")]
    yield made
    for file in made:
        file.database.close()


@pytest.fixture
def file(files: list[File]) -> File:
    """One empty file."""
    return files[0]


def news(size: int) -> list[NewTask]:
    """A batch of which a third is new, in several lanes, and the rest is there or comes twice."""
    batch = [
        NewTask(task(n, f"h{n % 5}", f"t{n % 2}"), delay=n * 100 or None, direct=n % 2 == 0)
        for n in range(size)
    ]
    for n in range(0, size, 7):
        batch[n] = NewTask(task(1000 + n, f"h{n % 5}", f"t{n % 2}", key=f"key {n // 2}"))
    for n in range(3, size, 11):
        batch[n] = batch[n - 1]
    return batch


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quota", [None, 1000, 40])
def test_a_batch_is_added_as_its_tasks_one_by_one(
    files: list[File], size: int, quota: int | None
) -> None:
    """New keys, known keys, conflicts and what a quota refuses, wherever in a batch they stand."""
    batch = news(size)
    for file in files:
        file.add_singly(batch[2::3])
    whole, singly = files

    answers = whole.add(batch, quota)

    assert singly.add_singly(batch, quota) == answers
    assert singly.rows() == whole.rows()
    if size > 100:
        found = {AddStatus.ADDED, AddStatus.EXISTING, AddStatus.CONFLICT}
        if quota == 40:
            found.add(AddStatus.FULL)
        assert found == {answer.status for answer in answers}


def results(held: list[Task]) -> list[TaskResult]:
    """An end of every kind for leased tasks."""
    ends: list[Callable[[Task], TaskResult]] = [
        success_result,
        dead_result,
        lambda held: retry_result(held, START_MS + HOUR_MS),
        lambda held: retry_result(held, START_MS + 5, keep=LEASE, previous_delay=0.5, restarted=1),
        lambda held: success_result(replace(held, version=held.version + 1)),
        lambda held: success_result(held, callback=task(int(held.id[-12:], 16) + 5000)),
        lambda held: replace(retry_result(held, START_MS + HOUR_MS), attempt=None),
    ]
    return [ends[n % len(ends)](task) for n, task in enumerate(held)]


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_is_finished_as_its_attempts_one_by_one(files: list[File], size: int) -> None:
    """Every kind of end, of tasks that are held, lost, gone or cancelled, wherever it stands."""
    batch = [NewTask(task(n, f"h{n % 5}"), direct=True) for n in range(size)]
    ends: list[TaskResult] = []
    for file in files:
        ends = results([added.task for added in file.add(batch)])
        file.cancel([one.task for one in batch[3::4]])
    for n in range(5, size, 9):
        ends[n].task.id = "none" if n % 2 else task_id(9000 + n)
    whole, singly = files

    answers = whole.finish(ends)

    assert singly.finish_singly(ends) == answers
    assert singly.rows() == whole.rows()
    if size > 60:
        assert set(FinishStatus) == set(answers)


def test_one_task_twice_in_a_batch_of_ends(file: File) -> None:
    """The second sees what the first did: it is superseded, or goes on from the next version."""
    first, second = (
        added.task for added in file.add([NewTask(task(n), direct=True) for n in (1, 2)])
    )

    answers = file.finish(
        [
            success_result(first),
            retry_result(second, START_MS, keep=LEASE),
            dead_result(first),
            success_result(replace(second, version=second.version + 1)),
        ]
    )

    done, late = FinishStatus.DONE, FinishStatus.SUPERSEDED
    assert [done, done, late, done] == answers


def test_an_id_that_comes_with_two_keys_in_a_batch(file: File) -> None:
    """It is refused, and nothing of the batch is kept."""
    with pytest.raises(ConfigurationError, match="id must be a new one"):
        file.add([NewTask(task(1)), NewTask(task(2)), NewTask(task(1, key="other"))])

    assert [] == file.rows()["task"]


def test_ends_find_their_tasks_in_whatever_order_the_rows_come(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite promises no order of the rows that it gathers into one."""
    held = [added.task for added in file.add([NewTask(task(n), direct=True) for n in range(70)])]
    late = replace(held[0], version=held[0].version + 1)
    decode = finish._decode_states
    monkeypatch.setattr(finish, "_decode_states", lambda text: decode(text)[::-1])

    ends = [
        dead_result(one) if n % 2 else success_result(one)
        for n, one in enumerate([late, *held[1:]])
    ]
    answers = file.finish(ends)

    assert [FinishStatus.SUPERSEDED] + [FinishStatus.DONE] * 69 == answers
    statement = "SELECT t.key, s.status FROM task AS t JOIN state AS s USING (seq)"
    found = dict(file.database.open()[0].execute(statement).fetchall())
    ended = {True: int(Status.EXHAUSTED), False: int(Status.SUCCEEDED)}
    expected = {f"key {n}": ended[n % 2 == 1] for n in range(1, 70)}
    assert {"key 0": int(Status.IN_FLIGHT), **expected} == found


def test_many_lanes_take_no_more_statements_than_one(files: list[File]) -> None:
    """The lanes of a group are read together and written together."""
    said: list[list[str]] = []
    for file, lanes in zip(files, (1, 48), strict=True):
        file.add([NewTask(task(1000 + n, f"h{n}")) for n in range(lanes)])
        said.append([])
        file.database.open()[0].set_trace_callback(said[-1].append)
        batch = [NewTask(task(n, f"h{n % lanes}"), direct=True) for n in range(48)]
        file.finish([retry_result(added.task, START_MS + HOUR_MS) for added in file.add(batch)])

    assert len(said[0]) == len(said[1])
