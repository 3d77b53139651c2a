"""Export and import of all records, see `Store.export_records`.

A cursor is a JSON array: the partition, for some kinds the tenant, and the position after the last
record.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace as copy_with

from tarry.errors import ConfigurationError
from tarry.service.store import (
    MAX_PAGE_BYTES,
    DeletedPolicy,
    LaneExport,
    RecordKind,
    RecordPage,
    ReplayedTask,
    StoredRecord,
    StoredTaskFilter,
    TaskAttempt,
)
from tarry.service.stores.records import (
    build_lane_export,
    decode_attempt,
    decode_replay,
    decode_replay_for_export,
    encode,
    encode_limits,
)
from tarry.service.stores.redis import records as keyed_records
from tarry.service.stores.redis.codec import (
    TaskState,
    decode_lane,
    encode_fixed,
    pack_id,
    pack_ids,
    split_rows,
    to_policies,
    to_raw,
    unpack_id,
)
from tarry.service.stores.redis.partitions import GLOBAL_PARTITION
from tarry.service.stores.redis.task_lists import TaskScan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.model import (
        PolicyVersion,
        ReplayRecord,
        Task,
    )
    from tarry.service.stores.redis.partitions import Partitions

    ExportedPage = tuple[list[Any], Any]
    """Records, and the position of the next page; None: there are no more records."""
    TenantExport = Callable[[int, str, Any, int], Awaitable[ExportedPage]]
    PartitionExport = Callable[[int, Any, int], Awaitable[ExportedPage]]

_MAX_TASKS_PER_STEP = 100
_decode_cursor = msgspec.json.Decoder(list[Any]).decode


async def export_records(
    partitions: Partitions, kind: RecordKind, *, cursor: str | None = None, limit: int = 1000
) -> RecordPage[Any]:
    """Return a page of the records of one kind."""
    return await _Exporter(partitions).export_records(kind, cursor, limit)


class _Exporter:
    """Exports the records of a store, partition by partition."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._run = partitions.run
        self._tenant_exports: dict[RecordKind, TenantExport] = {
            RecordKind.POLICY: self._export_policies,
            RecordKind.TASK: self._export_tasks,
            RecordKind.ATTEMPT: self._export_attempts,
        }
        self._partition_exports: dict[RecordKind, PartitionExport] = {
            RecordKind.DELETED_POLICY: self._export_deleted_policies,
            RecordKind.LANE: self._export_lanes,
            RecordKind.RECORD: partial(keyed_records.export_records, partitions),
            RecordKind.REPLAY: self._export_replays,
            RecordKind.REPLAYED_TASK: self._export_replayed_tasks,
        }

    async def export_records(
        self, kind: RecordKind, cursor: str | None, limit: int
    ) -> RecordPage[Any]:
        """Return a page of records; it ends with a step that found some."""
        partition, tenant, position = self._parse_cursor(cursor)
        partition_count = self._partitions.partition_count
        while partition < partition_count:
            if kind in self._partition_exports:
                export = self._partition_exports[kind]
                items, position = await export(partition, position, limit)
            else:
                if tenant is None:
                    tenant = await self._next_tenant(partition, "")
                items = []
                if tenant is not None:
                    export_tenant = self._tenant_exports[kind]
                    items, position = await export_tenant(partition, tenant, position, limit)
                    if position is None:
                        tenant = await self._next_tenant(partition, tenant)
            if position is None and tenant is None:
                partition += 1
            if items:
                next_cursor = msgspec.json.encode([partition, tenant, position]).decode()
                return RecordPage(items, next_cursor if partition < partition_count else None)
        return RecordPage([], None)

    def _parse_cursor(self, cursor: str | None) -> tuple[int, str | None, Any]:
        if cursor is None:
            return 0, None, None
        try:
            partition, tenant, position = _decode_cursor(cursor)
        except (msgspec.DecodeError, ValueError):
            rule = "must be the cursor of an earlier page"
            raise ConfigurationError("cursor", rule, cursor[:50]) from None
        return int(partition), tenant, position

    async def _next_tenant(self, partition: int, tenant: str) -> str | None:
        reply = await self._run(partition, "export", "tenant", tenant, 1)
        return None if reply is None else str(reply.decode())

    async def _export_policies(
        self, partition: int, tenant: str, position: Any, limit: int
    ) -> ExportedPage:
        policy_id, version = position or ("", 0)
        reply = await self._run(partition, "export", "versions", policy_id, limit, tenant, version)
        policies = to_policies(tenant, reply)
        return policies, (policies[-1].id, policies[-1].version) if len(policies) == limit else None

    async def _export_tasks(
        self, partition: int, tenant: str, position: Any, limit: int
    ) -> ExportedPage:
        page = await self._scan(partition, tenant, position).list_tasks(limit)
        return page.items, None if page.cursor is None else int(page.cursor)

    def _scan(self, partition: int, tenant: str, position: int | None) -> TaskScan:
        return TaskScan(
            self._partitions,
            partition,
            tenant,
            StoredTaskFilter(),
            position=position,
            oldest_first=True,
        )

    async def _export_attempts(
        self, partition: int, tenant: str, position: Any, limit: int
    ) -> ExportedPage:
        # The position is the number of a task, and how many of its attempts were exported.
        number, done = position or (0, 0)
        while True:
            page = await self._scan(partition, tenant, number - 1).list_ids(_MAX_TASKS_PER_STEP)
            if not page.items:
                return [], None
            records: list[TaskAttempt] = []
            page_bytes = 0
            for task_number, task_id in page.items:
                first = done if task_number == number else 0
                count, max_bytes = limit - len(records), MAX_PAGE_BYTES - page_bytes
                arguments = (tenant, pack_ids([task_id]), first, count, max_bytes)
                [[_, *attempts]] = await self._run(partition, "attempts", *arguments)
                page_bytes += sum(map(len, attempts))
                decoded = map(decode_attempt, attempts)
                records += [TaskAttempt(tenant, task_id, attempt) for attempt in decoded]
                if len(records) == limit or page_bytes >= MAX_PAGE_BYTES:
                    return records, (task_number, first + len(attempts))
            number, done = page.items[-1][0] + 1, 0
            if records or page.cursor is None:
                return records, None if page.cursor is None else (number, 0)

    async def _export_deleted_policies(
        self, partition: int, position: Any, limit: int
    ) -> ExportedPage:
        last, *fields = await self._run(
            partition, "export", "deleted policies", position or 0, limit
        )
        policies = [
            DeletedPolicy(tenant.decode(), policy_id.decode(), last_version)
            for tenant, policy_id, last_version in split_rows(fields, 3)
        ]
        return policies, last or None

    async def _export_lanes(self, partition: int, position: Any, limit: int) -> ExportedPage:
        first = to_raw(b"(" + (position or "").encode())
        reply = await self._run(partition, "lanes", first, "+", limit)
        lanes: list[LaneExport] = []
        for packed, _, limits in reply:
            lane = decode_lane(packed)
            values = (lane.rate, lane.concurrency, lane.budget, lane.budget_at)
            lanes.append(build_lane_export(lane.to_record(), limits, *values))
        return lanes, lanes[-1].lane.name if len(lanes) == limit else None

    async def _export_replays(self, partition: int, position: Any, limit: int) -> ExportedPage:
        rank = position or 0
        reply = await self._run(partition, "export", "replays", rank, limit)
        replays = [decode_replay_for_export(packed) for packed in reply]
        return replays, rank + limit if len(replays) == limit else None

    async def _export_replayed_tasks(
        self, partition: int, position: Any, limit: int
    ) -> ExportedPage:
        replay_rank, rank = position or (0, 0)
        reply = await self._run(partition, "export", "replays", replay_rank, 1)
        if not reply:
            return [], None
        replay_id = decode_replay(reply[0]).id
        ids = await self._run(partition, "export", "replayed tasks", rank, limit, replay_id)
        tasks = [ReplayedTask(replay_id, unpack_id(packed_id)) for packed_id in ids]
        is_complete = len(tasks) < limit
        return tasks, (replay_rank + 1, 0) if is_complete else (replay_rank, rank + limit)


