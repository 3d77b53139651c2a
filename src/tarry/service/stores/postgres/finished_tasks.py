"""Finished tasks: replay and purge of dead letters (EXHAUSTED tasks), and retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.model import Status
from tarry.service.rules import replays as rules
from tarry.service.store import (
    POLICY_RETENTION_MS,
    SweepResult,
)
from tarry.service.stores.postgres.constants import CANCELLED, EXHAUSTED, SUCCEEDED
from tarry.service.stores.postgres.records import remove_expired_records
from tarry.service.stores.postgres.rows import (
    decode_text,
    encode_optional,
    encode_text,
    encode_texts,
)
from tarry.service.stores.records import decode_replay, encode, is_task_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import ReplayRecord
    from tarry.service.store import Retention
    from tarry.service.stores.postgres.database import Database, Transaction

_MAX_TENANTS_WITH_REPLAYS = 1_000
_DAY_MS = 86_400_000
_FIRST_ID = "00000000-0000-0000-0000-000000000000"
_FIND_DEAD_LETTERS = f"""
SELECT k.tenant, k.seq, k.id FROM tarry.task_key AS k
JOIN tarry.finished AS f ON f.tenant = k.tenant AND f.status = {EXHAUSTED} AND f.seq = k.seq
WHERE k.id = ANY ($1::uuid[]) AND k.tenant = (SELECT id FROM tarry.tenant WHERE name = $2)
ORDER BY array_position($1::uuid[], k.id)
"""
_INSERT_REPLAY = """
INSERT INTO tarry.replay (id, tenant, created_at, next_at, running, job)
VALUES ($1, $2, $3, $3, 1, $4) ON CONFLICT DO NOTHING
"""
_FIND_REPLAY = "SELECT job FROM tarry.replay WHERE id = $1"
_REPLAYED_TASKS = f"""
SELECT r.task, k.seq IS NOT NULL AND f.status IS NULL,
    CASE WHEN k.seq IS NOT NULL THEN f.status END
FROM (SELECT * FROM tarry.replay_task WHERE replay = $1 AND task > $2
    ORDER BY task LIMIT {rules.MAX_COUNTED_TASKS}) AS r
LEFT JOIN tarry.task_key AS k ON k.id = r.task
LEFT JOIN tarry.finished AS f
    ON f.tenant = k.tenant AND f.status IN ({SUCCEEDED}, {EXHAUSTED}, {CANCELLED}) AND f.seq = k.seq
ORDER BY r.task
"""
_ADD_REPLAYED_TASKS = """
INSERT INTO tarry.replay_task SELECT $1, * FROM unnest($2::uuid[])
ON CONFLICT DO NOTHING RETURNING 1
"""
_DELETE_REPLAYED_TASKS = """
DELETE FROM tarry.replay_task WHERE replay = $1 AND task = ANY ($2::uuid[])
"""
_UPDATE_REPLAY = "UPDATE tarry.replay SET running = $1, next_at = $2, job = $3 WHERE id = $4"
_OLD_TASKS = """
SELECT tenant, seq FROM tarry.finished
WHERE status = $1 AND finished_at <= $2 AND tenant <> ALL ($3::integer[])
ORDER BY finished_at LIMIT $4
"""
# `running > 0` is the condition of the index `replay_unfinished`.
_TENANTS_WITH_REPLAYS = f"""
SELECT DISTINCT t.id FROM (
    SELECT tenant FROM tarry.replay WHERE running > 0 AND running = 1
    ORDER BY next_at, id LIMIT {_MAX_TENANTS_WITH_REPLAYS}) AS r
JOIN tarry.tenant AS t ON t.name = r.tenant
"""
_DELETE_OLD_COUNTS = """
DELETE FROM tarry.series WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM tarry.series WHERE minute < $1 ORDER BY minute LIMIT $2
    FOR UPDATE SKIP LOCKED))
