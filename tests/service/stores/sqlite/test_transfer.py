"""Export and import of the records of a SQLite store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarry.service.records.workers import is_in_use
from tarry.service.store import RecordKind
from tarry.service.stores.sqlite import SqliteTaskStore, transfer
from tests.service.stores.conformance import transfer as transfer_cases
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import ManualClock, StoreHarness
from tests.service.stores.sqlite.harness import cases_of, run_case


@pytest.mark.parametrize("case", cases_of(transfer_cases), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes the case."""
    run_case(case, tmp_path)


async def test_a_dead_process_does_not_use_the_store(tmp_path: Path) -> None:
    """A store is in use while another store holds its lock, however old the heartbeats are."""
    path = tmp_path / "tasks.db"

    first, second = SqliteTaskStore(path, clock=ManualClock()), SqliteTaskStore(path)
    await first.open()
    await second.open()
    assert await is_in_use(first)
    await second.close()
    assert not await is_in_use(first)
    await first.close()


async def test_leases_of_imported_workers_end_when_they_expire(tmp_path: Path) -> None:
    """Opening the file does not end imported leases: their worker may still run an attempt."""
    source = StoreHarness(lambda clock: SqliteTaskStore(tmp_path / "old.db", clock=clock))
    target = StoreHarness(lambda clock: SqliteTaskStore(tmp_path / "new.db", clock=clock))

    await source.reopen()
    await target.reopen()
    await source.lease_new_task(1)
    await transfer_cases.transfer(source.store, target.store)
    await target.store.close()
    await target.reopen()
    found = await target.get_task(1)
    assert await source.get_task(1) == found
    for store in (source.store, target.store):
        await store.close()


def test_every_kind_has_an_export_and_an_import() -> None:
    """No kind of record is forgotten."""
    assert set(RecordKind) == set(transfer.IMPORTS)
