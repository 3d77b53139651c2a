"""Adding tasks: conformance, batches, and invalid ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status
from tarry.service.store import AddStatus, NewTask
from tarry.service.stores.sqlite import add as add_module
from tests.service.stores.conformance import add as add_cases
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import task, task_id
from tests.service.stores.sqlite.harness import (
    BATCH_SIZES,
    DatabaseFile,
    cases_of,
    open_store,
    run_case,
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


@pytest.mark.parametrize("size", BATCH_SIZES)
@pytest.mark.parametrize(
    ("quota", "lane_quota"), [(None, None), (1000, 1000), (40, None), (None, 3)]
)
def test_adding_a_batch_equals_adding_its_tasks_one_by_one(
    two_database_files: list[DatabaseFile], size: int, quota: int | None, lane_quota: int | None
) -> None:
    """A batch with new and existing keys has the same effect as its tasks one by one."""
    batch = mixed_batch(size)
    for file in two_database_files:
        file.add_one_by_one(batch[2::3] if lane_quota is None else batch[2::30])
    batch_file, one_by_one_file = two_database_files

    results = batch_file.add(batch, quota, lane_quota)

    assert one_by_one_file.add_one_by_one(batch, quota, lane_quota) == results
    assert one_by_one_file.rows() == batch_file.rows()
    if size > 100:
        expected = {AddStatus.ADDED, AddStatus.EXISTING, AddStatus.CONFLICT}
        if quota == 40:
            expected.add(AddStatus.OVER_QUOTA)
        if lane_quota == 3:
            expected.add(AddStatus.TOO_MANY_LANES)
        assert expected == {result.status for result in results}


def test_a_batch_with_a_repeated_id_is_rejected(database_file: DatabaseFile) -> None:
    """A batch with two tasks that have one id and different keys is rejected as a whole."""
    with pytest.raises(ConfigurationError, match="id must be new"):
        database_file.add([NewTask(task(1)), NewTask(task(2)), NewTask(task(1, key="other"))])

    assert [] == database_file.rows()["task"]


async def test_an_existing_or_malformed_id_is_rejected(tmp_path: Path) -> None:
    """The error for an existing or malformed id names the field `id`."""
    async with open_store(tmp_path / "tasks.db") as store:
        await store.add([NewTask(task(1))])
        for existing in (task(1, key="other"), task(1, tenant="beta")):
            with pytest.raises(ConfigurationError, match="id must be new"):
                await store.add([NewTask(existing)])
        malformed = task(2)
        malformed.id = task_id(2).upper().replace("-", "")
        with pytest.raises(ConfigurationError, match="id must be a UUID"):
            await store.add([NewTask(malformed)])
        assert 1 == (await store.counters()).task_counts[Status.PENDING]


def test_a_tenant_at_its_quota_does_not_split_the_tasks_of_others(
    two_database_files: list[DatabaseFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the tasks of the tenant that would exceed its quota are added one by one."""
    batch = [NewTask(task(n, "h", "full" if n == 10 else "acme")) for n in range(30)]
    file = two_database_files[0]
    file.add([NewTask(task(100 + n, "h", "full")) for n in range(30)], None, None)
    sizes: list[int] = []
    add_without_quota = add_module.add_without_quota

    def record_size(tx: Any, tasks: Any, terms: Any) -> Any:
        sizes.append(len(tasks))
        return add_without_quota(tx, tasks, terms)

    monkeypatch.setattr(add_module, "add_without_quota", record_size)
    statuses = [result.status for result in file.add(batch, 30, None)]

    assert [10] == [n for n, status in enumerate(statuses) if status is AddStatus.OVER_QUOTA]
    assert [10, 19] == sizes
