"""Export and import of all records; see `TaskStore`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tarry.service.model import (
    LaneRecord,
    PolicyVersion,
    ReplayRecord,
    Task,
)
from tarry.service.store import (
    MAX_PAGE_BYTES,
    DeletedPolicy,
    LaneExport,
    RecordKind,
    RecordPage,
    ReplayedTask,
    TaskAttempt,
)
from tarry.service.stores.records import (
    LANE_FIELD_COUNT,
    build_lane_export,
    decode_attempt,
    decode_replay_for_export,
    encode,
    encode_limits,
)
from tarry.service.stores.sqlite.finished_tasks import insert_replay
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import (
    SELECT_TASK,
    SEQ,
    attempt_row_id,
    decode_row,
    decode_task,
    pack_id,
    unpack_id,
)
from tarry.service.stores.sqlite.records import export_records as export_records_of_all_owners
from tarry.service.stores.sqlite.records import import_records
from tarry.service.stores.sqlite.transaction import IN_FLIGHT, PENDING, WriteTransaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.stores.sqlite.transaction import ReadTransaction

    Row = Sequence[Any]

# Each statement reads the rows after a key: ?1, or ?1 and ?2 if the key has two columns. The last
# columns of a row are its key. Policies are in the order in which they were written, so the
# versions of each policy are ascending.
_EXPORTS = {
    RecordKind.POLICY: """
        SELECT n.name, p.id, p.version, p.document, p.created_at, p.rowid
        FROM policy AS p CROSS JOIN tenant AS n ON n.id = p.tenant
        WHERE p.rowid > ?1 ORDER BY p.rowid LIMIT ?3
    """,
    RecordKind.DELETED_POLICY: """
        SELECT n.name, u.policy, u.deleted_version, u.id
        FROM policy_use AS u CROSS JOIN tenant AS n ON n.id = u.tenant
        WHERE u.id > ?1 AND u.deleted_version > 0 ORDER BY u.id LIMIT ?3
    """,
    RecordKind.LANE: """
        SELECT l.name, n.name, l.parked_until, l.probes, l.consecutive_opens, l.paused,
            l.pending, l.in_flight, l.exhausted, l.last_claim_at, l.limits, l.rate, l.concurrency,
            l.budget, l.budget_at, l.id
        FROM lane AS l CROSS JOIN tenant AS n ON n.id = l.tenant
        WHERE l.id > ?1 ORDER BY l.id LIMIT ?3
    """,
    RecordKind.TASK: f"{SELECT_TASK} WHERE s.seq > ?1 ORDER BY s.seq LIMIT ?3",
    RecordKind.ATTEMPT: """
        SELECT n.name, t.id, a.log, a.id FROM attempt AS a
        CROSS JOIN task AS t ON t.seq = a.id >> 24 CROSS JOIN tenant AS n ON n.id = t.tenant
        WHERE a.id > ?1 ORDER BY a.id LIMIT ?3
    """,
    RecordKind.REPLAY: "SELECT job, rowid FROM replay WHERE rowid > ?1 ORDER BY rowid LIMIT ?3",
    RecordKind.REPLAYED_TASK: """
        SELECT replay, hex(task), replay, hex(task) FROM replay_task
        WHERE (replay, task) > (?1, ?2) ORDER BY replay, task LIMIT ?3
    """,
}
_INSERT_TASK = """
INSERT INTO task (id, tenant, key, created_at, policy_version, fingerprint,
    owned_body_ref, packed_content)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING seq
"""
_INSERT_STATE = """
INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at, first_due_at,
    version, attempts, attempts_before_replay, lost_attempts, backoff_offset, replays, cancelling,
    worker, previous_delay, last_outcome_kind, reason, finished_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_COUNT_TASK_OF_VERSION = (
    "UPDATE policy SET tasks = tasks + 1 WHERE tenant = ? AND id = ? AND version = ?"
)