RETURNING 1
"""
_DELETE_OLD_REPLAYS = """
DELETE FROM tarry.replay WHERE id IN (
    SELECT id FROM tarry.replay WHERE created_at <= $1 AND running = 0 AND next_at <= $1
    ORDER BY created_at, id LIMIT $2)
RETURNING 1
"""
# While a task is being added to an unused lane, the column `unused` is still true. The transaction
# of the task then finds that the lane was deleted, and is retried.
_DELETE_UNUSED_LANES = """
WITH unused AS (
    SELECT id FROM tarry.lane
    WHERE unused AND NOT paused AND limits IS NULL AND coalesce(parked_until, 0) <= $1
    ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM tarry.lane AS l USING unused AS u WHERE l.id = u.id RETURNING l.tenant
), counts AS MATERIALIZED (
    SELECT t.id, g.lanes FROM (SELECT tenant, count(*) AS lanes FROM gone GROUP BY tenant) AS g
    JOIN tarry.tenant AS t ON t.id = g.tenant ORDER BY t.id FOR NO KEY UPDATE OF t
), updated AS (
    UPDATE tarry.tenant AS t SET lanes = t.lanes - c.lanes FROM counts AS c WHERE t.id = c.id
)
SELECT count(*) FROM gone
"""
# With the lock, PostgreSQL checks again that no task uses the row. Without it, a DELETE that has
# waited for another transaction would delete a row that a task of that transaction uses.
_DELETE_UNUSED_POLICY_VERSIONS = """
DELETE FROM tarry.policy WHERE (tenant, id, version) IN (
    SELECT tenant, id, version FROM tarry.policy
    WHERE tasks = 0 AND replaced_at IS NOT NULL AND replaced_at <= $1
    ORDER BY replaced_at LIMIT $2 FOR UPDATE SKIP LOCKED)
RETURNING 1
"""
_DELETE_UNUSED_POLICIES = """
DELETE FROM tarry.policy_use WHERE id IN (
    SELECT id FROM tarry.policy_use WHERE tasks = 0 AND deleted_version > 0 LIMIT $1
    FOR UPDATE SKIP LOCKED)