async def import_records(partitions: Partitions, kind: RecordKind, records: Sequence[Any]) -> None:
    """Store records with all their fields, unless they exist."""
    if kind is RecordKind.REPLAYED_TASK:  # the partition of the replay is not known
        packed = [(record.replay_id, pack_id(record.task_id)) for record in records]
        for partition in range(partitions.partition_count):
            await partitions.run(partition, "import", "replayed_task", packed)
        return
    groups: dict[int, list[tuple[Any, bytes]]] = defaultdict(list)
    for record in records:
        tenant, packed, value = _IMPORTS[kind](record)
        partition = GLOBAL_PARTITION if tenant is None else partitions.partition_of(tenant)
        groups[partition].append((packed, value))
    for partition, group in groups.items():
        arguments, values = zip(*group, strict=True)
        await partitions.run(partition, "import", kind.name.lower(), arguments, values=values)


def _import_policy(policy: PolicyVersion) -> tuple[str | None, Any, bytes]:
    packed = (policy.tenant, policy.id, policy.version, policy.created_at)
    return policy.tenant, packed, policy.document


def _import_deleted_policy(policy: DeletedPolicy) -> tuple[str | None, Any, bytes]:
    return policy.tenant, (policy.tenant, policy.id, policy.last_version), b""


def _import_record(record: StoredRecord) -> tuple[str | None, Any, bytes]:
    tenant = record.owner.partition("/")[0] or None
    return tenant, (record.owner, record.kind, record.key, record.written_at), record.value


