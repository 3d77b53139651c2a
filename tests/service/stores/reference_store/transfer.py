"""Export and import of the records of a reference store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from tarry.service.model import AttemptRecord, PolicyVersion
from tarry.service.store import (
    DeletedPolicy,
    LaneExport,
    LaneLimits,
    RecordKind,
    ReplayedTask,
    TaskAttempt,
)
from tests.service.stores.reference_store.state import ReferenceState, Row


def _sorted_rows(state: ReferenceState) -> list[Row]:
    return [row for _, row in sorted(state.rows.items())]


def _lane_state(state: ReferenceState, name: str) -> LaneExport:
    limits = state.lane_limits.get(name)
    return LaneExport(
        replace(state.queues[name].lane),
        state.limits.by_lane.get(name),
        None if limits is None else limits.rate,
        None if limits is None else limits.concurrency,
        *state.budgets.get(name, (0.0, 0)),
    )


EXPORTS: dict[RecordKind, Callable[[ReferenceState], list[Any]]] = {
    RecordKind.POLICY: lambda state: [
        replace(policy)
        for owner in state.tenants.values()
        for versions in owner.policies.values()
        for policy in versions
    ],
    RecordKind.DELETED_POLICY: lambda state: [
        DeletedPolicy(owner.name, policy_id, version)
        for owner in state.tenants.values()
        for policy_id, version in owner.policy_versions.items()
        if policy_id not in owner.policies and version
    ],
    RecordKind.LANE: lambda state: [_lane_state(state, name) for name in state.queues],
    RecordKind.RECORD: lambda state: [
        record for _, record in sorted(state.records.items()) if record.expires_at is None
    ],
    RecordKind.TASK: lambda state: [replace(row.task) for row in _sorted_rows(state)],
    RecordKind.ATTEMPT: lambda state: [
        TaskAttempt(row.task.tenant, row.task.id, msgspec.msgpack.decode(entry, type=AttemptRecord))
        for row in _sorted_rows(state)
        for entry in row.log
    ],
    RecordKind.REPLAY: lambda state: [
        replace(replay, finished=dict(replay.finished), cursor=None, count_cursor=None)
        for replay in state.replays.values()
    ],
    RecordKind.REPLAYED_TASK: lambda state: [
        ReplayedTask(replay_id, task_id)
        for replay_id, task_ids in state.replayed_ids.items()
        for task_id in sorted(task_ids)
    ],
}
"""For each kind, a function that returns copies of all records."""


def import_record(state: ReferenceState, kind: RecordKind, record: Any, now: int) -> None:
    """Store a record, unless it is stored already."""
    match kind:
        case RecordKind.POLICY:
            _import_policy(state, record)
        case RecordKind.DELETED_POLICY:
            state.tenant(record.tenant).policy_versions[record.id] = record.last_version
        case RecordKind.RECORD:
            if state.may_own_records(record.owner):
                state.records.setdefault((record.owner, record.kind, record.key), record)
        case RecordKind.LANE:
            _import_lane(state, record, now)
        case RecordKind.TASK:
            if record.id not in state.ids and record.key not in state.tenant(record.tenant).keys:
                state.insert(replace(record), now)
        case RecordKind.ATTEMPT:
            row = state.row(record.task_id, record.tenant)
            if row is not None and len(row.log) < record.attempt.attempt_number:
                row.log.append(msgspec.msgpack.encode(record.attempt))
        case RecordKind.REPLAY:
            state.replays.setdefault(record.id, replace(record, finished=dict(record.finished)))
        case RecordKind.REPLAYED_TASK:
            state.replayed_ids.setdefault(record.replay_id, set()).add(record.task_id)


def _import_policy(state: ReferenceState, policy: PolicyVersion) -> None:
    owner = state.tenant(policy.tenant)
    versions = owner.policies.setdefault(policy.id, [])
    if all(policy.version != existing.version for existing in versions):
        if versions:
            owner.replaced_at[policy.id, versions[-1].version] = policy.created_at
        versions.append(replace(policy))
        owner.policy_versions[policy.id] = policy.version


def _import_lane(state: ReferenceState, lane_state: LaneExport, now: int) -> None:
    name = lane_state.lane.name
    queue = state.queue(name)
    state.tenant(queue.lane.tenant)
    queue.lane = replace(
        lane_state.lane,
        pending=queue.lane.pending,
        in_flight=queue.lane.in_flight,
        exhausted=queue.lane.exhausted,
    )
    by_lane = {lane: limits for lane, limits in state.limits.by_lane.items() if lane != name}
    if lane_state.limits is not None:
        by_lane[name] = lane_state.limits
    state.limits = replace(state.limits, version=state.limits.version + 1, by_lane=by_lane)
    if lane_state.concurrency is not None:
        state.lane_limits[name] = LaneLimits(name, lane_state.rate, lane_state.concurrency)
    state.budgets[name] = (lane_state.budget, lane_state.budget_at)
    state.schedule(queue, now)
