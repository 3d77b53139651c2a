"""Export and import of all records, and the mark of a store that is moved; see `Store`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tarry.service.model import (
    LaneRecord,
    PolicyVersion,
    ReplayRecord,
    Status,
    Task,
)
from tarry.service.rules.replays import replay_columns
from tarry.service.store import (
    MAX_PAGE_BYTES,
    DeletedPolicy,
    LaneExport,
    RecordKind,
    RecordPage,
    ReplayedTask,
    TaskAttempt,
)
from tarry.service.stores.postgres import records
from tarry.service.stores.postgres.constants import (
    FIRST_ATTEMPT_QUEUE,
    LEASED_QUEUE,
    LIVE_COLUMNS,
    RETRY_QUEUE,
    SEQ_DAY_BITS,
    TASK_JOINS,
)
from tarry.service.stores.postgres.rows import (
    FINISHED_COLUMNS,
    FINISHED_STATUSES,
    decode_attempt,
    decode_row,
    decode_task,
    decode_text,
    encode_optional,
    encode_text,
    encode_texts,
)
from tarry.service.stores.records import (
    LANE_FIELD_COUNT,
    build_lane_export,
    decode_replay_for_export,
    encode,
    encode_limits,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.stores.postgres.database import Database, Transaction

    Row = Sequence[Any]

_DAY_MS = 86_400_000
_CHUNK_ROWS = 50
"""Rows that are read at once: a task or an attempt may be large."""
# For each kind: a statement that reads the rows after a key ($2 and following), and the first key.
# The last columns of a row are its key.
_EXPORTS: dict[RecordKind, tuple[str, list[Any]]] = {
    RecordKind.POLICY: (
        """
        SELECT n.name, p.id, p.version, p.document, p.created_at, p.tenant, p.id, p.version
        FROM tarry.policy AS p JOIN tarry.tenant AS n ON n.id = p.tenant
        WHERE (p.tenant, p.id, p.version) > ($2, $3, $4)
        ORDER BY p.tenant, p.id, p.version LIMIT $1
        """,
        [0, "", 0],
    ),
    RecordKind.DELETED_POLICY: (
        """
        SELECT n.name, u.policy, u.deleted_version, u.id
        FROM tarry.policy_use AS u JOIN tarry.tenant AS n ON n.id = u.tenant
        WHERE u.id > $2 AND u.deleted_version > 0 ORDER BY u.id LIMIT $1
        """,
        [0],
    ),
    RecordKind.LANE: (
        """
        SELECT l.name, n.name, l.parked_until, l.probes, l.consecutive_opens, l.paused, l.pending,
            l.in_flight, l.exhausted, l.last_claim_at, l.limits, l.rate, l.concurrency, l.budget,
            l.budget_at, l.id
        FROM tarry.lane AS l JOIN tarry.tenant AS n ON n.id = l.tenant
        WHERE l.id > $2 ORDER BY l.id LIMIT $1
        """,
        [0],
    ),
    RecordKind.TASK: (
        f"""
        WITH wanted AS MATERIALIZED (
            SELECT k.tenant, k.seq FROM tarry.task_key AS k WHERE k.seq > $2
            ORDER BY k.seq LIMIT $1
        ), found AS (
            SELECT {LIVE_COLUMNS} FROM wanted AS w
            JOIN tarry.live AS s ON s.tenant = w.tenant AND s.seq = w.seq {TASK_JOINS}
            UNION ALL
            SELECT {FINISHED_COLUMNS} FROM wanted AS w
            JOIN tarry.finished AS s
                ON s.tenant = w.tenant AND s.status IN {FINISHED_STATUSES} AND s.seq = w.seq
            {TASK_JOINS}
        )
        SELECT * FROM found ORDER BY seq
        """,
        [0],
    ),
    RecordKind.ATTEMPT: (
        """
        SELECT n.name, k.id::text, a.number, a.due_at, a.worker, a.log, a.seq, a.number
        FROM tarry.attempt AS a JOIN tarry.task_key AS k ON k.seq = a.seq
        JOIN tarry.tenant AS n ON n.id = k.tenant
        WHERE (a.seq, a.number) > ($2, $3) ORDER BY a.seq, a.number LIMIT $1
        """,
        [0, 0],
    ),
    RecordKind.REPLAY: (
        "SELECT job, id FROM tarry.replay WHERE id > $2 ORDER BY id LIMIT $1",
        [""],
    ),
    RecordKind.REPLAYED_TASK: (
        """
        SELECT replay, task::text, replay, task::text FROM tarry.replay_task
        WHERE (replay, task) > ($2, $3::uuid) ORDER BY replay, task LIMIT $1
        """,
        ["", "00000000-0000-0000-0000-000000000000"],
    ),
}
_INSERT_POLICY = """
INSERT INTO tarry.policy (tenant, id, version, document, created_at)
VALUES ((tarry.tenants_1(ARRAY[$1::text]))[1], $2, $3, $4, $5) ON CONFLICT DO NOTHING
RETURNING tenant
"""
_MARK_REPLACED = """
UPDATE tarry.policy SET replaced_at = $1
WHERE tenant = $2 AND id = $3 AND version < $4 AND replaced_at IS NULL
"""
_USE_POLICY = """
INSERT INTO tarry.policy_use AS u (tenant, policy)
VALUES ((tarry.tenants_1(ARRAY[$1::text]))[1], $2)
ON CONFLICT (tenant, policy) DO UPDATE SET tenant = excluded.tenant RETURNING u.id
"""
_MARK_DELETED = "UPDATE tarry.policy_use SET deleted_version = $2 WHERE id = $1"
_UPDATE_LANE = """
UPDATE tarry.lane SET last_claim_at = $2, limits = $3, rate = $4, concurrency = $5, budget = $6,
    budget_at = $7
