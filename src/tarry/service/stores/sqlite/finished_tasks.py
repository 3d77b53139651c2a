"""Finished tasks: replay and purge of dead letters (EXHAUSTED tasks), and retention.

Each function reads and changes a limited number of rows, so that other operations can run between
two calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tarry.service.model import ReplayRecord, Status
from tarry.service.rules import replays as rules
from tarry.service.store import (
    POLICY_RETENTION_MS,
    Retention,
    SweepResult,
)
from tarry.service.stores.records import decode_replay, encode
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import (
    DAY_MS,
    attempt_row_id,
    pack_id,
    pack_ids,
    unpack_id,
)
from tarry.service.stores.sqlite.records import remove_expired_records, remove_records_of_lanes
from tarry.service.stores.sqlite.transaction import (
    CANCELLED,
    EXHAUSTED,
    SUCCEEDED,
    WriteTransaction,
)
from tarry.service.stores.sqlite.transitions import end_leases_of_dead_workers, replay_task

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import (
        ReadTransaction,
        TaskRowIds,
    )

_READ_DEAD_LETTER = f"""
SELECT seq, tenant, lane, policy FROM state
WHERE seq = (SELECT seq FROM task WHERE id = ?) AND tenant = ? AND status = {EXHAUSTED}
"""
_INSERT_REPLAY = """
INSERT INTO replay (id, tenant, created_at, running, next_at, job) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
"""
_ADD_REPLAYED_TASK = "INSERT OR IGNORE INTO replay_task VALUES (?, ?)"
_REPLAYED_TASKS = """
SELECT r.task, t.seq, s.status FROM replay_task AS r
LEFT JOIN task AS t ON t.id = r.task LEFT JOIN state AS s ON s.seq = t.seq
WHERE r.replay = ? AND r.task > ? ORDER BY r.task LIMIT ?
"""
_DELETE_REPLAYED_TASK = "DELETE FROM replay_task WHERE replay = ? AND task = ?"
_UPDATE_REPLAY = "UPDATE replay SET running = ?, next_at = ?, job = ? WHERE id = ?"
_OLD_TASKS = """
SELECT seq, tenant, lane, policy, status FROM state
WHERE status = ? AND finished_at IS NOT NULL AND finished_at <= ?
    AND tenant NOT IN (SELECT value FROM json_each(?)) ORDER BY finished_at LIMIT ?
"""
# `running > 0` is the condition of the index `replay_unfinished`.
_TENANTS_WITH_REPLAYS = """
SELECT tenant FROM replay INDEXED BY replay_unfinished WHERE running > 0 AND running = 1
ORDER BY next_at, id LIMIT ?
"""
_MAX_TENANTS_WITH_REPLAYS = 1_000
_DELETE_OLD_ATTEMPT_COUNTS = """
DELETE FROM series WHERE (tenant, minute, outcome) IN (
    SELECT tenant, minute, outcome FROM series WHERE minute < ? LIMIT ?)
"""
_DELETE_OLD_REPLAYS = """
DELETE FROM replay WHERE id IN (
    SELECT id FROM replay WHERE created_at <= ?1 AND running = 0 AND next_at <= ?1
    ORDER BY created_at, id LIMIT ?2)
"""
_DELETE_UNUSED_LANES = """
DELETE FROM lane WHERE id IN (
    SELECT id FROM lane INDEXED BY lane_unused
    WHERE tasks = 0 AND paused = 0 AND limits IS NULL AND ifnull(parked_until, 0) <= ? LIMIT ?)
RETURNING tenant, name
"""
_DELETE_UNUSED_POLICY_VERSIONS = """
DELETE FROM policy WHERE rowid IN (
    SELECT rowid FROM policy INDEXED BY policy_unused
    WHERE tasks = 0 AND replaced_at <= ? ORDER BY replaced_at LIMIT ?)
"""
_DELETE_UNUSED_DELETED_POLICIES = """
DELETE FROM policy_use WHERE id IN (
    SELECT id FROM policy_use INDEXED BY policy_use_deleted
    WHERE tasks = 0 AND deleted_version > 0 LIMIT ?)
