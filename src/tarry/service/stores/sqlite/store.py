"""`SqliteTaskStore`: implements `tarry.service.store.Store` with a SQLite database.

Queries use a second connection, so that they do not wait for commits. The module `policies` also
handles API keys, and `finished_tasks` handles finished tasks: replays, purge and retention.
"""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.store import AddStatus
from tarry.service.stores.sqlite import (
    add,
    claim,
    finish,
    finished_tasks,
    heartbeats,
    lane_activity,
    policies,
    queries,
    series,
    transfer,
    transitions,
)
from tarry.service.stores.sqlite.clock import AnchoredClock
from tarry.service.stores.sqlite.database import IN_MEMORY, SqliteDatabase
from tarry.service.stores.sqlite.executor import ThreadExecutor
from tarry.service.stores.sqlite.operations import OperationCall
from tarry.service.stores.sqlite.wakeups import Wakeups
from tarry.service.stores.sqlite.worker_locks import LeaderLock, WorkerLock
from tarry.service.stores.sqlite.writer_process import WriterProcessExecutor, ping
from tarry.service.stores.task_filters import MAX_SCANNED_ROWS

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tarry.service import model, store
    from tarry.service.stores.sqlite.database import Clock
    from tarry.service.stores.sqlite.executor import Executor
    from tarry.service.stores.sqlite.schema import StorePath
    from tarry.service.stores.sqlite.transaction import ReadTransaction, WriteTransaction
    from tarry.wire.tasks import DownstreamLimits


