"""Moving all records to another store: marks, interruptions and verification."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service import transfer
from tarry.service.model import Status, WorkerRecord
from tarry.service.records.transfer_mark import get_transfer
from tarry.service.records.workers import record_worker, remove_worker
from tarry.service.store import RecordChange, RecordKind, Store
from tarry.service.stores.sqlite import SqliteTaskStore
from tarry.service.transfer import (
    NamedStore,
    TransferFailed,
    TransferResult,
    check_not_moved,
    move_records,
    undo_transfer,
)
from tests.service.stores.conformance.transfer import contents, fill
from tests.service.stores.harness import ManualClock, StoreHarness, task
from tests.service.stores.reference_store import ReferenceState, ReferenceStore

WORKER = WorkerRecord(name="host-1-a", host="host", pid=17)


class Killed(BaseException):
    """Ends a transfer, as a kill of its process would."""


class KilledStore:
    """A store whose calls are counted; after `max_calls` writes of both stores, each call fails."""

    def __init__(self, store: Store, killer: Killer) -> None:
        self._store = store
        self._killer = killer

    def __getattr__(self, name: str) -> Any:
        """Return a method that counts its calls if it writes."""
        method = getattr(self._store, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            if name in {"import_records", "write_records"}:
                self._killer.check()
            result = await method(*arguments, **options)
            if name in {"import_records", "write_records"}:
                self._killer.check()
            return result

        return call


class Killer:
    """Raises `Killed` at the call with this number: before or after a write."""

    def __init__(self, number: int) -> None:
        self._number = number

    def check(self) -> None:
        """Count a call."""
        self._number -= 1
        if self._number < 0:
            raise Killed


class Stores:
    """A filled source and an empty target, with one clock."""

    def __init__(self, clock: ManualClock) -> None:
        source_state, target_state = ReferenceState(), ReferenceState()
        self.source = StoreHarness(lambda clock: ReferenceStore(clock, source_state), clock)
        self.target = StoreHarness(lambda clock: ReferenceStore(clock, target_state), clock)

    @property
    def names(self) -> tuple[NamedStore, NamedStore]:
        """The stores with their URLs."""
        return NamedStore(self.source.store, "redis://old"), NamedStore(
            self.target.store, "postgresql://new"
        )

    async def open(self) -> None:
        """Open both stores, and fill the source."""
        await self.source.reopen()
        await self.target.reopen()
        await fill(self.source)

    async def move(self) -> TransferResult:
        """Move all records."""
        source, target = self.names
        return await move_records(source, target, ignore_progress)


def ignore_progress(_finished: int, _total: int | None, _description: str) -> None:
    """Do nothing."""


async def open_stores() -> Stores:
    """Return open stores."""
    stores = Stores(ManualClock())
    await stores.open()
    return stores


async def test_all_records_are_moved_and_the_source_is_marked() -> None:
    """The target has the contents of the source, which must not be served any more."""
    stores = await open_stores()
    expected = await contents(stores.source.store)

    result = await stores.move()

    assert expected == await contents(stores.target.store)
    assert 12 == result.counts["tasks"]
    statuses = {status: result.counts[f"tasks {status.name}"] for status in Status}
    assert statuses == (await stores.target.store.counters()).task_counts
    assert 1 == result.tasks_with_bodies
    source, target = stores.names
    await check_not_moved(*target)
    with pytest.raises(ConfigurationError, match=r"were moved to postgresql://new: serve that"):
        await check_not_moved(*source)


async def test_a_second_run_changes_nothing() -> None:
    """After a complete transfer, the same command reports that nothing is left to do."""
    stores = await open_stores()
    await stores.move()
    before = await contents(stores.target.store)

    result = await stores.move()

    assert (True, {}) == (result.was_complete, result.counts)
    assert before == await contents(stores.target.store)


def test_a_killed_transfer_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before or after any write, the next run completes the transfer.

    Until then, a service refuses to start on both stores.
    """
    monkeypatch.setattr(transfer, "PAGE_SIZE", 4)

    async def move_until_killed(stores: Stores, number: int) -> bool:
        killer = Killer(number)
        source, target = stores.names
        killed_source: Any = KilledStore(source.store, killer)
        killed_target: Any = KilledStore(target.store, killer)
        try:
            await move_records(
                source._replace(store=killed_source),
                target._replace(store=killed_target),
                ignore_progress,
            )
        except Killed:
            return True
        return False

    async def main() -> int:
        number = 0
        while True:
            stores = Stores(ManualClock())
            await stores.open()
            expected = await contents(stores.source.store)
            if not await move_until_killed(stores, number):
                return number
            source, target = stores.names
            mark = await get_transfer(source.store)
            if (await get_transfer(target.store)) is not None:
                assert mark is not None  # never only the target
                with pytest.raises(ConfigurationError, match="being moved from redis://old"):
                    await check_not_moved(*target)
            if mark is not None and not mark.is_complete:
                with pytest.raises(ConfigurationError, match="tasks are being moved to postgres"):
                    await check_not_moved(*source)
            await stores.move()
            assert expected == await contents(target.store)
            assert None is await get_transfer(target.store)
            number += 1

    assert asyncio.run(main()) > 30


