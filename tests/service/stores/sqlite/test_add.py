"""Adding tasks: a batch has the same effect as single tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status
from tarry.service.store import AddStatus, NewTask
from tarry.service.stores.sqlite import SqliteStore
from tests.service.stores.conformance import add as add_cases
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import task, task_id
from tests.service.stores.sqlite.harness import (
    SIZES,
    DatabaseFile,
    cases_of,
    run_case,
    run_on_store,
)


@pytest.mark.parametrize("case", cases_of(add_cases), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)


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
            found.add(AddStatus.OVER_QUOTA)
        assert found == {result.status for result in results}


def test_one_id_with_two_keys_in_a_batch(one_file: DatabaseFile) -> None:
    """The batch is refused, and nothing of it is stored."""
    with pytest.raises(ConfigurationError, match="id must be new"):
        one_file.add([NewTask(task(1)), NewTask(task(2)), NewTask(task(1, key="other"))])

    assert [] == one_file.rows()["task"]


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
        assert 1 == (await store.counters()).task_counts[Status.PENDING]

    run_on_store(tmp_path / "tasks.db", main)