_MAX_LEASES_PER_TRANSACTION = 1000
_WAKEUP_HORIZON_MS = 500
"""Other processes are woken for a task that is due sooner. For others, their polling suffices."""
_get_callback_task = attrgetter("callback_task")
_ADDED = AddStatus.ADDED  # read once, because it takes 0.27 us in Python 3.11


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

    async def _write_and_notify(
        self, operation: Callable[[WriteTransaction], T], weight: int = 1, *, urgent: bool = True
    ) -> T:
        """Run an operation after which other processes may find tasks to claim."""
        result = await self.write(operation, weight, urgent=urgent)
        self._notify()
        return result

    def _notify(self) -> None:
        if self._wakeups is not None:
            self._wakeups.notify()

    async def read(self, query: Callable[[ReadTransaction], T]) -> T:
        """Run a query on the second connection."""
        return await _submit(self._reader, query, 1, urgent=True)

    async def add(
        self,
        tasks: Sequence[store.NewTask],
        terms: store.LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> list[store.AddResult]:
        call = OperationCall(add.add, tasks, terms, quota, lane_quota)
        results = add.to_add_results(tasks, terms, await self.write(call, len(tasks)))
        # Most tasks are leased by this process, so other processes cannot claim them.
        if any(_is_claimable(result) for result in results if not result.leased):
            self._notify()
        return results

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

    async def finish(self, results: Sequence[store.TaskResult]) -> list[store.FinishStatus]:
        packed = list(map(finish.pack_result, results))
        call = OperationCall(finish.finish, packed)
        statuses = await self.write(call, len(packed), urgent=False)
        if any(map(_get_callback_task, results)):
            self._notify()
        return statuses

    async def release(self, releases: Sequence[store.Release]) -> list[store.FinishStatus]:
        operation = OperationCall(transitions.release, releases)
        return await self._write_and_notify(operation, len(releases), urgent=False)

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

    async def get_task(self, tenant: str, task_id: str) -> model.Task | None:
        return await self.read(lambda tx: queries.get_task(tx, tenant, task_id))

    async def list_tasks(
        self,
        tenant: str,
        task_filter: store.StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> store.RecordPage[model.Task]:
        return await self.read(
            lambda tx: queries.list_tasks(
                tx, tenant, task_filter, cursor, limit, oldest_first=oldest_first
            )
        )

    async def last_attempts(
        self, tenant: str, task_ids: Sequence[str]
    ) -> dict[str, model.AttemptRecord]:
        return await self.read(lambda tx: queries.last_attempts(tx, tenant, task_ids))

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[model.AttemptRecord]:
        return await self.read(lambda tx: queries.list_attempts(tx, tenant, task_id, after, limit))

    async def list_attempts_of_tasks(
        self,
        tenant: str,
        task_filter: store.StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
    ) -> store.RecordPage[tuple[str, model.AttemptRecord]]:
        return await self.read(
            lambda tx: queries.list_attempts_of_tasks(tx, tenant, task_filter, cursor, limit)
        )

    async def cancel(self, tenant: str, task_id: str) -> store.CancelStatus | None:
        return await self.write(OperationCall(transitions.cancel, tenant, task_id))

    async def retry_now(
        self, tenant: str, task_id: str, *, quota: int | None = None
    ) -> store.RetryNowStatus | None:
        operation = OperationCall(transitions.retry_now, tenant, task_id, quota)
        return await self._write_and_notify(operation)

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        await self.write(OperationCall(transitions.park, lane, until, probes, consecutive_opens))

    async def unpark(self, lane: str) -> None:
        await self._write_and_notify(OperationCall(transitions.unpark, lane))

    async def resume(self, lane: str) -> None:
        await self._write_and_notify(OperationCall(transitions.resume, lane))

    async def pause(self, lane: str, *, lane_quota: int | None = None) -> store.LaneWriteStatus:
        return await self.write(OperationCall(transitions.pause, lane, lane_quota))

    async def record_lane_limits(self, limits: Sequence[store.LaneLimits]) -> None:
        operation = OperationCall(transitions.record_lane_limits, limits)
        await self.write(operation, len(limits), urgent=False)

    async def list_lane_limits(
        self,
        limit: int,
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> list[store.LaneLimits]:
        return await self.read(lambda tx: queries.list_lane_limits(tx, limit))

    async def set_limits(
        self,
        lane: str,
        limits: DownstreamLimits | None,
        *,
        max_limited: int,
        lane_quota: int | None = None,
    ) -> store.LaneWriteStatus:
        operation = OperationCall(transitions.set_limits, lane, limits, max_limited, lane_quota)
        return await self.write(operation)

    async def load_limits(self, known: store.ConfiguredLimits) -> store.ConfiguredLimits | None:
        worker_lock = self.database.worker_lock
        return await self.read(lambda tx: queries.load_limits(tx, known, worker_lock))

    async def add_to_budgets(self, changes: dict[str, float]) -> dict[str, float]:
        operation = OperationCall(transitions.add_to_budgets, changes)
        return await self.write(operation, len(changes), urgent=False)

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> store.RecordPage[model.LaneRecord]:
        return await self.read(lambda tx: queries.list_lanes(tx, tenant, cursor, limit))

    async def get_lane(self, name: str) -> model.LaneRecord | None:
        return await self.read(lambda tx: queries.get_lane(tx, name))

    async def record_breaker_change(self, lane: str, change: model.BreakerChangeRecord) -> None:
        operation = OperationCall(lane_activity.record_breaker_change, lane, change)
        await self.write(operation, urgent=False)

    async def record_latencies(self, counts_by_lane: dict[str, dict[str, int]]) -> None:
        operation = OperationCall(lane_activity.record_latencies, counts_by_lane)
        await self.write(operation, urgent=False)

    async def read_lane_activity(self, lanes: Sequence[str]) -> dict[str, model.LaneActivity]:
        return await self.read(lambda tx: lane_activity.read_lane_activity(tx, lanes))

    async def put_policy(
        self, policy: model.PolicyVersion, *, replace: bool, quota: int | None = None
    ) -> tuple[store.PolicyWriteStatus, model.PolicyVersion]:
        return await self.write(OperationCall(policies.put_policy, policy, replace, quota))

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> model.PolicyVersion | None:
        return await self.read(lambda tx: policies.get_policy(tx, tenant, policy_id, version))

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> store.RecordPage[model.PolicyVersion]:
        return await self.read(lambda tx: policies.list_policies(tx, tenant, cursor, limit))

    async def delete_policy(self, tenant: str, policy_id: str) -> store.PolicyWriteStatus:
        return await self.write(OperationCall(policies.delete_policy, tenant, policy_id))

    async def put_api_key(self, key: model.ApiKeyRecord) -> None:
        await self.write(OperationCall(policies.put_api_key, key))

    async def find_api_key(self, digest: bytes) -> model.ApiKeyRecord | None:
        return await self.read(lambda tx: policies.find_api_key(tx, digest))

    async def list_api_keys(self, tenant: str | None = None) -> list[model.ApiKeyRecord]:
        return await self.read(lambda tx: policies.list_api_keys(tx, tenant))

    async def revoke_api_key(self, key_id: str) -> bool:
        return await self.write(OperationCall(policies.revoke_api_key, key_id))

    async def put_signing_secret(
        self, secret: model.SigningSecretRecord, *, expire_previous_ms: int
    ) -> model.SigningSecretRecord | None:
        call = OperationCall(policies.put_signing_secret, secret, expire_previous_ms)
        return await self.write(call)

    async def list_signing_secrets(self, tenant: str) -> list[model.SigningSecretRecord]:
        return await self.read(lambda tx: policies.list_signing_secrets(tx, tenant))

    async def delete_signing_secret(self, tenant: str, secret_id: str) -> bool:
        return await self.write(OperationCall(policies.delete_signing_secret, tenant, secret_id))

    async def record_worker(self, worker: model.WorkerRecord) -> None:
        await self.write(OperationCall(heartbeats.record_worker, worker), urgent=False)

    async def list_workers(self) -> list[model.WorkerRecord]:
        return await self.read(heartbeats.list_workers)

    async def remove_worker(self, name: str) -> None:
        await self.write(OperationCall(heartbeats.remove_worker, name), urgent=False)

    def listen(self, callback: Callable[[], None]) -> None:
        if self._wakeups is not None:  # no other process can use a database in memory
            self._wakeups.listen(callback)

    async def ping(self, partition: int | None = None) -> int:  # noqa: ARG002 - there is one
        return await self.write(OperationCall(ping))

    async def try_lead(self) -> bool:
        return self._leader_lock is None or self._leader_lock.try_acquire()

    async def counters(self, tenant: str | None = None) -> store.Counters:
        return await self.read(lambda tx: queries.counters(tx, tenant))

    async def attempts_per_minute(
        self, tenant: str | None, *, since: int
    ) -> list[store.AttemptsOfMinute]:
        return await self.read(lambda tx: queries.attempts_per_minute(tx, tenant, since))

    async def record_series(self, points: Sequence[store.SeriesPoint]) -> None:
        await self.write(OperationCall(series.record_series, points), urgent=False)

    async def list_series(self, step_ms: int, *, since: int) -> list[store.SeriesPoint]:
        return await self.read(lambda tx: series.list_series(tx, step_ms, since))

    async def get_replay(self, tenant: str, replay_id: str) -> model.ReplayRecord | None:
        return await self.read(lambda tx: finished_tasks.get_replay(tx, tenant, replay_id))

    async def list_replays(
        self, *, running: bool, tenant: str | None = None
    ) -> list[model.ReplayRecord]:
        find = partial(finished_tasks.list_replays, running=running, tenant=tenant)
        return await self.read(find)

    async def cancel_replay(self, tenant: str, replay_id: str) -> model.ReplayRecord | None:
        return await self.write(OperationCall(finished_tasks.cancel_replay, tenant, replay_id))

    async def list_orphaned_bodies(self, limit: int) -> list[str]:
        return await self.read(lambda tx: finished_tasks.list_orphaned_bodies(tx, limit))

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

    async def start_replay(self, replay: model.ReplayRecord) -> model.ReplayRecord:
        return await self.write(OperationCall(finished_tasks.start_replay, replay))

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

    async def delete_dead_letters(self, tenant: str, task_ids: Sequence[str]) -> int:
        operation = OperationCall(finished_tasks.delete_dead_letters, tenant, task_ids)
        return await self.write(operation, len(task_ids), urgent=False)

    async def sweep(self, retention: store.Retention, limit: int) -> store.SweepResult:
        operation = OperationCall(finished_tasks.sweep, retention, limit)
        return await self.write(operation, limit, urgent=False)

    async def forget_orphaned_bodies(self, refs: Sequence[str]) -> None:
        operation = OperationCall(finished_tasks.forget_orphaned_bodies, refs)
        await self.write(operation, len(refs), urgent=False)

    async def export_records(
        self, kind: store.RecordKind, *, cursor: str | None = None, limit: int = 1000
    ) -> store.RecordPage[Any]:
        return await self.read(lambda tx: transfer.export_records(tx, kind, cursor, limit))

    async def import_records(self, kind: store.RecordKind, records: Sequence[Any]) -> None:
        operation = OperationCall(transfer.IMPORTS[kind], records)
        await self.write(operation, len(records), urgent=False)

    async def get_transfer(self) -> store.TransferMark | None:
        return await self.read(transfer.get_transfer)

    async def set_transfer(self, mark: store.TransferMark | None) -> None:
        await self.write(OperationCall(transfer.set_transfer, mark))

    async def is_in_use(self) -> bool:
        worker_lock = self.database.worker_lock
        if worker_lock is None or worker_lock.token is None:  # files cannot be locked
            return bool(await self.list_workers())
        return worker_lock.has_other_holders()


def _is_claimable(result: store.AddResult) -> bool:
    """Return whether other processes may soon lease a task that was added without a lease."""
    task = result.task
    return result.status is _ADDED and task.next_attempt_at <= task.created_at + _WAKEUP_HORIZON_MS


async def _submit(
    executor: Executor | None, operation: Callable[[Any], T], weight: int, *, urgent: bool
) -> T:
    if executor is None:
        raise StoreUnavailable("the store is not open: call open() first")
    result: T = await executor.submit(operation, weight, urgent=urgent)
    return result