WHERE name = $1
"""
_CHANGE_LANE = "SELECT tarry.change_lane_1($1, true, $2, $3, $4, $5)"
_INCREMENT_LIMITS_VERSION = "UPDATE tarry.meta SET value = value + 1 WHERE name = 'limits_version'"
# The day in `seq` is that of the task's creation, see `schema`.
_INSERT_KEYS = f"""
INSERT INTO tarry.task_key (seq, id, tenant, key)
SELECT i.day << {SEQ_DAY_BITS} | nextval('tarry.task_number'), i.id, i.tenant, i.key
FROM unnest($1::bigint[], $2::uuid[], $3::integer[], $4::text[]) WITH ORDINALITY
    AS i (day, id, tenant, key, ord)
ORDER BY i.ord ON CONFLICT DO NOTHING RETURNING id::text, seq
"""
_INSERT_CONTENTS = """
INSERT INTO tarry.content (seq, id, policy_version, key, fingerprint, body_ref, content)
SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::integer[], $4::text[], $5::bytea[], $6::text[],
    $7::bytea[])
"""
_INSERT_LIVE = """
INSERT INTO tarry.live (tenant, seq, lane, policy, queue, wake_at, next_attempt_at, first_due_at,
    created_at, version, attempts, attempts_before_replay, lost_attempts, backoff_offset, replays,
    cancelling, previous_delay, worker, last_outcome_kind)
SELECT * FROM unnest($1::integer[], $2::bigint[], $3::integer[], $4::integer[], $5::smallint[],
    $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[], $10::integer[], $11::integer[],
    $12::integer[], $13::integer[], $14::integer[], $15::integer[], $16::boolean[],
    $17::double precision[], $18::text[], $19::text[])
"""
_INSERT_FINISHED = """
INSERT INTO tarry.finished (tenant, status, seq, lane, policy, finished_at, next_attempt_at,
    first_due_at, created_at, version, attempts, attempts_before_replay, lost_attempts,
    backoff_offset, replays, previous_delay, last_outcome_kind, reason)
SELECT * FROM unnest($1::integer[], $2::smallint[], $3::bigint[], $4::integer[], $5::integer[],
    $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[], $10::integer[], $11::integer[],
    $12::integer[], $13::integer[], $14::integer[], $15::integer[], $16::double precision[],
    $17::text[], $18::text[])
"""
_APPLY = """
SELECT tarry.apply_1(array_agg(ROW(i.*)::tarry.change_1))
FROM unnest($1::integer[], $2::integer[], $3::integer[], $4::integer[], $5::integer[],
    $6::integer[], $7::integer[], $8::integer[], $9::integer[], $9::integer[], $10::bigint[],
    $11::bigint[]) AS i
