"""Move all records from one store to another, while no service runs on either.

The steps, each of which may be interrupted and is then continued by the next call:

1. The source, which must not be in use, is marked. From now on, `check_not_moved` keeps a service
   from starting on it. Then the source is checked for processes again: a service that starts at
   the same time either finds the mark, or is found by this check.
2. The target, which must be empty, is marked likewise, with the same id.
3. The records are imported page by page, kind by kind. After each page, the position is stored in
   the mark of the target. Importing a page again changes nothing, see `Store.import_records`.
4. The records of both stores are counted and compared.
5. The mark of the source becomes complete, and the mark of the target is removed.

Only one process moves records at a time: the leader of the target (`Store.try_lead`). Before each
page it also checks the marks. A process that was suspended, and whose transfer another one has
completed meanwhile, would otherwise import tasks again that the target has delivered and removed.

A task that is leased in the source keeps the end of its lease. After that time, a claim in the
target leases it again and logs the attempt as lost, because the attempt may have been made.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from tarry.errors import ConfigurationError, TarryError
from tarry.service.model import Status
from tarry.service.records.transfer_mark import (
    TRANSFER_MARK_KIND,
    TransferMark,
    get_transfer,
    set_transfer,
)
from tarry.service.records.workers import WORKER_EXPIRY_MS, is_in_use, list_workers
from tarry.service.store import RecordKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tarry.service.store import RecordPage, Store

    ReportProgress = Callable[[int, int | None, str], None]
    """Called with the number of finished records, the number of all records or None if it is not
    known, and a description of the records."""
    CheckMarks = Callable[[], Awaitable[None]]
    """Raises if this process must not continue the transfer."""

PAGE_SIZE = 1_000
_KINDS = tuple(RecordKind)


class TransferFailed(TarryError):
    """The target does not have the records of the source. The source stays complete."""


class TransferResult(msgspec.Struct, frozen=True):
    """The number of moved records."""

    counts: dict[str, int]
    """By kind; tasks also by status. Empty if an earlier call has completed the transfer."""
    tasks_with_bodies: int = 0
    """The number of tasks whose bodies are in the `BodyStore`, which is not moved."""
    was_complete: bool = False
    """Whether an earlier call has completed the transfer, so that nothing was left to do."""


class NamedStore(NamedTuple):
    """An open store, and its URL without a password."""

    store: Store
    url: str


async def check_not_moved(store: Store, url: str) -> None:
    """Raise `ConfigurationError` if the store is part of a transfer; `url` is for the message."""
    mark = await get_transfer(store)
    if mark is None:
        return
    source, target = (url, mark.other_store) if mark.is_source else (mark.other_store, url)
    command = f"tarry migrate --from {source} --to {target}"
    undo = f"`tarry migrate --from {source} --undo`"
    if mark.is_complete:
        raise ConfigurationError(
            f"the tasks of {url} were moved to {target}: serve that store. "
            f"To use the old store again, see `tarry docs migrate` and {undo}"
        )
    direction = f"to {target}" if mark.is_source else f"from {source} to this store"
    raise ConfigurationError(
        f"tasks are being moved {direction}: run `{command}` again to finish, "
        f"or {undo} to use the old store again"
    )


async def move_records(
    source: NamedStore, target: NamedStore, on_progress: ReportProgress
) -> TransferResult:
    """Move all records to an empty store, or continue a transfer between these two stores.

    Raises `ConfigurationError` if one of the stores cannot be used for this, and `TransferFailed`
    if the records of the stores differ at the end.
    """
    await _become_leader(target)
    mark = await _mark_source(source, target)
    target_mark = await get_transfer(target.store)
    if mark.is_complete:
        if target_mark is not None and target_mark.id == mark.id:
            await set_transfer(target.store, None)
        return TransferResult({}, was_complete=True)
    if target_mark is None:
        target_mark = await _mark_target(source, target, mark)
    elif target_mark.is_source or target_mark.id != mark.id:
        raise ConfigurationError(
            f"{target.url} is part of another move, {_describe(target_mark)}: "
            "use an empty store as the target"
        )
    else:
        await _check_unused(target)

    async def check_marks() -> None:
        await _become_leader(target)
        await _check_marks(source, target, mark)

    await _copy(source.store, target.store, target_mark, on_progress, check_marks)
    counts, tasks_with_bodies = await _count_records(source.store, on_progress, check_marks)
    await _verify(source, target, counts, on_progress, check_marks)
    await check_marks()
    await set_transfer(source.store, replace(mark, is_complete=True))
    await set_transfer(target.store, None)
    return TransferResult(counts, tasks_with_bodies)


async def undo_transfer(source: NamedStore) -> TransferMark:
    """Remove the mark of a source, so that it can be served again; return the mark."""
    mark = await get_transfer(source.store)
    if mark is None:
        raise ConfigurationError(f"nothing was moved from {source.url}: there is nothing to undo")
    if not mark.is_source:
        raise ConfigurationError(
            f"{source.url} is the target of a move, {_describe(mark)}: undo the source, "
            "and delete this store"
        )
    await set_transfer(source.store, None)
    return mark


def _describe(mark: TransferMark) -> str:
    return f"{'to' if mark.is_source else 'from'} {mark.other_store}"


async def _become_leader(target: NamedStore) -> None:
    """Raise if another process moves records to the target."""
    if not await target.store.try_lead():
        raise ConfigurationError(
            f"another process is moving tasks to {target.url}: wait until it has ended. One that "
            "was killed may count for 30 seconds"
        )


async def _check_marks(source: NamedStore, target: NamedStore, mark: TransferMark) -> None:
    """Raise if another process has completed or undone this transfer."""
    for named in (source, target):
        found = await get_transfer(named.store)
        if found is None or found.id != mark.id or found.is_complete:
            raise ConfigurationError(
                f"another process has completed or undone the move from {source.url} to "
                f"{target.url}, so this one has stopped"
            )


async def _mark_source(source: NamedStore, target: NamedStore) -> TransferMark:
    """Return the mark of the source; set it if it is missing. Raise if the source is in use."""
    mark = await get_transfer(source.store)
    if mark is not None and (not mark.is_source or mark.other_store != target.url):
        raise ConfigurationError(
            f"{source.url} is part of another move, {_describe(mark)}: finish that one first, "
            f"or run `tarry migrate --from {source.url} --undo`"
        )
    if mark is not None and mark.is_complete:
        return mark
    await _check_unused(source)
    if mark is None:
        mark = TransferMark(id=uuid4().hex, is_source=True, other_store=target.url)
        await _set_mark(source, mark)
    return mark


async def _mark_target(
    source: NamedStore, target: NamedStore, source_mark: TransferMark
) -> TransferMark:
    """Mark an empty target, and return its mark; if it is not empty, unmark the source."""
    mark = replace(source_mark, is_source=False, other_store=source.url)
    try:
        await _check_unused(target)
        await _check_empty(target)
        await _set_mark(target, mark)
    except ConfigurationError:
        await set_transfer(source.store, None)
        raise
    return mark


async def _check_empty(target: NamedStore) -> None:
    for kind in _KINDS:
        items = (await target.store.export_records(kind, limit=1)).items
        if items:
            found = items[0].kind if kind is RecordKind.RECORD else kind
            raise ConfigurationError(f"{target.url} has {found}: the target must be empty")


async def _set_mark(named: NamedStore, mark: TransferMark) -> None:
    """Mark a store that was not in use a moment ago."""
    await set_transfer(named.store, mark)
    try:
        await _check_unused(named)  # a service that started in between did not find the mark
    except ConfigurationError:
        await set_transfer(named.store, None)
        raise


async def _check_unused(named: NamedStore) -> None:
    if not await is_in_use(named.store):
        return
    workers = [
        f"{worker.name} (process {worker.pid} on {worker.host})"
        for worker in await list_workers(named.store)
    ]
    users = ", ".join(workers[:10]) or "another process"
    raise ConfigurationError(
        f"{named.url} is in use by {users}: stop all processes of the service first. "
        f"A process that has crashed is listed for {WORKER_EXPIRY_MS // 1000} seconds"
    )


async def _copy(
    source: Store,
    target: Store,
    mark: TransferMark,
    on_progress: ReportProgress,
    check_marks: CheckMarks,
) -> None:
    task_count = sum((await source.counters()).task_counts.values())
    for kind in _KINDS[_KINDS.index(mark.kind) :]:
        # After an interruption, the progress starts at 0, although some records are moved already.
        total, moved = (task_count if kind is RecordKind.TASK else None), 0
        cursor = mark.cursor if kind is mark.kind else None
        async for page in _iter_pages(source, kind, cursor):
            if page.items:
                await check_marks()
                await target.import_records(kind, page.items)
            await check_marks()
            await set_transfer(target, replace(mark, kind=kind, cursor=page.cursor))
            moved += len(page.items)
            on_progress(moved, total, f"moving {kind}")


async def _iter_pages(
    store: Store, kind: RecordKind, cursor: str | None = None
) -> AsyncIterator[RecordPage[Any]]:
    while True:
        page = await store.export_records(kind, cursor=cursor, limit=PAGE_SIZE)
        if kind is RecordKind.RECORD:  # each store keeps its own mark
            page.items = [record for record in page.items if record.kind != TRANSFER_MARK_KIND]
        yield page
        if page.cursor is None:
            return
        cursor = page.cursor


async def _count_records(
    store: Store, on_progress: ReportProgress, check_marks: CheckMarks
) -> tuple[dict[str, int], int]:
    """Return the number of records, and the number of tasks with a body in the `BodyStore`."""
    counts: Counter[str] = Counter()
    tasks_with_bodies = 0
    for kind in _KINDS:
        count = 0
        async for page in _iter_pages(store, kind):
            await check_marks()
            if kind is RecordKind.TASK:
                counts.update(_status_name(task.status) for task in page.items)
                tasks_with_bodies += sum(task.owned_body_ref is not None for task in page.items)
            elif kind is RecordKind.RECORD:
                counts.update(record.kind for record in page.items)
            count += len(page.items)
            on_progress(count, None, f"counting {kind}")
        counts[kind.value] = count
    return dict(counts), tasks_with_bodies


def _status_name(status: Status) -> str:
    return f"{RecordKind.TASK} {status.name}"


async def _verify(
    source: NamedStore,
    target: NamedStore,
    expected: dict[str, int],
    on_progress: ReportProgress,
    check_marks: CheckMarks,
) -> None:
    """Raise unless the target has as many records as the source, and its counters match."""
    await _check_unused(source)
    counts, _ = await _count_records(target.store, on_progress, check_marks)
    differences = _find_differences(expected, counts)
    # The import has to maintain the counters, which the service reads instead of counting.
    counters = (await target.store.counters()).task_counts
    by_status = {_status_name(status): counters[status] for status in Status}
    expected_by_status = {name: expected.get(name, 0) for name in by_status}
    differences += _find_differences(expected_by_status, by_status)
    if differences:
        raise TransferFailed(
            f"the records of {source.url} and {target.url} differ ({'; '.join(differences)}). "
            f"The source is complete: run `tarry migrate --from {source.url} --undo` to use it "
            "again, and start with an empty target"
        )


def _find_differences(expected: dict[str, int], found: dict[str, int]) -> list[str]:
    return [
        f"{name}: {expected.get(name, 0)} in the source, {found.get(name, 0)} in the target"
        for name in sorted({*expected, *found})
        if expected.get(name, 0) != found.get(name, 0)
    ]
