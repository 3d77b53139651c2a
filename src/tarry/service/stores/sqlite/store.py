"""`SqliteTaskStore`: implements `tarry.service.store.Store` with a SQLite database.

Queries use a second connection, so that they do not wait for commits. The module
`finished_tasks` handles finished tasks: replays, purge and retention.
"""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

import asyncio
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service import store
from tarry.service.group_commit import BACKGROUND, URGENT, priority_of_new_tasks
from tarry.service.store import AddStatus
from tarry.service.stores.sqlite import (
    add,
    claim,
    finish,
    finished_tasks,
    lanes,
    policies,
    queries,
    records,
    transfer,
    transitions,
)
from tarry.service.stores.sqlite.clock import AnchoredClock
from tarry.service.stores.sqlite.database import IN_MEMORY, SqliteDatabase
from tarry.service.stores.sqlite.executor import BatchOperation, ThreadExecutor
from tarry.service.stores.sqlite.operations import OperationCall
from tarry.service.stores.sqlite.wakeups import Wakeups
from tarry.service.stores.sqlite.worker_locks import LeaderLock, WorkerLock
from tarry.service.stores.sqlite.writer_process import WriterProcessExecutor, ping
from tarry.service.stores.task_filters import MAX_SCANNED_ROWS

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from types import CoroutineType

    from tarry.service import model
    from tarry.service.stores.sqlite.database import Clock
    from tarry.service.stores.sqlite.executor import Executor
    from tarry.service.stores.sqlite.schema import StorePath
    from tarry.service.stores.sqlite.transaction import ReadTransaction, WriteTransaction


_MAX_LEASES_PER_TRANSACTION = 1000
_WAKEUP_HORIZON_MS = 500
"""Other processes are woken for a task that is due sooner. For others, their polling suffices."""
_get_callback_task = attrgetter("callback_task")
_ADDED = AddStatus.ADDED  # read once, because it takes 0.27 us in Python 3.11