def _import_lane(state: LaneExport) -> tuple[str | None, Any, bytes]:
    lane = state.lane
    packed = (
        lane.name,
        lane.parked_until,
        lane.probes,
        lane.consecutive_opens,
        lane.paused,
        lane.last_claim_at,
        encode_limits(state.limits),
        state.rate,
        state.concurrency,
        state.budget,
        state.budget_at,
    )
    return lane.tenant, packed, b""


def _import_task(task: Task) -> tuple[str | None, Any, bytes]:
    state = TaskState(
        number=0,  # `import.lua` sets the first three fields
        lane_id=0,
        policy_use_id=0,
        created_at=task.created_at,
        next_attempt_at=task.next_attempt_at,
        version=task.version,
        status=task.status,
        policy_version=task.policy_version,
        first_due_after_ms=task.first_due_at - task.created_at,
        wake_at=0 if task.wake_at == task.next_attempt_at else task.wake_at,
        reason=task.reason,
        attempts=task.attempts,
        attempts_before_replay=task.attempts_before_replay,
        lost_attempts=task.lost_attempts,
        previous_delay=task.previous_delay,
        backoff_offset=task.backoff_offset,
        last_outcome_kind=task.last_outcome_kind,
        worker=task.worker,
        cancelling=int(task.cancelling),
        replays=task.replays,
        finished_at=task.finished_at,
    )
    packed = (pack_id(task.id), task.lane, task.policy_id, task.key, pack_id(task.key), state)
    return task.tenant, packed, encode_fixed(task)


def _import_attempt(record: TaskAttempt) -> tuple[str | None, Any, bytes]:
    packed = (record.tenant, pack_id(record.task_id), record.attempt.attempt_number)
    return record.tenant, packed, encode(record.attempt)


def _import_replay(replay: ReplayRecord) -> tuple[str | None, Any, bytes]:
    return replay.tenant, (), encode(copy_with(replay, cursor=None, count_cursor=None))


_IMPORTS: dict[RecordKind, Callable[[Any], tuple[str | None, Any, bytes]]] = {
    RecordKind.POLICY: _import_policy,
    RecordKind.DELETED_POLICY: _import_deleted_policy,
    RecordKind.LANE: _import_lane,
    RecordKind.RECORD: _import_record,
    RecordKind.TASK: _import_task,
    RecordKind.ATTEMPT: _import_attempt,
    RecordKind.REPLAY: _import_replay,
}
"""For each kind, a function that returns the tenant of a record (None: no tenant), its arguments of
`import.lua`, and its binary part."""