"""
_COUNT_VERSION = """
UPDATE tarry.policy SET tasks = tasks + 1 WHERE tenant = $1 AND id = $2 AND version = $3
"""
_INSERT_ATTEMPTS = """
INSERT INTO tarry.attempt (seq, number, log)
SELECT k.seq, i.number, i.log
FROM unnest($1::uuid[], $2::integer[], $3::bytea[]) AS i (id, number, log)
JOIN tarry.task_key AS k ON k.id = i.id ON CONFLICT DO NOTHING
"""
_INSERT_REPLAY = """
INSERT INTO tarry.replay (id, tenant, created_at, next_at, running, job)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING
"""
_INSERT_REPLAYED = """
INSERT INTO tarry.replay_task SELECT * FROM unnest($1::text[], $2::uuid[]) ON CONFLICT DO NOTHING
"""


async def export_records(
    database: Database, kind: RecordKind, *, cursor: str | None = None, limit: int = 1000
) -> RecordPage[Any]:
    """Return a page of records; the cursor is the key of the last row, in JSON."""
    if kind is RecordKind.RECORD:
        return await _export_records(database, cursor, limit)
    statement, key = _EXPORTS[kind]
    if cursor is not None:
        key = json.loads(cursor)
    decode = _DECODERS[kind]
    items: list[Any] = []
    page_bytes = 0
    while True:
        chunk = min(_CHUNK_ROWS, limit - len(items))
        rows = await database.fetch(statement, chunk, *key)
        for row in map(tuple, rows):
            items.append(decode(row))
            page_bytes += sum(len(value) for value in row if isinstance(value, bytes))
            key = list(row[-len(key) :])
            if page_bytes >= MAX_PAGE_BYTES or len(items) == limit:
                return RecordPage(items, json.dumps(key))
        if len(rows) < chunk:
            return RecordPage(items, None)


async def _export_records(database: Database, cursor: str | None, limit: int) -> RecordPage[Any]:
    after = ("", "", "") if cursor is None else json.loads(cursor)
    page = await records.export_records(database, after, limit)
    if not page:
        return RecordPage([], None)
    return RecordPage(page, json.dumps([page[-1].owner, page[-1].kind, page[-1].key]))


def _decode_lane(row: Row) -> LaneExport:
    lane = decode_row(row[:LANE_FIELD_COUNT], LaneRecord)
    return build_lane_export(lane, *row[LANE_FIELD_COUNT:-1])


_DECODERS: dict[RecordKind, Callable[[Row], Any]] = {
    RecordKind.POLICY: lambda row: decode_row(row[:-3], PolicyVersion),
    RecordKind.DELETED_POLICY: lambda row: DeletedPolicy(
        decode_text(row[0]), decode_text(row[1]), row[2]
    ),
    RecordKind.LANE: _decode_lane,
    RecordKind.TASK: decode_task,
    RecordKind.ATTEMPT: lambda row: TaskAttempt(
        decode_text(row[0]), row[1], decode_attempt(*row[2:6])
    ),
    RecordKind.REPLAY: lambda row: decode_replay_for_export(row[0]),
    RecordKind.REPLAYED_TASK: lambda row: ReplayedTask(decode_text(row[0]), row[1]),
}


async def import_records(database: Database, kind: RecordKind, records: Sequence[Any]) -> None:
    """Store records of one kind in one transaction."""
    await database.transact(lambda tx: _IMPORTS[kind](tx, records))


async def _import_policies(tx: Transaction, policies: Sequence[PolicyVersion]) -> None:
    for policy in policies:
        key = (encode_text(policy.id), policy.version)
        values = (policy.document, policy.created_at)
        tenant = await tx.fetch_value(_INSERT_POLICY, encode_text(policy.tenant), *key, *values)
        if tenant is not None:
            await tx.fetch(_MARK_REPLACED, policy.created_at, tenant, *key)


async def _import_deleted_policies(tx: Transaction, policies: Sequence[DeletedPolicy]) -> None:
    for policy in policies:
        names = (encode_text(policy.tenant), encode_text(policy.id))
        policy_id = await tx.fetch_value(_USE_POLICY, *names)
        await tx.fetch(_MARK_DELETED, policy_id, policy.last_version)


async def _import_lanes(tx: Transaction, lanes: Sequence[LaneExport]) -> None:
    for state in lanes:
        lane = state.lane
        name = encode_text(lane.name)
        await tx.fetch("SELECT tarry.lane_1($1, NULL)", name)
        parking = (lane.parked_until, lane.probes, lane.consecutive_opens)
        await tx.fetch(_CHANGE_LANE, name, *parking, lane.paused)
        values = (state.rate, state.concurrency, state.budget, state.budget_at)
        await tx.fetch(_UPDATE_LANE, name, lane.last_claim_at, encode_limits(state.limits), *values)
    await tx.fetch(_INCREMENT_LIMITS_VERSION)


async def _import_tasks(tx: Transaction, tasks: Sequence[Task]) -> None:
    """Store tasks in any status, unless their ids or idempotency keys are stored already."""
    if not tasks:
        return
    names = sorted({task.tenant for task in tasks})
    ids = await tx.fetch_value("SELECT tarry.tenants_1($1::text[])", encode_texts(names))
    tenants = dict(zip(names, ids, strict=True))
    rows = await tx.fetch(
        _INSERT_KEYS,
        [task.created_at // _DAY_MS for task in tasks],
        [task.id for task in tasks],
        [tenants[task.tenant] for task in tasks],
        [encode_text(task.key) for task in tasks],
    )
    seqs = {row[0]: row[1] for row in rows}
    new = [task for task in tasks if task.id in seqs]
    if not new:
        return
    lanes = {
        name: await tx.fetch_value("SELECT tarry.lane_1($1, NULL)", encode_text(name))
        for name in sorted({task.lane for task in new})
    }
    policies = {
        (tenant, policy): await tx.fetch_value(
            _USE_POLICY, encode_text(tenant), encode_text(policy)
        )
        for tenant, policy in sorted({(task.tenant, task.policy_id) for task in new})
    }
    await _insert_tasks(tx, new, seqs, tenants, lanes, policies)


async def _insert_tasks(
    tx: Transaction,
    tasks: Sequence[Task],
    seqs: dict[str, int],
    tenants: dict[str, int],
    lanes: dict[str, int],
    policies: dict[tuple[str, str], int],
) -> None:
    await tx.fetch(
        _INSERT_CONTENTS,
        [seqs[task.id] for task in tasks],
        [task.id for task in tasks],
        [task.policy_version for task in tasks],
        [encode_text(task.key) for task in tasks],
        [task.fingerprint for task in tasks],
        [encode_optional(task.owned_body_ref) for task in tasks],
        [task.packed_content for task in tasks],
    )
    live: list[tuple[object, ...]] = []
    finished: list[tuple[object, ...]] = []
    changes: list[tuple[object, ...]] = []
    for task in tasks:
        seq, tenant, lane = seqs[task.id], tenants[task.tenant], lanes[task.lane]
        policy = policies[task.tenant, task.policy_id]
        kind = encode_optional(task.last_outcome_kind)
        times = (task.next_attempt_at, task.first_due_at, task.created_at)
        attempts = (task.attempts, task.attempts_before_replay, task.lost_attempts)
        counts = (task.version, *attempts, task.backoff_offset, task.replays)
        if task.status.is_finished:
            row = (tenant, int(task.status), seq, lane, policy, task.finished_at or 0)
            rest = (task.previous_delay, kind, encode_optional(task.reason))
            finished.append((*row, *times, *counts, *rest))
        else:
            pending_queue = FIRST_ATTEMPT_QUEUE if kind is None else RETRY_QUEUE
            queue = LEASED_QUEUE if task.status is Status.IN_FLIGHT else pending_queue
            worker = encode_optional(task.worker)
            rest_of_live = (task.cancelling, task.previous_delay, worker, kind)
            row = (tenant, seq, lane, policy, queue, task.wake_at)
            live.append((*row, *times, *counts, *rest_of_live))
        by_status = [int(task.status is status) for status in Status]
        due = task.wake_at if task.status is Status.PENDING else None
        lease_end = task.wake_at if task.status is Status.IN_FLIGHT else None
        changes.append((tenant, lane, policy, *by_status, 0, due, lease_end))
        if task.policy_version is not None:
            version = (encode_text(task.policy_id), task.policy_version)
            await tx.fetch(_COUNT_VERSION, tenant, *version)
    for statement, rows in ((_INSERT_LIVE, live), (_INSERT_FINISHED, finished), (_APPLY, changes)):
        if rows:
            await tx.fetch(statement, *(list(column) for column in zip(*rows, strict=True)))


async def _import_attempts(tx: Transaction, attempts: Sequence[TaskAttempt]) -> None:
    await tx.fetch(
        _INSERT_ATTEMPTS,
        [entry.task_id for entry in attempts],
        [entry.attempt.attempt_number for entry in attempts],
        [encode(entry.attempt) for entry in attempts],
    )


async def _import_replays(tx: Transaction, replays: Sequence[ReplayRecord]) -> None:
    for replay in replays:
        names = (encode_text(replay.id), encode_text(replay.tenant))
        running, next_at = replay_columns(replay)
        values = (replay.created_at, next_at, running, encode(replay))
        await tx.fetch(_INSERT_REPLAY, *names, *values)


async def _import_replayed_tasks(tx: Transaction, tasks: Sequence[ReplayedTask]) -> None:
    names = [encode_text(task.replay_id) for task in tasks]
    await tx.fetch(_INSERT_REPLAYED, names, [task.task_id for task in tasks])


_IMPORTS: dict[RecordKind, Callable[[Transaction, Sequence[Any]], Awaitable[None]]] = {
    RecordKind.POLICY: _import_policies,
    RecordKind.DELETED_POLICY: _import_deleted_policies,
    RecordKind.LANE: _import_lanes,
    RecordKind.RECORD: records.import_records,
    RecordKind.TASK: _import_tasks,
    RecordKind.ATTEMPT: _import_attempts,
    RecordKind.REPLAY: _import_replays,
    RecordKind.REPLAYED_TASK: _import_replayed_tasks,
}
