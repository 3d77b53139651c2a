"""`SqliteStore`: the store port on a SQLite database.

Each method runs an operation, from another module of this package, in a transaction. Operations
that arrive while a commit runs share the next transaction. Reads run on a second connection and do
not wait for commits.
"""

# ruff: noqa: D102 - the methods are documented in the port, `tarry.service.store.Store`

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace as copy_with

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.stores.sqlite import (
    add,
    claim,
    finish,
    lanes,
    policies,
    queries,
    terminal_tasks,
    transitions,
)
from tarry.service.stores.sqlite.database import IN_MEMORY, Database
from tarry.service.stores.sqlite.executor import ThreadExecutor
from tarry.service.stores.sqlite.worker_locks import WorkerLock
from tarry.service.stores.sqlite.writer_process import (
    OperationCall,
    WriterProcessExecutor,
    ping,
    system_clock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from os import PathLike

    from tarry.service import model
    from tarry.service import store as port
    from tarry.service.stores.sqlite.executor import Executor
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

T = TypeVar("T")

_LEASES_PER_RECOVERY = 1000


class SqliteStore:
    """A store in the SQLite file at `path`, which is created if it is missing.

    `clock` returns epoch milliseconds. Several processes of one machine may use one file. With
    `writer_process`, another process does the writing, on the clock of the machine. The path
    `IN_MEMORY` keeps everything in the memory of this process until the store is closed.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        clock: Callable[[], int] = system_clock,
        writer_process: bool = False,
    ) -> None:
        if path == IN_MEMORY:
            if writer_process:
                raise ConfigurationError("a store in memory cannot have a writer process")
            # Only one connection sees a database in memory, so both threads share it.
            self.database: Database = Database(path, clock)
            self._read_database = self.database
        else:
            self.database = Database(path, clock, WorkerLock(path))
            self._read_database = Database(path, clock)
        self._has_writer_process = writer_process
        self._writer: Executor | None = None
        self._reader: Executor | None = None

    async def open(self) -> None:
        """Open the database, upgrade its schema, and end the leases of dead worker processes."""
        if self._writer is None:
            self._writer = (
                WriterProcessExecutor(self.database)
                if self._has_writer_process
                else ThreadExecutor("tarry-sqlite-writer", self.database.apply)
            )
            self._reader = ThreadExecutor("tarry-sqlite-reader", self._read_database.read)
        while await self._write(OperationCall(transitions.recover_leases, _LEASES_PER_RECOVERY)):
            pass

    async def close(self) -> None:
        """Finish pending operations, and close the database."""
        executors, self._writer, self._reader = (self._writer, self._reader), None, None
        for executor in executors:
            if executor is not None:
                await executor.close()
        self._read_database.close()
        self.database.close()
        if self.database.worker_lock is not None:
            self.database.worker_lock.release()

    async def _write(self, operation: Callable[[Transaction], T], weight: int = 1) -> T:
        """Run an operation in a transaction that is durable before this returns.

        `weight` is the approximate number of tasks that the operation changes, by which the
        executor limits the size of its groups and of its queue.
        """
        return await _submit(self._writer, operation, weight)

    async def _read(self, query: Callable[[ReadTransaction], T]) -> T:
        return await _submit(self._reader, query, 1)

    async def ping(self) -> int:
        return await self._write(OperationCall(ping))

    # --- tasks and attempts -----------------------------------------------------------------------

    async def add(
        self,
        tasks: Sequence[port.NewTask],
        lease: port.Lease | None = None,
        *,
        quota: int | None = None,
    ) -> list[port.AddResult]:
        results = await self._write(OperationCall(add.add, tasks, lease, quota), len(tasks))
        return add.to_add_results(tasks, lease, results)

    async def claim(
        self, lease: port.Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> port.ClaimResult:
        return await self._write(OperationCall(claim.claim, lease, limit, per_lane, skip), limit)

    async def finish(self, results: Sequence[port.TaskResult]) -> list[port.FinishStatus]:
        packed = [finish.pack_result(result) for result in results]
        return await self._write(OperationCall(finish.finish, packed), len(packed))

    async def release(self, leases: Sequence[port.Release]) -> list[port.FinishStatus]:
        return await self._write(OperationCall(transitions.release, leases), len(leases))

    # --- lanes ------------------------------------------------------------------------------------

    async def park(self, lane: str, until: int, *, probes: int, opened: int) -> None:
        await self._write(OperationCall(lanes.park, lane, until, probes, opened))

    async def unpark(self, lane: str) -> None:
        await self._write(OperationCall(lanes.unpark, lane))

    async def resume(self, lane: str) -> None:
        await self._write(OperationCall(lanes.resume, lane))

    async def pause(self, lane: str) -> None:
        await self._write(OperationCall(lanes.pause, lane))

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> port.Page[model.LaneRecord]:
        return await self._read(lambda tx: lanes.list_lanes(tx, tenant, cursor, limit))

    async def get_lane(self, name: str) -> model.LaneRecord | None:
        return await self._read(lambda tx: lanes.get_lane(tx, name))

    # --- tasks of a tenant ------------------------------------------------------------------------

    async def get_task(self, tenant: str, task_id: str) -> model.Task | None:
        return await self._read(lambda tx: queries.get_task(tx, tenant, task_id))

    async def list_tasks(
        self, tenant: str, query: port.TaskFilter, *, cursor: str | None = None, limit: int = 100
    ) -> port.Page[model.Task]:
        return await self._read(lambda tx: queries.list_tasks(tx, tenant, query, cursor, limit))

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[model.AttemptRecord]:
        return await self._read(lambda tx: queries.list_attempts(tx, tenant, task_id, after, limit))

    async def cancel(self, tenant: str, task_id: str) -> port.CancelStatus | None:
        return await self._write(OperationCall(transitions.cancel, tenant, task_id))

    async def retry_now(self, tenant: str, task_id: str) -> port.RetryNowStatus | None:
        return await self._write(OperationCall(transitions.retry_now, tenant, task_id))

    # --- dead letters -----------------------------------------------------------------------------

    async def count_dead(self, replay: model.ReplayRecord) -> int:
        """Count in steps, so that other queries can run in between."""
        total, after = 0, 0
        while True:
            limit = queries.MAX_SCANNED_ROWS
            find = partial(
                terminal_tasks.find_dead_letters, replay=replay, after=after, limit=limit
            )
            found, cursor = await self._read(find)
            total += len(found)
            if cursor is None:
                return total
            after = cursor

    async def start_replay(self, replay: model.ReplayRecord) -> model.ReplayRecord:
        existing, now = await self._read(
            lambda tx: (terminal_tasks.find_replay(tx, replay.id), tx.now)
        )
        if existing is not None:
            return existing
        new = copy_with(replay, before=min(replay.before or now, now))
        new.matched = await self.count_dead(new)
        return await self._write(OperationCall(terminal_tasks.start_replay, new))

    async def get_replay(self, tenant: str, replay_id: str) -> model.ReplayRecord | None:
        return await self._read(lambda tx: terminal_tasks.get_replay(tx, tenant, replay_id))

    async def list_replays(
        self, *, running: bool, tenant: str | None = None
    ) -> list[model.ReplayRecord]:
        return await self._read(
            lambda tx: terminal_tasks.list_replays(tx, running=running, tenant=tenant)
        )

    async def replay_step(self, replay_id: str, limit: int) -> model.ReplayRecord | None:
        return await self._write(OperationCall(terminal_tasks.replay_step, replay_id, limit), limit)

    async def cancel_replay(self, tenant: str, replay_id: str) -> model.ReplayRecord | None:
        return await self._write(OperationCall(terminal_tasks.cancel_replay, tenant, replay_id))

    async def purge(self, tenant: str, query: port.TaskFilter, limit: int) -> int:
        """Delete in steps, so that other operations can run in between."""
        total, after = 0, 0
        while total < limit:
            step = OperationCall(terminal_tasks.purge, tenant, query, after, limit - total)
            count, cursor = await self._write(step, limit - total)
            total += count
            if cursor is None:
                break
            after = cursor
        return total

    # --- policies and API keys --------------------------------------------------------------------

    async def put_policy(
        self, policy: model.PolicyVersion, *, replace: bool
    ) -> tuple[port.PolicyWriteStatus, model.PolicyVersion]:
        return await self._write(OperationCall(policies.put_policy, policy, replace))

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> model.PolicyVersion | None:
        return await self._read(lambda tx: policies.get_policy(tx, tenant, policy_id, version))

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> port.Page[model.PolicyVersion]:
        return await self._read(lambda tx: policies.list_policies(tx, tenant, cursor, limit))

    async def delete_policy(self, tenant: str, policy_id: str) -> port.PolicyWriteStatus:
        return await self._write(OperationCall(policies.delete_policy, tenant, policy_id))

    async def put_key(self, key: model.ApiKey) -> None:
        await self._write(OperationCall(policies.put_key, key))

    async def find_key(self, digest: bytes) -> model.ApiKey | None:
        return await self._read(lambda tx: policies.find_key(tx, digest))

    async def list_keys(self, tenant: str | None = None) -> list[model.ApiKey]:
        return await self._read(lambda tx: policies.list_keys(tx, tenant))

    async def revoke_key(self, key_id: str) -> bool:
        return await self._write(OperationCall(policies.revoke_key, key_id))

    # --- counters and retention -------------------------------------------------------------------

    async def counters(self, tenant: str | None = None) -> port.Counters:
        return await self._read(lambda tx: queries.counters(tx, tenant))

    async def series(self, tenant: str | None, *, since: int) -> list[port.SeriesPoint]:
        return await self._read(lambda tx: queries.series(tx, tenant, since))

    async def sweep(self, retention: port.Retention, limit: int) -> port.SweepResult:
        return await self._write(OperationCall(terminal_tasks.sweep, retention, limit), limit)

    async def orphans(self, limit: int) -> list[str]:
        return await self._read(lambda tx: terminal_tasks.orphans(tx, limit))

    async def forget_orphans(self, refs: Sequence[str]) -> None:
        await self._write(OperationCall(terminal_tasks.forget_orphans, refs), len(refs))


async def _submit(executor: Executor | None, work: Callable[[Any], T], weight: int) -> T:
    if executor is None:
        raise StoreUnavailable("the store is not open: call open() first")
    result: T = await executor.submit(work, weight)
    return result