async def test_only_one_page_is_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer continues at the page that was not recorded yet."""
    monkeypatch.setattr(transfer, "PAGE_SIZE", 1)
    imported: list[RecordKind] = []

    stores = await open_stores()
    source, target = stores.names
    killer = Killer(60)
    killed_target: Any = KilledStore(target.store, killer)
    with pytest.raises(Killed):
        await move_records(source, target._replace(store=killed_target), ignore_progress)
    moved = (await target.store.counters()).task_counts
    assert 0 < sum(moved.values()) < 12

    def count(finished: int, total: int | None, description: str) -> None:
        del finished, total
        if description == "moving tasks":
            imported.append(RecordKind.TASK)

    await move_records(source, target, count)
    assert 12 - sum(moved.values()) <= len(imported) <= 13 - sum(moved.values())


async def test_a_store_in_use_is_not_moved() -> None:
    """The error names the running processes, and both stores stay as they were."""
    stores = await open_stores()
    for used in (stores.source.store, stores.target.store):
        await record_worker(used, WORKER)
        with pytest.raises(ConfigurationError) as caught:
            await stores.move()
        assert "in use by host-1-a (process 17 on host): stop all processes" in str(caught.value)
        await remove_worker(used, WORKER.name)
        for named in stores.names:
            await check_not_moved(*named)
    await stores.move()


async def test_a_service_that_starts_at_the_same_time_is_found() -> None:
    """A process that registers before the mark is set is found after it; the mark is removed."""
    stores = await open_stores()
    source, target = stores.names

    class Starting(KilledStore):
        async def write_records(self, changes: list[RecordChange]) -> bool:
            is_written = await source.store.write_records(changes)
            if changes[0].value is not None:
                await record_worker(source.store, WORKER)
            return is_written

    starting: Any = Starting(source.store, Killer(1000))
    with pytest.raises(ConfigurationError, match="is in use by host-1-a"):
        await move_records(source._replace(store=starting), target, ignore_progress)
    await check_not_moved(*source)


async def test_a_second_process_does_not_move_at_the_same_time() -> None:
    """While one process moves records, another one is refused, and changes nothing."""
    stores = await open_stores()
    source, _ = stores.names
    assert isinstance(stores.target.store, ReferenceStore)
    other = ReferenceStore(stores.target.clock, stores.target.store.state)
    assert await other.try_lead()
    with pytest.raises(ConfigurationError, match="another process is moving tasks to postgres"):
        await stores.move()
    assert None is await get_transfer(source.store)
    await other.close()
    await stores.move()


@pytest.mark.parametrize("is_completed", [True, False])
async def test_a_suspended_process_does_not_continue(
    is_completed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process imports nothing more when another one has completed or undone the transfer."""
    monkeypatch.setattr(transfer, "PAGE_SIZE", 1)

    stores = await open_stores()
    source, target = stores.names
    imports: list[RecordKind] = []

    class Suspended(KilledStore):
        async def import_records(self, kind: RecordKind, records: list[Any]) -> None:
            imports.append(kind)
            await target.store.import_records(kind, records)
            if kind is not RecordKind.TASK:
                return
            if is_completed:
                await move_records(source, target, ignore_progress)
            else:
                await undo_transfer(source)

    suspended: Any = Suspended(target.store, Killer(1000))
    with pytest.raises(ConfigurationError, match="has completed or undone the move"):
        await move_records(source, target._replace(store=suspended), ignore_progress)

    assert 1 == imports.count(RecordKind.TASK)
    assert RecordKind.TASK is imports[-1]
    if is_completed:
        await check_not_moved(*target)