def export_records(
    tx: ReadTransaction, kind: RecordKind, *, cursor: str | None = None, limit: int = 1000
) -> RecordPage[Any]:
    """Return a page of records; the cursor is the key of the last row, in JSON."""
    if kind is RecordKind.RECORD:
        return _export_records(tx, cursor, limit)
    key_size = 2 if kind is RecordKind.REPLAYED_TASK else 1
    key: list[Any] = [0] if key_size == 1 else ["", ""]
    if cursor is not None:
        key = json.loads(cursor)
    after = bytes.fromhex(key[-1]) if kind is RecordKind.REPLAYED_TASK else key[-1]
    items: list[Any] = []
    page_bytes = 0
    decode = _DECODERS[kind]
    for row in tx.execute(_EXPORTS[kind], (key[0], after, limit)):
        items.append(decode(row))
        page_bytes += sum(len(value) for value in row if isinstance(value, bytes))
        key = [row[SEQ]] if kind is RecordKind.TASK else list(row[-key_size:])
        if page_bytes >= MAX_PAGE_BYTES or len(items) == limit:
            return RecordPage(items, json.dumps(key))
    return RecordPage(items, None)


def _export_records(tx: ReadTransaction, cursor: str | None, limit: int) -> RecordPage[Any]:
    after = ("", "", "") if cursor is None else json.loads(cursor)
    records = export_records_of_all_owners(tx, after, limit)
    if not records:
        return RecordPage([], None)
    last = records[-1]
    return RecordPage(records, json.dumps([last.owner, last.kind, last.key]))


def _decode_lane(row: Row) -> LaneExport:
    lane = decode_row(row[:LANE_FIELD_COUNT], LaneRecord)
    return build_lane_export(lane, *row[LANE_FIELD_COUNT:-1])


_DECODERS: dict[RecordKind, Callable[[Row], Any]] = {
    RecordKind.POLICY: lambda row: decode_row(row[:-1], PolicyVersion),
    RecordKind.DELETED_POLICY: lambda row: DeletedPolicy(*row[:-1]),
    RecordKind.LANE: _decode_lane,
    RecordKind.TASK: decode_task,
    RecordKind.ATTEMPT: lambda row: TaskAttempt(row[0], unpack_id(row[1]), decode_attempt(row[2])),
    RecordKind.REPLAY: lambda row: decode_replay_for_export(row[0]),
    RecordKind.REPLAYED_TASK: lambda row: ReplayedTask(row[0], unpack_id(bytes.fromhex(row[1]))),
}


@write_operation
def import_policies(tx: WriteTransaction, policies: Sequence[PolicyVersion]) -> None:
    """Store versions of policies, unless they are stored already."""
    for policy in policies:
        tenant_id = tx.names.tenant_id(policy.tenant)
        key = (tenant_id, policy.id, policy.version)
        is_new = tx.execute(
            "INSERT OR IGNORE INTO policy (tenant, id, version, document, created_at) "
            "VALUES (?, ?, ?, ?, ?)",
            (*key, policy.document, policy.created_at),
        ).rowcount
        if is_new:
            tx.execute(
                "UPDATE policy SET replaced_at = ? "
                "WHERE tenant = ? AND id = ? AND version < ? AND replaced_at IS NULL",
                (policy.created_at, *key),
            )


@write_operation
def import_deleted_policies(tx: WriteTransaction, policies: Sequence[DeletedPolicy]) -> None:
    """Store the last version numbers of deleted policies."""
    for policy in policies:
        policy_id = tx.names.policy_id(policy.tenant, policy.id)
        statement = "UPDATE policy_use SET deleted_version = ? WHERE id = ?"
        tx.execute(statement, (policy.last_version, policy_id))


@write_operation
def import_lanes(tx: WriteTransaction, lanes: Sequence[LaneExport]) -> None:
    """Store lanes with their limits, budgets, parking and pause."""
    for state in lanes:
        row = tx.lane(tx.names.lane_id(state.lane.name))
        row.parked_until, row.probes = state.lane.parked_until, state.lane.probes
        row.consecutive_opens, row.paused = state.lane.consecutive_opens, int(state.lane.paused)
        row.last_claim_at = state.lane.last_claim_at
        row.put_to_sleep()
        limits = encode_limits(state.limits)
        tx.execute(
            "UPDATE lane SET limits = ?, rate = ?, concurrency = ?, budget = ?, budget_at = ? "
            "WHERE id = ?",
            (limits, state.rate, state.concurrency, state.budget, state.budget_at, row.id),
        )
    tx.execute("UPDATE meta SET value = value + 1 WHERE name = 'limits_version'")


