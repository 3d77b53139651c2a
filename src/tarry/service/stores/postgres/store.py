"""`PostgresTaskStore`: implements `tarry.service.store.Store` with a PostgreSQL database."""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.store import MAX_LISTED_RECORDS, AddStatus, StoreLost
from tarry.service.stores.postgres import (
    finished_tasks,
    lanes,
    live_tasks,
    partitions,
    policies,
    queries,
    records,
    transfer,
)
from tarry.service.stores.postgres.database import Database
from tarry.service.stores.postgres.notifications import Notifications
from tarry.service.stores.write_queues import WriteQueues

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from types import CoroutineType

    from tarry.service import model, store
    from tarry.service.stores.postgres.database import Transaction

_WAKEUP_HORIZON_MS = 500
"""Other processes are notified of tasks that are due within this time. They poll for later ones."""
_LEADER_LEASE_MS = 15_000
"""How long a store stays the leader without another call of `try_lead`."""
_PARTITION_CHECK_INTERVAL_MS = 600_000
_DURABILITY_SETTINGS = {
    "fsync": "a crash of the machine may destroy the database",
    "full_page_writes": "a crash of the machine may destroy the database",
    "synchronous_commit": "the last tasks are lost if PostgreSQL crashes",
}
"""Settings of the server that must not be off, and what happens if they are."""
_READ_SETTINGS = "SELECT name, current_setting(name) FROM unnest($1::text[]) AS s (name)"
_logger = logging.getLogger("tarry.service")
_ADDED = AddStatus.ADDED  # read once, because it takes 0.27 us in Python 3.11
_LIMIT_LOCK_WAIT = "SET LOCAL lock_timeout = '2s'"
_LOCK_TABLES_OF_ADD = """
LOCK TABLE tarry.tenant, tarry.lane, tarry.policy_use, tarry.task_key, tarry.live, tarry.content
IN ROW EXCLUSIVE MODE
"""
_PING = (
    "UPDATE tarry.meta SET value = tarry.now_1($1) WHERE name = 'pinged' RETURNING value, tableoid"
)
_LEAD = """
INSERT INTO tarry.leader AS l VALUES (1, $1, tarry.now_1($2) + $3)
ON CONFLICT (id) DO UPDATE SET token = excluded.token, until = excluded.until
WHERE l.token = excluded.token OR l.until <= tarry.now_1($2) RETURNING true
"""


def runs(
    operation: Callable[Concatenate[Database, P], Awaitable[T]], *, notifies: bool = False
) -> Callable[Concatenate[PostgresTaskStore, P], CoroutineType[Any, Any, T]]:
    """Return a method of the store that runs an operation on its database.

    With `notifies`, other processes may find tasks to claim afterwards.
    """

    async def method(store: PostgresTaskStore, /, *arguments: P.args, **named: P.kwargs) -> T:
        result = await operation(store.database, *arguments, **named)
        if notifies:
            store.notify()
        return result

    return cast("Callable[..., CoroutineType[Any, Any, T]]", method)