def reads(
    query: Callable[Concatenate[ReadTransaction, P], T],
) -> Callable[Concatenate[SqliteTaskStore, P], CoroutineType[Any, Any, T]]:
    """Return a method of the store that runs a query."""

    async def method(store: SqliteTaskStore, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await store.read(lambda tx: query(tx, *arguments, **named))

    return cast("Callable[..., CoroutineType[Any, Any, T]]", method)


def writes(
    operation: Callable[Concatenate[WriteTransaction, P], T],
    *,
    weight: str | None = None,
    urgent: bool = True,
    notifies: bool = False,
) -> Callable[Concatenate[SqliteTaskStore, P], CoroutineType[Any, Any, T]]:
    """Return a method of the store that runs an operation; see `SqliteTaskStore.write`.

    `weight` is the name of a parameter: a number of tasks, or a collection with an item for each
    task. With `notifies`, other processes may find tasks to claim afterwards.
    """
    position = None if weight is None else list(signature(operation).parameters).index(weight) - 1

    async def method(store: SqliteTaskStore, /, *arguments: P.args, **named: P.kwargs) -> T:
        call = OperationCall(operation, *arguments, **named)
        tasks = 1 if position is None else call.arguments[position]
        task_count = tasks if isinstance(tasks, int) else len(tasks)
        result = await store.write(call, task_count, urgent=urgent)
        if notifies:
            store.notify()
        return result

    return cast("Callable[..., CoroutineType[Any, Any, T]]", method)


class SqliteTaskStore:
    """A store in the SQLite file at `path`, which is created if it is missing.

    `clock` returns epoch milliseconds; the default is an `AnchoredClock`. Several processes of one
    machine may use one file. If `writer_process` is true, another process makes all changes. It
    uses its own `AnchoredClock`, and `clock` applies only to queries. With the path `IN_MEMORY`,
    everything is kept in the memory of this process until the store is closed.
    """

    def __init__(
        self, path: StorePath, *, clock: Clock | None = None, writer_process: bool = False
    ) -> None:
        clock = clock or AnchoredClock()
        if path == IN_MEMORY:
            if writer_process:
                raise ConfigurationError("a store in memory cannot have a writer process")
            # A database in memory has only one connection, which the reader and the writer share.
            self.database: SqliteDatabase = SqliteDatabase(path, clock)
            self._read_database = self.database
        else:
            self._read_database = SqliteDatabase(path, clock)
            self.database = SqliteDatabase(path, clock, WorkerLock(path), self._read_database)
        self._leader_lock = None if path == IN_MEMORY else LeaderLock(path)
        self._wakeups = None if path == IN_MEMORY else Wakeups(path)
        self._has_writer_process = writer_process
        self._writer: Executor | None = None
        self._reader: Executor | None = None
        self._add: BatchOperation[store.NewTask, store.AddResult] = BatchOperation(
            _build_add, self._unpack_added
        )
        self._finish: BatchOperation[store.TaskResult, store.FinishStatus] = BatchOperation(
            _build_finish, self._unpack_finished
        )
        self._release: BatchOperation[store.Release, store.FinishStatus] = BatchOperation(
            _build_release, self._unpack_released
        )

    @property
    def partition_count(self) -> int:
        return 1

    def partition_of(self, tenant: str) -> int:  # noqa: ARG002 - there is one partition
        return 0

    async def open(self) -> None:
        """Open the database, upgrade its schema, and end leases of worker processes that died."""
        if self._writer is None:
            self._writer = (
                WriterProcessExecutor(self.database)
                if self._has_writer_process
                else ThreadExecutor("tarry-sqlite-writer", self.database.apply)
            )
            self._reader = ThreadExecutor("tarry-sqlite-reader", self._read_database.read)
        while await self.write(
            OperationCall(transitions.end_leases_of_dead_workers, _MAX_LEASES_PER_TRANSACTION)
        ):
            pass

    async def close(self) -> None:
        """Finish pending operations, and close the database."""
        if self._wakeups is not None:
            self._wakeups.close()
        writer, reader, self._writer, self._reader = self._writer, self._reader, None, None
        # The reader is closed first: the last connection to a file deletes the WAL, which must not
        # be done by one that has not noticed that its WAL was replaced.
        if reader is not None:
            await reader.close()
        if self._read_database is not self.database:
            self._read_database.close()
        if writer is not None:
            await writer.close()
        self.database.close()
        if self.database.worker_lock is not None:
            self.database.worker_lock.release()
        if self._leader_lock is not None:
            self._leader_lock.release()

    async def write(
        self, operation: Callable[[WriteTransaction], T], weight: int = 1, *, urgent: bool = True
    ) -> T:
        """Run an operation in a transaction; its changes are durable when this method returns.

        `weight` is the approximate number of tasks that the operation changes. The executor limits
        the total weight of a transaction, and that of waiting operations. Operations for which a
        caller of the API waits are urgent: they run before results, claims and maintenance.
        """
        return await _submit(self._writer, operation, weight, urgent=urgent)

    def _write_batch(
        self, operation: BatchOperation[S, T], items: Sequence[S], priority: int, *arguments: Any
    ) -> Awaitable[list[T]]:
        """Run an operation on items, together with those of other callers."""
        if self._writer is None:
            future: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
            future.set_exception(_not_open_error())
            return future
        return self._writer.submit_batch(operation, items, priority, *arguments)

    async def _write_and_notify(
        self, operation: Callable[[WriteTransaction], T], weight: int = 1, *, urgent: bool = True
    ) -> T:
        """Run an operation after which other processes may find tasks to claim."""
        result = await self.write(operation, weight, urgent=urgent)
        self.notify()
        return result

    def notify(self) -> None:
        """Notify other processes, which may find tasks to claim."""
        if self._wakeups is not None:
            self._wakeups.notify()

    async def read(self, query: Callable[[ReadTransaction], T]) -> T:
        """Run a query on the second connection."""
        return await _submit(self._reader, query, 1, urgent=True)

    def add(
        self,
        tasks: Sequence[store.NewTask],
        terms: store.LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> Awaitable[list[store.AddResult]]:
        priority = priority_of_new_tasks(len(tasks))
        return self._write_batch(self._add, tasks, priority, terms, quota, lane_quota)

    def _unpack_added(
        self,
        tasks: Sequence[store.NewTask],
        results: Sequence[Any],
        terms: store.LeaseTerms | None,
        *_: object,
    ) -> list[store.AddResult]:
        added = add.to_add_results(tasks, results, terms)
        # Most tasks are leased by this process, so other processes cannot claim them.
        if any(_is_claimable(result) for result in added if not result.leased):
            self.notify()
        return added

    async def claim(
        self,
        terms: store.LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),  # noqa: ARG002 - there is one partition
    ) -> store.ClaimResult:
        operation = OperationCall(claim.claim, terms, limit, per_lane, lane_limits)
        return await self.write(operation, limit, urgent=False)

    def finish(self, results: Sequence[store.TaskResult]) -> Awaitable[list[store.FinishStatus]]:
        return self._write_batch(self._finish, results, BACKGROUND)

    def _unpack_finished(
        self, results: Sequence[store.TaskResult], statuses: list[store.FinishStatus]
    ) -> list[store.FinishStatus]:
        if any(map(_get_callback_task, results)):
            self.notify()
        return statuses

    def release(self, releases: Sequence[store.Release]) -> Awaitable[list[store.FinishStatus]]:
        return self._write_batch(self._release, releases, BACKGROUND)

    def _unpack_released(
        self, _: Sequence[store.Release], statuses: list[store.FinishStatus]
    ) -> list[store.FinishStatus]:
        self.notify()
        return statuses

    def record_start(self, slot: int, task: model.Task) -> None:
        worker_lock = self.database.worker_lock
        if worker_lock is not None:
            worker_lock.record_start(slot, task.id, task.version)

    async def release_unknown_leases(
        self,
        terms: store.LeaseTerms,
        known_ids: Collection[str],
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> int:
        operation = OperationCall(transitions.release_unknown_leases, terms, known_ids)
        return await self._write_and_notify(operation, urgent=False)

    async def list_lane_limits(
        self,
        limit: int,
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> list[store.LaneLimits]:
        return await self.read(lambda tx: lanes.list_lane_limits(tx, limit))

    async def load_limits(self, known: store.ConfiguredLimits) -> store.ConfiguredLimits | None:
        worker_lock = self.database.worker_lock
        return await self.read(lambda tx: lanes.load_limits(tx, known, worker_lock))

    def listen(self, callback: Callable[[], None]) -> None:
        if self._wakeups is not None:  # no other process can use a database in memory
            self._wakeups.listen(callback)

    async def ping(self, partition: int | None = None) -> int:  # noqa: ARG002 - there is one
        return await self.write(OperationCall(ping))

    async def try_lead(self) -> bool:
        return self._leader_lock is None or self._leader_lock.try_acquire()

    async def count_tasks(self, tenant: str, task_filter: store.StoredTaskFilter) -> int:
        """Count tasks in steps, so that other queries can run in between."""
        count, cursor = 0, None
        while True:
            find = partial(
                queries.find_tasks,
                tenant=tenant,
                task_filter=task_filter,
                cursor=cursor,
                limit=MAX_SCANNED_ROWS,
                oldest_first=True,
            )
            page = await self.read(find)
            count += len(page.items)
            cursor = page.cursor
            if cursor is None:
                return count

    async def replay_step(
        self,
        replay_id: str,
        cursor: str | None,
        task_ids: Sequence[str],
        next_cursor: str | None,
        *,
        quota: int | None = None,
    ) -> model.ReplayRecord | None:
        operation = OperationCall(
            finished_tasks.replay_step, replay_id, cursor, task_ids, next_cursor, quota
        )
        if not task_ids:
            return await self.write(operation, urgent=False)
        return await self._write_and_notify(operation, len(task_ids), urgent=False)

    async def import_records(self, kind: store.RecordKind, items: Sequence[Any]) -> None:
        operation = OperationCall(transfer.IMPORTS[kind], items)
        await self.write(operation, len(items), urgent=False)

    async def has_other_processes(self) -> bool | None:
        worker_lock = self.database.worker_lock
        if worker_lock is None or worker_lock.token is None:  # files cannot be locked
            return None
        return worker_lock.has_other_holders()

    # The other methods run a function of another module in a transaction.
    get_task: Final = reads(queries.get_task)
    list_tasks: Final = reads(queries.list_tasks)
    last_attempts: Final = reads(queries.last_attempts)
    list_attempts: Final = reads(queries.list_attempts)
    list_attempts_of_tasks: Final = reads(queries.list_attempts_of_tasks)
    cancel: Final = writes(transitions.cancel)
    retry_now: Final = writes(transitions.retry_now, notifies=True)

    park: Final = writes(lanes.park)
    unpark: Final = writes(lanes.unpark, notifies=True)
    resume: Final = writes(lanes.resume, notifies=True)
    pause: Final = writes(lanes.pause)
    record_lane_limits: Final = writes(lanes.record_lane_limits, weight="limits", urgent=False)
    set_limits: Final = writes(lanes.set_limits)
    add_to_budgets: Final = writes(lanes.add_to_budgets, weight="changes", urgent=False)
    list_lanes: Final = reads(lanes.list_lanes)
    get_lane: Final = reads(lanes.get_lane)

    put_policy: Final = writes(policies.put_policy)
    get_policy: Final = reads(policies.get_policy)
    list_policies: Final = reads(policies.list_policies)
    delete_policy: Final = writes(policies.delete_policy)

    counters: Final = reads(queries.counters)
    attempts_per_minute: Final = reads(queries.attempts_per_minute)

    start_replay: Final = writes(finished_tasks.start_replay)
    get_replay: Final = reads(finished_tasks.get_replay)
    list_replays: Final = reads(finished_tasks.list_replays)
    cancel_replay: Final = writes(finished_tasks.cancel_replay)
    delete_dead_letters: Final = writes(
        finished_tasks.delete_dead_letters, weight="task_ids", urgent=False
    )
    sweep: Final = writes(finished_tasks.sweep, weight="limit", urgent=False)
    list_orphaned_bodies: Final = reads(finished_tasks.list_orphaned_bodies)
    forget_orphaned_bodies: Final = writes(
        finished_tasks.forget_orphaned_bodies, weight="refs", urgent=False
    )

    read_records: Final = reads(records.read_records)
    list_records: Final = reads(records.list_records)
    write_records: Final = writes(records.write_records, weight="changes", urgent=False)
    export_records: Final = reads(transfer.export_records)


def _is_claimable(result: store.AddResult) -> bool:
    """Return whether other processes may soon lease a task that was added without a lease."""
    task: Final = result.task
    return result.status is _ADDED and task.next_attempt_at <= task.created_at + _WAKEUP_HORIZON_MS


def _build_add(tasks: Sequence[store.NewTask], *arguments: Any) -> OperationCall[Any]:
    # Without `Ingest.content`, because the writer process does not need it.
    sent = [store.NewTask(new.task, new.delay_ms, new.lease_on_add) for new in tasks]
    return OperationCall(add.add, sent, *arguments)


def _build_finish(results: Sequence[store.TaskResult]) -> OperationCall[list[store.FinishStatus]]:
    return OperationCall(finish.finish, list(map(finish.pack_result, results)))


def _build_release(releases: Sequence[store.Release]) -> OperationCall[list[store.FinishStatus]]:
    return OperationCall(transitions.release, releases)


async def _submit(
    executor: Executor | None, operation: Callable[[Any], T], weight: int, *, urgent: bool
) -> T:
    if executor is None:
        raise _not_open_error()
    priority = URGENT if urgent else BACKGROUND
    result: T = await executor.submit(operation, weight, priority)
    return result


def _not_open_error() -> StoreUnavailable:
    return StoreUnavailable("the store is not open: call open() first")
