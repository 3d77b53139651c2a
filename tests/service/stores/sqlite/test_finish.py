"""Results of attempts: a batch has the same effect as single results."""

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
from tests.service.stores.sqlite.harness import SIZES, DatabaseFile, cases_of, run_case


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
            retry_result(second, START_MS, renewed_lease=LEASE),
            exhausted_result(first),
            success_result(replace(second, version=second.version + 1)),
        ]
    )

    done, late = FinishStatus.APPLIED, FinishStatus.SUPERSEDED
    assert [done, done, late, done] == results


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
        exhausted_result(one) if n % 2 else success_result(one)
        for n, one in enumerate([late, *leased[1:]])
    ]
    results = one_file.finish(ends)

    assert [FinishStatus.SUPERSEDED] + [FinishStatus.APPLIED] * 69 == results
    statement = "SELECT t.key, s.status FROM task AS t JOIN state AS s USING (seq)"
    found = dict(one_file.database.open()[0].execute(statement).fetchall())
    ended = {True: int(Status.EXHAUSTED), False: int(Status.SUCCEEDED)}
    expected = {f"key {n}": ended[n % 2 == 1] for n in range(1, 70)}
    assert {"key 0": int(Status.IN_FLIGHT), **expected} == found