class PostgresTaskStore:
    """A store in the PostgreSQL database of a URL; the tables are created by `open`.

    `clock` returns epoch milliseconds, for tests. By default the clock of the server applies, so
    all processes have the same time. With `strict_durability`, `open` fails if the server is
    configured so that acknowledged tasks may be lost. With `must_exist`, it fails if there are no
    tables.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], int] | None = None,
        strict_durability: bool = False,
        must_exist: bool = False,
    ) -> None:
        self.database: Database = Database(url, clock=clock, must_exist=must_exist)
        self._strict_durability = strict_durability
        self._notifications = Notifications(self.database)
        self._leader_token = secrets.token_hex(16)
        self._may_lead = False
        self._next_partition_check = 0
        self._writes = WriteQueues(
            self.partition_of, add=self._add, finish=self._finish, release=self._release
        )
        self.add: Final = self._writes.add
        self.finish: Final = self._writes.finish
        self.release: Final = self._writes.release
        self._meta_id: int | None = None
        """Identifies the table `meta`, and so the store: a table that is created again has another
        id."""

    def _now(self) -> int | None:
        return self.database.now()

    @property
    def partition_count(self) -> int:
        return 1

    def partition_of(self, tenant: str) -> int:  # noqa: ARG002 - there is one partition
        return 0

    async def open(self) -> None:
        await self.database.open()
        self.database.loss = None
        await self._check_durability()
        self._meta_id = await self.database.fetch_value("SELECT tableoid FROM tarry.meta LIMIT 1")
        time = await self.database.fetch_value("SELECT tarry.now_1($1)", self._now())
        await partitions.create_partitions(self.database, time)

    async def _check_durability(self) -> None:
        """Log or raise an error for settings of the server with which commits may be lost."""
        settings = await self.database.fetch(_READ_SETTINGS, list(_DURABILITY_SETTINGS))
        problems = [
            f"{name} is off: {_DURABILITY_SETTINGS[name]}. Set it to on"
            for name, value in settings
            if value == "off"
        ]
        if problems and self._strict_durability:
            await self.database.close()
            rule = "the server must keep acknowledged tasks, because strict_durability is set"
            raise ConfigurationError(f"store: {rule}; {'; '.join(problems)}")
        for problem in problems:
            _logger.warning("PostgreSQL may lose acknowledged tasks: %s", problem)

    async def close(self) -> None:
        await self._writes.close()
        await self._notifications.close()
        if self._may_lead:
            self._may_lead = False
            with suppress(StoreUnavailable):
                statement = "DELETE FROM tarry.leader WHERE token = $1"
                await self.database.fetch(statement, self._leader_token)
        await self.database.close()

    async def ping(self, partition: int | None = None) -> int:  # noqa: ARG002 - there is one
        async def check_add(tx: Transaction) -> Any:
            # The locks of `add`: it waits while another session has locked one of the tables.
            await tx.fetch(_LIMIT_LOCK_WAIT)
            await tx.fetch(_LOCK_TABLES_OF_ADD)
            return await tx.fetch_row(_PING, self._now())

        row = await self.database.transact(check_add, even_if_lost=True)
        if row is None or row["tableoid"] != self._meta_id:
            self.database.loss = (
                f"the tables in schema {self.database.schema.name} were emptied or recreated "
                "while this process ran, and nothing is written to them: restore their data, or "
                "restart this process to use the tables as they are"
            )
            raise StoreLost(self.database.loss)
        self.database.loss = None
        return int(row["value"])

    def notify(self) -> None:
        """Notify other processes, which may find tasks to claim."""
        self._notifications.notify()

    async def _add(
        self,
        tasks: Sequence[store.NewTask],
        terms: store.LeaseTerms | None,
        quota: int | None,
        lane_quota: int | None,
    ) -> list[store.AddResult]:
        results = await live_tasks.add(self.database, tasks, terms, quota, lane_quota)
        if any(_is_claimable(result) for result in results):
            self.notify()
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
        return await live_tasks.claim(self.database, terms, limit, per_lane, lane_limits)

    async def _finish(self, results: Sequence[store.TaskResult]) -> list[store.FinishStatus]:
        statuses = await live_tasks.finish(self.database, results)
        if any(result.callback_task is not None for result in results):
            self.notify()
        return statuses

    async def _release(self, releases: Sequence[store.Release]) -> list[store.FinishStatus]:
        statuses = await live_tasks.release(self.database, releases)
        self.notify()
        return statuses

    def record_start(self, slot: int, task: model.Task) -> None:
        """Do nothing: the leases of a dead process end when they expire."""

    async def release_unknown_leases(
        self,
        terms: store.LeaseTerms,
        known_ids: Collection[str],
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> int:
        count = await live_tasks.release_unknown_leases(self.database, terms, known_ids)
        if count:
            self.notify()
        return count

    async def list_lane_limits(
        self,
        limit: int,
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> list[store.LaneLimits]:
        return await lanes.list_lane_limits(self.database, limit)

    start_replay: Final = runs(finished_tasks.start_replay)
    get_replay: Final = runs(finished_tasks.get_replay)
    list_replays: Final = runs(finished_tasks.list_replays)

    async def replay_step(
        self,
        replay_id: str,
        cursor: str | None,
        task_ids: Sequence[str],
        next_cursor: str | None,
        *,
        quota: int | None = None,
    ) -> model.ReplayRecord | None:
        replay = await finished_tasks.replay_step(
            self.database, replay_id, cursor, task_ids, next_cursor, quota, self._now()
        )
        if task_ids:
            self.notify()
        return replay

    cancel_replay: Final = runs(finished_tasks.cancel_replay)
    put_policy: Final = runs(policies.put_policy)
    get_policy: Final = runs(policies.get_policy)
    list_policies: Final = runs(policies.list_policies)
    delete_policy: Final = runs(policies.delete_policy)

    def listen(self, callback: Callable[[], None]) -> None:
        if self.database.can_listen:
            self._notifications.listen(callback)

    async def try_lead(self) -> bool:
        self._may_lead = True
        rows = await self.database.fetch(_LEAD, self._leader_token, self._now(), _LEADER_LEASE_MS)
        return bool(rows)

    async def sweep(self, retention: store.Retention, limit: int) -> store.SweepResult:
        time, result = await finished_tasks.sweep(self.database, retention, limit, self._now())
        if time >= self._next_partition_check:
            self._next_partition_check = time + _PARTITION_CHECK_INTERVAL_MS
            await partitions.create_partitions(self.database, time)
            await partitions.drop_partitions(self.database, time, retention.succeeded_ms)
        return result

    export_records: Final = runs(transfer.export_records)
    import_records: Final = runs(transfer.import_records)

    async def has_other_processes(self) -> bool | None:
        return None

    async def read_records(
        self, addresses: Sequence[store.RecordAddress]
    ) -> tuple[int, list[store.StoredRecord | None]]:
        return await records.read_records(self.database, addresses, self._now())

    async def list_records(
        self, owner: str, kind: str, *, after: str = "", limit: int = MAX_LISTED_RECORDS
    ) -> tuple[int, list[store.StoredRecord]]:
        return await records.list_records(self.database, owner, kind, after, limit, self._now())

    async def write_records(self, changes: Sequence[store.RecordChange]) -> bool:
        return await records.write_records(self.database, changes, self._now())

    # The other methods run a function of another module.
    cancel: Final = runs(live_tasks.cancel)
    retry_now: Final = runs(live_tasks.retry_now, notifies=True)
    delete_dead_letters: Final = runs(finished_tasks.delete_dead_letters)
    list_orphaned_bodies: Final = runs(finished_tasks.list_orphaned_bodies)
    forget_orphaned_bodies: Final = runs(finished_tasks.forget_orphaned_bodies)

    park: Final = runs(lanes.park)
    unpark: Final = runs(lanes.unpark, notifies=True)
    resume: Final = runs(lanes.resume, notifies=True)
    pause: Final = runs(lanes.pause)
    record_lane_limits: Final = runs(lanes.record_lane_limits)
    set_limits: Final = runs(lanes.set_limits)
    load_limits: Final = runs(lanes.load_limits)
    add_to_budgets: Final = runs(lanes.add_to_budgets)
    list_lanes: Final = runs(lanes.list_lanes)
    get_lane: Final = runs(lanes.get_lane)

    get_task: Final = runs(queries.get_task)
    list_tasks: Final = runs(queries.list_tasks)
    count_tasks: Final = runs(queries.count_tasks)
    last_attempts: Final = runs(queries.last_attempts)
    list_attempts: Final = runs(queries.list_attempts)
    list_attempts_of_tasks: Final = runs(queries.list_attempts_of_tasks)
    counters: Final = runs(queries.counters)
    attempts_per_minute: Final = runs(queries.attempts_per_minute)


def _is_claimable(result: store.AddResult) -> bool:
    """Return whether another process may lease a task that was added."""
    task: Final = result.task
    return (
        not result.leased
        and result.status is _ADDED
        and task.next_attempt_at <= task.created_at + _WAKEUP_HORIZON_MS
    )