@write_operation
def import_tasks(tx: WriteTransaction, tasks: Sequence[Task]) -> None:
    """Store tasks in any status, unless their ids or idempotency keys are stored already."""
    for task in tasks:
        tenant_id = tx.names.tenant_id(task.tenant)
        row = tx.execute(
            _INSERT_TASK,
            (
                pack_id(task.id),
                tenant_id,
                task.key,
                task.created_at,
                task.policy_version,
                task.fingerprint,
                task.owned_body_ref,
                task.packed_content,
            ),
        ).fetchone()
        if row is not None:
            _insert_state(tx, task, row[0], tenant_id)


def _insert_state(tx: WriteTransaction, task: Task, seq: int, tenant_id: int) -> None:
    lane = tx.lane(tx.names.lane_id(task.lane))
    policy_id = tx.names.policy_id(task.tenant, task.policy_id)
    status = int(task.status)
    tx.execute(
        _INSERT_STATE,
        (
            seq,
            tenant_id,
            lane.id,
            policy_id,
            status,
            task.wake_at,
            task.next_attempt_at,
            task.first_due_at,
            task.version,
            task.attempts,
            task.attempts_before_replay,
            task.lost_attempts,
            task.backoff_offset,
            task.replays,
            int(task.cancelling),
            None if task.worker is None else _other_worker_id(tx, task.worker),
            task.previous_delay,
            task.last_outcome_kind,
            task.reason,
            task.finished_at,
        ),
    )
    if status == PENDING:
        lane.lower_due_at(task.wake_at)
    elif status == IN_FLIGHT:
        lane.lower_lease_end_at(task.wake_at)
    tx.count_transition(tenant_id, lane, policy_id, None, status)
    if task.policy_version is not None:
        tx.execute(_COUNT_TASK_OF_VERSION, (tenant_id, task.policy_id, task.policy_version))


def _other_worker_id(tx: WriteTransaction, name: str) -> int:
    """Return the id of a worker that is no process of this file: its leases end when they expire.

    A worker with the lock of a process would lose its leases when that process ends.
    """
    statement = "SELECT id FROM worker WHERE name = ? AND lock IS NULL"
    row = tx.execute(statement, (name,)).fetchone()
    if row is None:
        statement = "INSERT INTO worker (name) VALUES (?) RETURNING id"
        row = tx.execute(statement, (name,)).fetchone()
    return int(row[0])


@write_operation
def import_attempts(tx: WriteTransaction, attempts: Sequence[TaskAttempt]) -> None:
    """Store entries of attempt logs, unless they are stored already."""
    seqs: dict[str, int | None] = {}
    rows: list[tuple[int, bytes]] = []
    for entry in attempts:
        if entry.task_id not in seqs:
            statement = "SELECT seq FROM task WHERE id = ?"
            found = tx.execute(statement, (pack_id(entry.task_id),)).fetchone()
            seqs[entry.task_id] = None if found is None else found[0]
        seq = seqs[entry.task_id]
        if seq is not None:
            rows.append((attempt_row_id(seq, entry.attempt.attempt_number), encode(entry.attempt)))
    tx.executemany("INSERT OR IGNORE INTO attempt VALUES (?, ?)", rows)


@write_operation
def import_replays(tx: WriteTransaction, replays: Sequence[ReplayRecord]) -> None:
    """Store replays, unless they are stored already."""
    for replay in replays:
        insert_replay(tx, replay)


@write_operation
def import_replayed_tasks(tx: WriteTransaction, tasks: Sequence[ReplayedTask]) -> None:
    """Store which tasks of replays have not finished."""
    rows = [(task.replay_id, pack_id(task.task_id)) for task in tasks]
    tx.executemany("INSERT OR IGNORE INTO replay_task VALUES (?, ?)", rows)


IMPORTS: dict[RecordKind, Callable[[WriteTransaction, Sequence[Any]], None]] = {
    RecordKind.POLICY: import_policies,
    RecordKind.DELETED_POLICY: import_deleted_policies,
    RecordKind.LANE: import_lanes,
    RecordKind.RECORD: import_records,
    RecordKind.TASK: import_tasks,
    RecordKind.ATTEMPT: import_attempts,
    RecordKind.REPLAY: import_replays,
    RecordKind.REPLAYED_TASK: import_replayed_tasks,
}
"""The function that imports the records of each kind."""