async def test_a_target_with_records_is_rejected() -> None:
    """The target must be empty; the source can be served after the error."""
    stores = await open_stores()
    await stores.target.add(task(77))
    with pytest.raises(ConfigurationError, match="postgresql://new has lanes: the target must"):
        await stores.move()
    for named in stores.names:
        await check_not_moved(*named)


async def test_stores_of_another_transfer_are_rejected() -> None:
    """A store that is moved to or from a third store cannot be used."""
    stores = await open_stores()
    source, target = stores.names
    third = NamedStore(ReferenceStore(stores.source.clock), "redis://third")
    await move_records(source, target, ignore_progress)
    with pytest.raises(ConfigurationError, match="another move, to postgresql://new"):
        await move_records(source, third, ignore_progress)
    with pytest.raises(ConfigurationError, match="another move, to postgresql://new"):
        await move_records(third, source, ignore_progress)
    await check_not_moved(*target)


async def test_records_that_differ_are_reported() -> None:
    """If the target lacks a record, the transfer fails, and the source is not marked as moved."""
    stores = await open_stores()
    source, target = stores.names

    class Forgetful(KilledStore):
        async def import_records(self, kind: RecordKind, records: list[Any]) -> None:
            if kind is RecordKind.TASK:
                records = records[1:]
            await target.store.import_records(kind, records)

    forgetful: Any = Forgetful(target.store, Killer(1000))
    with pytest.raises(TransferFailed, match="tasks: 12 in the source, 11 in the target"):
        await move_records(source, target._replace(store=forgetful), ignore_progress)
    mark = await get_transfer(source.store)
    assert mark is not None
    assert not mark.is_complete
    await undo_transfer(source)
    await check_not_moved(*source)


async def test_a_transfer_can_be_undone() -> None:
    """The source can be served again after `undo_transfer`; a target cannot be undone."""
    stores = await open_stores()
    source, target = stores.names
    for unmarked in stores.names:
        with pytest.raises(ConfigurationError, match="there is nothing to undo"):
            await undo_transfer(unmarked)
    killed_target: Any = KilledStore(target.store, Killer(20))
    with pytest.raises(Killed):
        await move_records(source, target._replace(store=killed_target), ignore_progress)
    with pytest.raises(ConfigurationError, match="is the target of a move, from redis://old"):
        await undo_transfer(target)

    mark = await undo_transfer(source)

    assert "postgresql://new" == mark.other_store
    await check_not_moved(*source)
    with pytest.raises(ConfigurationError, match="part of another move, from redis://old"):
        await stores.move()


@pytest.mark.parametrize("source_is_sqlite", [True, False])
async def test_records_are_moved_between_engines(source_is_sqlite: bool, tmp_path: Path) -> None:
    """A move from memory to SQLite, and back to another SQLite file, keeps all contents."""
    clock = ManualClock()
    state = ReferenceState()
    paths = iter([tmp_path / "a.db", tmp_path / "b.db"])

    def new_sqlite(clock: ManualClock) -> Store:
        return SqliteTaskStore(next(paths), clock=clock)

    first = StoreHarness(
        new_sqlite if source_is_sqlite else lambda clock: ReferenceStore(clock, state), clock
    )
    second = StoreHarness(new_sqlite, clock)
    await first.reopen()
    await second.reopen()
    await fill(first)
    expected = await contents(first.store)
    source, target = NamedStore(first.store, "first"), NamedStore(second.store, "second")

    await move_records(source, target, ignore_progress)

    assert expected == await contents(second.store)
    await second.store.close()
    await first.store.close()
