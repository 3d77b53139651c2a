"""Results of attempts: conformance, and batches of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tarry.service.model import Status, Task
from tarry.service.store import FinishStatus, NewTask, TaskResult
from tarry.service.stores.sqlite import finish
from tests.service.stores.conformance import finish as finish_cases
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    START_MS,
    exhausted_result,
    retry_result,
    success_result,
    task,
    task_id,
)
from tests.service.stores.sqlite.harness import BATCH_SIZES, DatabaseFile, cases_of, run_case


@pytest.mark.parametrize("case", cases_of(finish_cases), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)


def results_of_every_status(leased: list[Task]) -> list[TaskResult]:
    """Return results of every status for leased tasks."""
    builders: list[Callable[[Task], TaskResult]] = [
        success_result,
        exhausted_result,
        lambda leased: retry_result(leased, START_MS + HOUR_MS),
        lambda leased: retry_result(
            leased, START_MS + 5, renewed_lease=LEASE, previous_delay=0.5, backoff_offset=1
        ),
        lambda leased: success_result(replace(leased, version=leased.version + 1)),
        lambda leased: success_result(leased, callback_task=task(int(leased.id[-12:], 16) + 5000)),
        lambda leased: replace(retry_result(leased, START_MS + HOUR_MS), attempt=None),
    ]
    return [builders[n % len(builders)](task) for n, task in enumerate(leased)]


@pytest.mark.parametrize("size", BATCH_SIZES)
def test_finishing_a_batch_equals_finishing_one_by_one(
    two_database_files: list[DatabaseFile], size: int
) -> None:
    """A batch of results has the same effect as its results one by one."""
    batch = [NewTask(task(n, f"h{n % 5}"), lease_on_add=True) for n in range(size)]
    task_results: list[TaskResult] = []
    for database_file in two_database_files:
        task_results = results_of_every_status([added.task for added in database_file.add(batch)])
        database_file.cancel([new_task.task for new_task in batch[3::4]])
    for n in range(5, size, 9):
        task_results[n].task.id = "none" if n % 2 else task_id(9000 + n)
    batch_file, single_file = two_database_files

    statuses = batch_file.finish(task_results)

    assert single_file.finish_one_by_one(task_results) == statuses
    assert single_file.rows() == batch_file.rows()
    if size > 60:
        assert set(FinishStatus) == set(statuses)


def test_a_batch_may_have_two_results_of_one_task(database_file: DatabaseFile) -> None:
    """The second result of a task is checked against the version that the first has set."""
    first, second = (
        added.task
        for added in database_file.add([NewTask(task(n), lease_on_add=True) for n in (1, 2)])
    )

    statuses = database_file.finish(
        [
            success_result(first),
            retry_result(second, START_MS, renewed_lease=LEASE),
            exhausted_result(first),
            success_result(replace(second, version=second.version + 1)),
        ]
    )

    applied, superseded = FinishStatus.APPLIED, FinishStatus.SUPERSEDED
    assert [applied, applied, superseded, applied] == statuses


def test_results_match_states_in_any_row_order(
    database_file: DatabaseFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are applied to the right tasks in any row order of `json_group_array`."""
    leased = [
        added.task
        for added in database_file.add([NewTask(task(n), lease_on_add=True) for n in range(70)])
    ]
    outdated = replace(leased[0], version=leased[0].version + 1)
    decode = finish._decode_states
    monkeypatch.setattr(finish, "_decode_states", lambda text: decode(text)[::-1])

    task_results = [
        exhausted_result(leased_task) if n % 2 else success_result(leased_task)
        for n, leased_task in enumerate([outdated, *leased[1:]])
    ]
    statuses = database_file.finish(task_results)

    assert [FinishStatus.SUPERSEDED] + [FinishStatus.APPLIED] * 69 == statuses
    statement = "SELECT t.key, s.status FROM task AS t JOIN state AS s USING (seq)"
    found = dict(database_file.database.open()[0].execute(statement).fetchall())
    expected = {
        f"key {n}": int(Status.EXHAUSTED if n % 2 else Status.SUCCEEDED) for n in range(1, 70)
    }
    assert {"key 0": int(Status.IN_FLIGHT), **expected} == found