"""
_DECREMENT_TASKS_OF_VERSION = """
UPDATE policy SET tasks = tasks - 1
WHERE tenant = ? AND id = (SELECT policy FROM policy_use WHERE id = ?) AND version = ?
"""
MIN_FREE_PAGES = 1024
"""Free pages that are always kept for new tasks; 4 MiB."""
_MAX_RELEASED_PAGES = 64  # in one sweep
_MAX_RELEASE_COST = 1_000_000  # of one sweep: released pages x free pages


@write_operation
def delete_dead_letters(tx: WriteTransaction, tenant: str, task_ids: Sequence[str]) -> int:
    """Delete the dead letters among these tasks; return their number."""
    dead_letters = _find_dead_letters(tx, tenant, task_ids)
    for ids in dead_letters.values():
        delete_task(tx, ids, EXHAUSTED)
    return len(dead_letters)


def _find_dead_letters(
    tx: WriteTransaction, tenant: str, task_ids: Sequence[str]
) -> dict[bytes, TaskRowIds]:
    """Return the row ids of the dead letters among these tasks, by packed task id."""
    tenant_id = tx.names.tenant_id(tenant)
    dead_letters: dict[bytes, TaskRowIds] = {}
    for packed_id in pack_ids(task_ids):
        row = tx.execute(_READ_DEAD_LETTER, (packed_id, tenant_id)).fetchone()
        if packed_id is not None and row is not None:
            dead_letters[bytes(packed_id)] = row
    return dead_letters


@write_operation
def start_replay(tx: WriteTransaction, replay: ReplayRecord) -> ReplayRecord:
    """Store a replay and return it; if its id is stored already, return the stored replay."""
    insert_replay(tx, rules.start_replay(replay, tx.now))
    return find_replay(tx, replay.id) or replay


def get_replay(tx: ReadTransaction, tenant: str, replay_id: str) -> ReplayRecord | None:
    """Return a replay of this tenant, or None if it does not exist."""
    replay = find_replay(tx, replay_id)
    return replay if replay is not None and replay.tenant == tenant else None


def find_replay(tx: ReadTransaction, replay_id: str) -> ReplayRecord | None:
    """Return a replay of any tenant, or None if it does not exist."""
    row = tx.execute("SELECT job FROM replay WHERE id = ?", (replay_id,)).fetchone()
    return None if row is None else decode_replay(row[0])


def list_replays(
    tx: ReadTransaction, *, running: bool, tenant: str | None = None
) -> list[ReplayRecord]:
    """List up to 100 replays, newest first; with `running`, those that need steps, by due time."""
    tenant_condition = "" if tenant is None else "AND tenant = ?"
    if running:
        source = f"replay INDEXED BY replay_unfinished WHERE running > 0 {tenant_condition}"
        order = "next_at, id"
    else:
        source, order = f"replay WHERE true {tenant_condition}", "created_at DESC, id DESC"
    statement = f"SELECT job FROM {source} ORDER BY {order} LIMIT {rules.MAX_LISTED_REPLAYS}"
    rows = tx.execute(statement, () if tenant is None else (tenant,))
    return [decode_replay(job) for (job,) in rows]


@write_operation
def replay_step(
    tx: WriteTransaction,
    replay_id: str,
    cursor: str | None,
    task_ids: Sequence[str],
    next_cursor: str | None,
    quota: int | None,
) -> ReplayRecord | None:
    """Replay dead letters and count finished tasks, if the replay is due; see `Store`."""
    replay = find_replay(tx, replay_id)
    if replay is None or not rules.is_step_due(replay, cursor, tx.now):
        return replay
    if replay.status == "running":
        _replay_tasks(tx, replay, task_ids, next_cursor, quota)
    _end_step(tx, replay)
    _update_replay(tx, replay)
    return replay


def _replay_tasks(
    tx: WriteTransaction,
    replay: ReplayRecord,
    task_ids: Sequence[str],
    next_cursor: str | None,
    quota: int | None,
) -> None:
    dead_letters = _find_dead_letters(tx, replay.tenant, task_ids)
    live_count = tx.count_live_tasks(tx.names.tenant_id(replay.tenant))
    allowed_count = rules.count_allowed_tasks(len(dead_letters), quota, live_count)
    added_count = 0
    for packed_id, ids in list(dead_letters.items())[:allowed_count]:
        replay_task(tx, ids, EXHAUSTED)
        added_count += tx.execute(_ADD_REPLAYED_TASK, (replay.id, packed_id)).rowcount
    rules.add_replayed_tasks(
        replay,
        [ids[0] for ids in dead_letters.values()],  # `seq`
        allowed_count,
        replayed_count=allowed_count,
        added_count=added_count,
        next_cursor=next_cursor,
        now=tx.now,
    )


def _end_step(tx: WriteTransaction, replay: ReplayRecord) -> None:
    after = b"" if replay.count_cursor is None else pack_id(replay.count_cursor)
    rows = tx.execute(_REPLAYED_TASKS, (replay.id, after, rules.MAX_COUNTED_TASKS)).fetchall()
    finished: list[Status | None] = []
    for packed_id, seq, number in rows:
        status = None if seq is None else Status(number)
        if status is None or status.is_finished:
            finished.append(status)
            tx.execute(_DELETE_REPLAYED_TASK, (replay.id, packed_id))
    last_id = unpack_id(rows[-1][0]) if rows else None
    rules.end_step(replay, finished, len(rows), last_id, tx.now)


@write_operation
def cancel_replay(tx: WriteTransaction, tenant: str, replay_id: str) -> ReplayRecord | None:
    """End a replay; see `Store.cancel_replay`."""
    replay = get_replay(tx, tenant, replay_id)
    if replay is not None and rules.cancel_replay(replay, tx.now):
        _update_replay(tx, replay)
    return replay


def insert_replay(tx: WriteTransaction, replay: ReplayRecord) -> None:
    """Store a replay as it is, unless its id is stored already."""
    row = (replay.id, replay.tenant, replay.created_at, *rules.replay_columns(replay))
    tx.execute(_INSERT_REPLAY, (*row, encode(replay)))


def _update_replay(tx: WriteTransaction, replay: ReplayRecord) -> None:
    columns = rules.replay_columns(replay)
    tx.execute(_UPDATE_REPLAY, (*columns, encode(replay), replay.id))


@write_operation
def sweep(tx: WriteTransaction, retention: Retention, limit: int) -> SweepResult:
    """Delete old and unused rows, and end the leases of dead workers.

    Deletes old tasks, replays and attempt counts, expired records, and lanes and policies that no
    task uses: at most `limit` of each, except records. When none is left, the file is shrunk by a
    few pages.
    """
    has_more_leases = end_leases_of_dead_workers(tx, limit)
    # Dead letters of a tenant with a running replay are kept: `matched` of the replay counts them.
    tenants = {name for (name,) in tx.execute(_TENANTS_WITH_REPLAYS, (_MAX_TENANTS_WITH_REPLAYS,))}
    replaying_tenant_ids = json.dumps([tx.names.tenant_id(name) for name in tenants])
    old_tasks: list[Sequence[int]] = []
    for status, max_age_ms, excluded_tenant_ids in (
        (SUCCEEDED, retention.succeeded_ms, "[]"),
        (CANCELLED, retention.succeeded_ms, "[]"),
        (EXHAUSTED, retention.exhausted_ms, replaying_tenant_ids),
    ):
        parameters = (status, tx.now - max_age_ms, excluded_tenant_ids, limit + 1 - len(old_tasks))
        old_tasks += tx.execute(_OLD_TASKS, parameters).fetchall()
    for *ids, status in old_tasks[:limit]:
        delete_task(tx, ids, status)
    remove_expired_records(tx)
    old_counts = tx.execute(_DELETE_OLD_ATTEMPT_COUNTS, (tx.now - DAY_MS, limit))
    old_replays = tx.execute(_DELETE_OLD_REPLAYS, (tx.now - retention.exhausted_ms, limit))
    unused_count = _delete_unused_lanes_and_policies(tx, limit)
    max_deleted = max(old_counts.rowcount, old_replays.rowcount, unused_count)
    has_more = has_more_leases or len(old_tasks) > limit or max_deleted == limit > 0
    return SweepResult(min(len(old_tasks), limit), has_more or _shrink_file(tx))


def _delete_unused_lanes_and_policies(tx: WriteTransaction, limit: int) -> int:
    """Delete lanes, policy versions and deleted policies that no task refers to.

    At most `limit` of each are deleted. Returns the largest number of deleted rows of one table.
    """
    # Writes the column `tasks`. Empties the cache, which would write deleted lanes again.
    tx.flush()
    lanes = tx.execute(_DELETE_UNUSED_LANES, (tx.now, limit)).fetchall()
    tenants = [(tenant,) for tenant, _ in lanes]
    tx.executemany("UPDATE tenant SET lanes = lanes - 1 WHERE id = ?", tenants)
    remove_records_of_lanes(tx, [name for _, name in lanes])
    parameters = (tx.now - POLICY_RETENTION_MS, limit)
    versions = tx.execute(_DELETE_UNUSED_POLICY_VERSIONS, parameters).rowcount
    policies = tx.execute(_DELETE_UNUSED_DELETED_POLICIES, (limit,)).rowcount
    if lanes or policies:
        tx.names.record_removal()
    return max(len(lanes), versions, policies)


def _shrink_file(tx: WriteTransaction) -> bool:
    """Release a few pages if more than a quarter of the file is free; return whether it shrank.

    A quarter stays free, so that the file does not shrink and grow all the time. The file on the
    disk gets smaller with the next checkpoint.
    """
    [(page_count,)] = tx.execute("PRAGMA page_count")
    [(free_count,)] = tx.execute("PRAGMA freelist_count")
    surplus = free_count - max(MIN_FREE_PAGES, page_count // 4)
    if surplus <= 0:
        return False
    # SQLite searches the list of free pages for each page that it releases: 44 us with 15,000 free
    # pages, and proportionally longer with more. `_MAX_RELEASE_COST` limits a step to about 3 ms.
    step = min(surplus, _MAX_RELEASED_PAGES, max(1, _MAX_RELEASE_COST // free_count))
    for _ in range(step):
        # Python's sqlite3 module stops after the first page, whatever number is given.
        tx.execute("PRAGMA incremental_vacuum(1)")
    [(new_free_count,)] = tx.execute("PRAGMA freelist_count")
    # The number is unchanged in a file that was created without `auto_vacuum`.
    return bool(new_free_count < free_count)


def delete_task(tx: WriteTransaction, ids: TaskRowIds, status: int) -> None:
    """Delete a finished task and its attempt log; a body in the `BodyStore` becomes an orphan."""
    seq, tenant, lane_id, policy = ids
    execute = tx.execute
    id_range = (attempt_row_id(seq, 0), attempt_row_id(seq + 1, 0))
    execute("DELETE FROM attempt WHERE id > ? AND id < ?", id_range)
    execute("DELETE FROM state WHERE seq = ?", (seq,))
    statement = "DELETE FROM task WHERE seq = ? RETURNING owned_body_ref, policy_version"
    [(ref, version)] = execute(statement, (seq,))
    if version is not None:
        execute(_DECREMENT_TASKS_OF_VERSION, (tenant, policy, version))
    if ref is not None:
        execute("INSERT OR IGNORE INTO orphan VALUES (?)", (ref,))
    tx.count_transition(tenant, tx.lane(lane_id), policy, status, None)


def list_orphaned_bodies(tx: ReadTransaction, limit: int) -> list[str]:
    """Return references to bodies in the `BodyStore` whose task was deleted."""
    return [ref for (ref,) in tx.execute("SELECT ref FROM orphan LIMIT ?", (limit,))]


@write_operation
def forget_orphaned_bodies(tx: WriteTransaction, refs: Sequence[str]) -> None:
    """Delete references to bodies that were deleted from the `BodyStore`."""
    tx.executemany("DELETE FROM orphan WHERE ref = ?", [(ref,) for ref in refs])