RETURNING 1
"""


async def _find_dead_letters(
    tx: Transaction, tenant: str, task_ids: Sequence[str]
) -> tuple[int | None, list[int], list[object]]:
    """Return the tenant, and `seq` and id of the dead letters among these tasks, in their order."""
    wanted = [task_id for task_id in dict.fromkeys(task_ids) if is_task_id(task_id)]
    rows = await tx.fetch(_FIND_DEAD_LETTERS, wanted, encode_text(tenant)) if wanted else []
    tenant_id = rows[0][0] if rows else None
    return tenant_id, [row[1] for row in rows], [row[2] for row in rows]


async def delete_dead_letters(database: Database, tenant: str, task_ids: Sequence[str]) -> int:
    """Delete the dead letters among these tasks; return their number."""

    async def delete(tx: Transaction) -> int:
        tenant_id, seqs, _ = await _find_dead_letters(tx, tenant, task_ids)
        return await _delete_tasks(tx, [tenant_id] * len(seqs), seqs)

    return await database.transact(delete)


async def _delete_tasks(tx: Transaction, tenants: Sequence[int | None], seqs: Sequence[int]) -> int:
    if not seqs:
        return 0
    return int(await tx.fetch_value("SELECT tarry.delete_1($1, $2)", tenants, seqs))


async def start_replay(database: Database, replay: ReplayRecord) -> ReplayRecord:
    """Store a replay and return it; if its id is stored already, return the stored replay."""

    async def write(tx: Transaction) -> ReplayRecord:
        time = await tx.fetch_value("SELECT tarry.now_1($1)", database.now())
        new = rules.start_replay(replay, time)
        names = (encode_text(replay.id), encode_text(replay.tenant))
        await tx.fetch(_INSERT_REPLAY, *names, time, encode(new))
        job = await tx.fetch_value(_FIND_REPLAY, names[0])
        return new if job is None else decode_replay(job)

    return await database.transact(write)


async def get_replay(database: Database, tenant: str, replay_id: str) -> ReplayRecord | None:
    """Return a replay of this tenant, or None if it does not exist."""
    job = await database.fetch_value(_FIND_REPLAY, encode_text(replay_id))
    replay = None if job is None else decode_replay(job)
    return replay if replay is not None and replay.tenant == tenant else None


async def list_replays(
    database: Database, *, running: bool, tenant: str | None = None
) -> list[ReplayRecord]:
    """List up to 100 replays, newest first; with `running`, those that need steps, by due time."""
    conditions = ["running > 0"] if running else ["true"]
    conditions += [] if tenant is None else ["tenant = $1"]
    order = "next_at, id" if running else "created_at DESC, id DESC"
    statement = (
        f"SELECT job FROM tarry.replay WHERE {' AND '.join(conditions)} "
        f"ORDER BY {order} LIMIT {rules.MAX_LISTED_REPLAYS}"
    )
    parameters = () if tenant is None else (encode_optional(tenant),)
    return [decode_replay(row[0]) for row in await database.fetch(statement, *parameters)]


async def replay_step(
    database: Database,
    replay_id: str,
    cursor: str | None,
    task_ids: Sequence[str],
    next_cursor: str | None,
    quota: int | None,
    now: int | None,
) -> ReplayRecord | None:
    """Replay dead letters and count finished tasks, if the replay is due; see `Store`."""

    async def step(tx: Transaction) -> ReplayRecord | None:
        time = await tx.fetch_value("SELECT tarry.now_1($1)", now)
        job = await tx.fetch_value(f"{_FIND_REPLAY} FOR UPDATE", encode_text(replay_id))
        replay = None if job is None else decode_replay(job)
        if replay is None or not rules.is_step_due(replay, cursor, time):
            return replay
        if replay.status == "running":
            await _replay_tasks(tx, replay, task_ids, next_cursor, quota, time)
        await _end_step(tx, replay, time)
        await _update_replay(tx, replay)
        return replay

    return await database.transact(step)


async def _replay_tasks(
    tx: Transaction,
    replay: ReplayRecord,
    task_ids: Sequence[str],
    next_cursor: str | None,
    quota: int | None,
    now: int,
) -> None:
    tenant, seqs, ids = await _find_dead_letters(tx, replay.tenant, task_ids)
    live_count = 0
    if quota is not None and seqs:
        statement = "SELECT tarry.lock_quota_1($1, $2, $3)"
        live_count = await tx.fetch_value(statement, tenant, min(len(seqs), quota + 1), quota)
    allowed_count = rules.count_allowed_tasks(len(seqs), quota, live_count)
    replayed: set[int] = set()
    added: list[object] = []
    if allowed_count:
        statement = f"SELECT tarry.replay_1($1, $2, ARRAY[{EXHAUSTED}]::smallint[], $3)"
        replayed = set(await tx.fetch_value(statement, tenant, seqs[:allowed_count], now))
        replayed_ids = [id_ for seq, id_ in zip(seqs, ids, strict=True) if seq in replayed]
        added = await tx.fetch(_ADD_REPLAYED_TASKS, encode_text(replay.id), replayed_ids)
    rules.add_replayed_tasks(
        replay,
        seqs,
        allowed_count,
        replayed_count=len(replayed),
        added_count=len(added),
        next_cursor=next_cursor,
        now=now,
    )


async def _end_step(tx: Transaction, replay: ReplayRecord, now: int) -> None:
    after = replay.count_cursor or _FIRST_ID
    rows = await tx.fetch(_REPLAYED_TASKS, encode_text(replay.id), after)
    finished = {task_id: status for task_id, is_live, status in rows if not is_live}
    if finished:
        await tx.fetch(_DELETE_REPLAYED_TASKS, encode_text(replay.id), list(finished))
    statuses = [None if status is None else Status(status) for status in finished.values()]
    last_id = str(rows[-1][0]) if rows else None
    rules.end_step(replay, statuses, len(rows), last_id, now)


async def cancel_replay(database: Database, tenant: str, replay_id: str) -> ReplayRecord | None:
    """End a replay; see `Store.cancel_replay`."""

    async def cancel(tx: Transaction) -> ReplayRecord | None:
        time = await tx.fetch_value("SELECT tarry.now_1($1)", database.now())
        job = await tx.fetch_value(f"{_FIND_REPLAY} FOR UPDATE", encode_text(replay_id))
        replay = None if job is None else decode_replay(job)
        if replay is None or replay.tenant != tenant:
            return None
        if rules.cancel_replay(replay, time):
            await _update_replay(tx, replay)
        return replay

    return await database.transact(cancel)


async def _update_replay(tx: Transaction, replay: ReplayRecord) -> None:
    columns = rules.replay_columns(replay)
    await tx.fetch(_UPDATE_REPLAY, *columns, encode(replay), encode_text(replay.id))


async def sweep(
    database: Database, retention: Retention, limit: int, now: int | None
) -> tuple[int, SweepResult]:
    """Delete old tasks, replays and attempt counts, and unused lanes and policies.

    At most `limit` of each are deleted in one transaction each, so that locks are held briefly.
    Returns the time, too.
    """
    time = await database.fetch_value("SELECT tarry.now_1($1)", now)

    async def delete_old_tasks(tx: Transaction) -> tuple[int, bool]:
        # Dead letters of a tenant with a running replay are kept: the replay has counted them.
        replaying = [row[0] for row in await tx.fetch(_TENANTS_WITH_REPLAYS)]
        tenants: list[int] = []
        seqs: list[int] = []
        for status, max_age_ms, excluded in (
            (SUCCEEDED, retention.succeeded_ms, []),
            (CANCELLED, retention.succeeded_ms, []),
            (EXHAUSTED, retention.exhausted_ms, replaying),
        ):
            missing = limit + 1 - len(seqs)
            rows = await tx.fetch(_OLD_TASKS, status, time - max_age_ms, excluded, missing)
            tenants += [row[0] for row in rows]
            seqs += [row[1] for row in rows]
        removed = await _delete_tasks(tx, tenants[:limit], seqs[:limit])
        return removed, len(seqs) > limit

    removed, has_more = await database.transact(delete_old_tasks)
    fetch = database.fetch
    await remove_expired_records(database, time)
    counts = len(await fetch(_DELETE_OLD_COUNTS, time - _DAY_MS, limit))
    replays = len(await fetch(_DELETE_OLD_REPLAYS, time - retention.exhausted_ms, limit))
    lanes = await database.fetch_value(_DELETE_UNUSED_LANES, time, limit)
    versions = len(await fetch(_DELETE_UNUSED_POLICY_VERSIONS, time - POLICY_RETENTION_MS, limit))
    policies = len(await fetch(_DELETE_UNUSED_POLICIES, limit))
    has_more = has_more or max(counts, replays, lanes, versions, policies) == limit > 0
    return time, SweepResult(removed, has_more)


async def list_orphaned_bodies(database: Database, limit: int) -> list[str]:
    """Return references to bodies in the `BodyStore` whose task was deleted."""
    rows = await database.fetch("SELECT ref FROM tarry.orphan ORDER BY ref LIMIT $1", limit)
    return [decode_text(row[0]) for row in rows]


async def forget_orphaned_bodies(database: Database, refs: Sequence[str]) -> None:
    """Delete references to bodies that were deleted from the `BodyStore`."""
    statement = "DELETE FROM tarry.orphan WHERE ref = ANY ($1::text[])"
    await database.fetch(statement, encode_texts(refs))
