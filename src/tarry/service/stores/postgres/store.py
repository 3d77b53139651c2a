"""`PostgresTaskStore`: implements `tarry.service.store.Store` with a PostgreSQL database."""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tarry.service import model, store
    from tarry.service.stores.postgres.database import Transaction
    from tarry.wire.tasks import DownstreamLimits

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
        self.database: Database = Database(url, must_exist=must_exist)
        self._clock = clock
        self._strict_durability = strict_durability
        self._notifications = Notifications(self.database)
        self._leader_token = secrets.token_hex(16)
        self._may_lead = False
        self._next_partition_check = 0
        self._meta_id: int | None = None
        """Identifies the table `meta`, and so the store: a table that is created again has another
        id."""

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock()

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

    async def add(
        self,
        tasks: Sequence[store.NewTask],
        terms: store.LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> list[store.AddResult]:
        now = self._now()
        results = await live_tasks.add(self.database, tasks, terms, quota, lane_quota, now)
        if any(_is_claimable(result) for result in results):
            self._notifications.notify()
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
        now = self._now()
        return await live_tasks.claim(self.database, terms, limit, per_lane, lane_limits, now)

    async def finish(self, results: Sequence[store.TaskResult]) -> list[store.FinishStatus]:
        statuses = await live_tasks.finish(self.database, results, self._now())
        if any(result.callback_task is not None for result in results):
            self._notifications.notify()
        return statuses

    async def release(self, releases: Sequence[store.Release]) -> list[store.FinishStatus]:
        statuses = await live_tasks.release(self.database, releases, self._now())
        self._notifications.notify()
        return statuses

    def record_start(self, slot: int, task: model.Task) -> None:
        """Do nothing: the leases of a dead process end when they expire."""

    async def release_unknown_leases(
        self,
        terms: store.LeaseTerms,
        known_ids: Collection[str],
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> int:
        now = self._now()
        count = await live_tasks.release_unknown_leases(self.database, terms, known_ids, now)
        if count:
            self._notifications.notify()
        return count

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        await lanes.park(self.database, lane, until, probes, consecutive_opens)

    async def unpark(self, lane: str) -> None:
        await lanes.unpark(self.database, lane)
        self._notifications.notify()

    async def resume(self, lane: str) -> None:
        await lanes.resume(self.database, lane)
        self._notifications.notify()

    async def pause(self, lane: str, *, lane_quota: int | None = None) -> store.LaneWriteStatus:
        return await lanes.pause(self.database, lane, lane_quota)

    async def record_lane_limits(self, limits: Sequence[store.LaneLimits]) -> None:
        await lanes.record_lane_limits(self.database, limits)

    async def list_lane_limits(
        self,
        limit: int,
        partition: int | None = None,  # noqa: ARG002 - there is one partition
    ) -> list[store.LaneLimits]:
        return await lanes.list_lane_limits(self.database, limit)

    async def set_limits(
        self,
        lane: str,
        limits: DownstreamLimits | None,
        *,
        max_limited: int,
        lane_quota: int | None = None,
    ) -> store.LaneWriteStatus:
        return await lanes.set_limits(self.database, lane, limits, max_limited, lane_quota)

    async def load_limits(self, known: store.ConfiguredLimits) -> store.ConfiguredLimits | None:
        return await lanes.load_limits(self.database, known, self._now())

    async def add_to_budgets(self, changes: dict[str, float]) -> dict[str, float]:
        return await lanes.add_to_budgets(self.database, changes, self._now())

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> store.RecordPage[model.LaneRecord]:
        return await lanes.list_lanes(self.database, tenant, cursor, limit)

    async def get_lane(self, name: str) -> model.LaneRecord | None:
        return await lanes.get_lane(self.database, name)

    async def get_task(self, tenant: str, task_id: str) -> model.Task | None:
        return await queries.get_task(self.database, tenant, task_id)

    async def list_tasks(
        self,
        tenant: str,
        task_filter: store.StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> store.RecordPage[model.Task]:
        return await queries.list_tasks(
            self.database, tenant, task_filter, cursor, limit, oldest_first=oldest_first
        )

    async def count_tasks(self, tenant: str, task_filter: store.StoredTaskFilter) -> int:
        return await queries.count_tasks(self.database, tenant, task_filter)

    async def last_attempts(
        self, tenant: str, task_ids: Sequence[str]
    ) -> dict[str, model.AttemptRecord]:
        return await queries.last_attempts(self.database, tenant, task_ids)

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[model.AttemptRecord]:
        return await queries.list_attempts(self.database, tenant, task_id, after, limit)

    async def list_attempts_of_tasks(
        self,
        tenant: str,
        task_filter: store.StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
    ) -> store.RecordPage[tuple[str, model.AttemptRecord]]:
        return await queries.list_attempts_of_tasks(
            self.database, tenant, task_filter, cursor, limit
        )

    async def cancel(self, tenant: str, task_id: str) -> store.CancelStatus | None:
        return await live_tasks.cancel(self.database, tenant, task_id, self._now())

    async def retry_now(
        self, tenant: str, task_id: str, *, quota: int | None = None
    ) -> store.RetryNowStatus | None:
        status = await live_tasks.retry_now(self.database, tenant, task_id, quota, self._now())
        self._notifications.notify()
        return status

    async def start_replay(self, replay: model.ReplayRecord) -> model.ReplayRecord:
        return await finished_tasks.start_replay(self.database, replay, self._now())

    async def get_replay(self, tenant: str, replay_id: str) -> model.ReplayRecord | None:
        return await finished_tasks.get_replay(self.database, tenant, replay_id)

    async def list_replays(
        self, *, running: bool, tenant: str | None = None
    ) -> list[model.ReplayRecord]:
        return await finished_tasks.list_replays(self.database, running=running, tenant=tenant)

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
            self._notifications.notify()
        return replay

    async def cancel_replay(self, tenant: str, replay_id: str) -> model.ReplayRecord | None:
        return await finished_tasks.cancel_replay(self.database, tenant, replay_id, self._now())

    async def delete_dead_letters(self, tenant: str, task_ids: Sequence[str]) -> int:
        return await finished_tasks.delete_dead_letters(self.database, tenant, task_ids)

    async def put_policy(
        self, policy: model.PolicyVersion, *, replace: bool, quota: int | None = None
    ) -> tuple[store.PolicyWriteStatus, model.PolicyVersion]:
        now = self._now()
        return await policies.put_policy(
            self.database, policy, replace=replace, quota=quota, now=now
        )

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> model.PolicyVersion | None:
        return await policies.get_policy(self.database, tenant, policy_id, version)

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> store.RecordPage[model.PolicyVersion]:
        return await policies.list_policies(self.database, tenant, cursor, limit)

    async def delete_policy(self, tenant: str, policy_id: str) -> store.PolicyWriteStatus:
        return await policies.delete_policy(self.database, tenant, policy_id)

    def listen(self, callback: Callable[[], None]) -> None:
        if self.database.can_listen:
            self._notifications.listen(callback)

    async def try_lead(self) -> bool:
        self._may_lead = True
        rows = await self.database.fetch(_LEAD, self._leader_token, self._now(), _LEADER_LEASE_MS)
        return bool(rows)

    async def counters(self, tenant: str | None = None) -> store.Counters:
        return await queries.counters(self.database, tenant, self._now())

    async def attempts_per_minute(
        self, tenant: str | None, *, since: int
    ) -> list[store.AttemptsOfMinute]:
        return await queries.attempts_per_minute(self.database, tenant, since, self._now())

    async def sweep(self, retention: store.Retention, limit: int) -> store.SweepResult:
        time, result = await finished_tasks.sweep(self.database, retention, limit, self._now())
        if time >= self._next_partition_check:
            self._next_partition_check = time + _PARTITION_CHECK_INTERVAL_MS
            await partitions.create_partitions(self.database, time)
            await partitions.drop_partitions(self.database, time, retention.succeeded_ms)
        return result

    async def list_orphaned_bodies(self, limit: int) -> list[str]:
        return await finished_tasks.list_orphaned_bodies(self.database, limit)

    async def forget_orphaned_bodies(self, refs: Sequence[str]) -> None:
        await finished_tasks.forget_orphaned_bodies(self.database, refs)

    async def export_records(
        self, kind: store.RecordKind, *, cursor: str | None = None, limit: int = 1000
    ) -> store.RecordPage[Any]:
        return await transfer.export_records(self.database, kind, cursor, limit)

    async def import_records(self, kind: store.RecordKind, records: Sequence[Any]) -> None:
        await transfer.import_records(self.database, kind, records)

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


def _is_claimable(result: store.AddResult) -> bool:
    """Return whether another process may lease a task that was added."""
    task = result.task
    return (
        not result.leased
        and result.status is _ADDED
        and task.next_attempt_at <= task.created_at + _WAKEUP_HORIZON_MS
    )
