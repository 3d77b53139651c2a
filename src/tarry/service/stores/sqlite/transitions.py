"""State changes of tasks other than by `finish`: release, cancel, retry now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.service.store import (
    CancelStatus,
    FinishStatus,
    LeaseTerms,
    Release,
    RetryNowStatus,
)
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import LOCK_TOKENS, attempt_row_id, pack_id, unpack_id
from tarry.service.stores.sqlite.statements import MultiRowStatement
from tarry.service.stores.sqlite.transaction import (
    CANCELLED,
    EXHAUSTED,
    IN_FLIGHT,
    PENDING,
    WriteTransaction,
)
from tarry.service.stores.sqlite.worker_locks import pack_start

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import TaskRowIds

_READ_STATE = """
SELECT seq, tenant, lane, policy, version, status, cancelling, attempts, next_attempt_at
FROM state WHERE seq = (SELECT seq FROM task WHERE id = ?)
"""
_TENANT_COLUMN = 1  # in `_READ_STATE`
# `wake_at` is the due time of a PENDING task, or the end of its deferral, and the end of the lease
# of an IN_FLIGHT task.
_SET_PENDING = f"""
UPDATE state SET status = {PENDING}, wake_at = ?1, next_attempt_at = ?1, version = version + 1,
    worker = NULL WHERE seq = ?2
"""
_RELEASE = f"""
UPDATE state SET status = {PENDING}, wake_at = ?1, version = version + 1, worker = NULL
WHERE seq = ?2
"""
_SET_CANCELLED = f"""
UPDATE state SET status = {CANCELLED}, finished_at = ?, attempts = ?, version = version + 1,
    worker = NULL, wake_at = 0 WHERE seq = ?
"""
_REPLAY = f"""
UPDATE state SET status = {PENDING}, wake_at = ?1, next_attempt_at = ?1, first_due_at = ?1,
    finished_at = NULL, reason = NULL, version = version + 1, attempts_before_replay = attempts,
    replays = replays + 1, lost_attempts = 0, previous_delay = NULL, backoff_offset = 0,
    last_outcome_kind = NULL, cancelling = 0
WHERE seq = ?2
"""
_LEASES_OF_WORKER = f"""
SELECT task.id, seq, state.tenant, lane, policy, next_attempt_at, wake_at, cancelling, attempts
FROM state INDEXED BY state_leased JOIN task USING (seq)
WHERE status = {IN_FLIGHT} AND worker IN (SELECT id FROM worker WHERE name = ?)
"""
_LEASES_OF_LOCK = f"""
SELECT task.id, version, seq, state.tenant, lane, policy, next_attempt_at, cancelling, attempts
FROM state INDEXED BY state_leased JOIN task USING (seq)
WHERE status = {IN_FLIGHT} AND wake_at > ?
    AND worker IN (SELECT id FROM worker WHERE lock = ?) LIMIT ?
"""
_DELETE_WORKERS = f"""
DELETE FROM worker WHERE lock = ? AND id NOT IN (
    SELECT worker FROM state INDEXED BY state_leased
    WHERE status = {IN_FLIGHT} AND worker IS NOT NULL)
"""
AttemptRow: TypeAlias = tuple[int, int, int, str, bytearray]
"""Tenant, `seq` of the task, attempt number, outcome, and the encoded `AttemptRecord`."""
# `MultiRowStatement` repeats the part in brackets for each row.
_INSERT_ATTEMPTS = MultiRowStatement("INSERT INTO attempt (id, log) VALUES [?, ?]")


@write_operation
def release(tx: WriteTransaction, releases: Sequence[Release]) -> list[FinishStatus]:
    """Make leased tasks PENDING again; see `Store.release`."""
    return [_release(tx, release) for release in releases]


def _release(tx: WriteTransaction, release: Release) -> FinishStatus:
    row = tx.execute(_READ_STATE, (pack_id(release.task.id),)).fetchone()
    if row is None:
        return FinishStatus.SUPERSEDED
    *ids, version, status, cancelling, attempts, due = row
    if version != release.task.version or status != IN_FLIGHT:
        return FinishStatus.SUPERSEDED
    if cancelling:
        mark_cancelled(tx, ids, IN_FLIGHT, attempts)
        return FinishStatus.CANCELLED
    wake_at = due if release.deferred_until is None else max(due, release.deferred_until)
    _make_pending(tx, ids, IN_FLIGHT, wake_at, _RELEASE)
    return FinishStatus.APPLIED


@write_operation
def release_unknown_leases(
    tx: WriteTransaction, terms: LeaseTerms, known_ids: Collection[str]
) -> int:
    """Release leases of which a worker does not know; see `Store.release_unknown_leases`."""
    known = set(known_ids)
    rows = tx.execute(_LEASES_OF_WORKER, (terms.worker,)).fetchall()
    unknown = [row for packed_id, *row in rows if unpack_id(packed_id) not in known]
    for *ids, due, lease_end, cancelling, attempts in unknown:
        if cancelling:
            mark_cancelled(tx, ids, IN_FLIGHT, attempts)
        else:
            startable_at = lease_end - terms.length_ms
            wake_at = max(due, startable_at) if startable_at > tx.now else due
            _make_pending(tx, ids, IN_FLIGHT, wake_at, _RELEASE)
    return len(unknown)


def _make_pending(
    tx: WriteTransaction,
    ids: TaskRowIds,
    old_status: int,
    wake_at: int,
    statement: str = _SET_PENDING,
) -> None:
    seq, tenant, lane_id, policy = ids
    lane = tx.lane(lane_id)
    tx.execute(statement, (wake_at, seq))
    tx.count_transition(tenant, lane, policy, old_status, PENDING)
    lane.lower_due_at(wake_at)


def mark_cancelled(tx: WriteTransaction, ids: TaskRowIds, old_status: int, attempts: int) -> None:
    """Change a task from status `old_status` to CANCELLED, and set its number of attempts."""
    seq, tenant, lane_id, policy = ids
    tx.execute(_SET_CANCELLED, (tx.now, attempts, seq))
    tx.count_transition(tenant, tx.lane(lane_id), policy, old_status, CANCELLED)


def log_attempts(tx: WriteTransaction, rows: Sequence[AttemptRow]) -> None:
    """Write attempts to the attempt log, and count them by outcome."""
    parameters: list[Any] = []
    for tenant, seq, number, outcome, attempt in rows:
        parameters += (attempt_row_id(seq, number), attempt)
        tx.count_attempt(tenant, outcome)
    _INSERT_ATTEMPTS.execute(tx.execute, parameters)


@write_operation
def cancel(tx: WriteTransaction, tenant: str, task_id: str) -> CancelStatus | None:
    """Cancel a task; an IN_FLIGHT task becomes CANCELLED only when its lease ends."""
    row = tx.execute(_READ_STATE, (pack_id(task_id),)).fetchone()
    if row is None or row[_TENANT_COLUMN] != tx.names.tenant_id(tenant):
        return None
    *ids, _, status, cancelling, attempts, _ = row
    if status == PENDING:
        mark_cancelled(tx, ids, status, attempts)
        return CancelStatus.CANCELLED
    if status != IN_FLIGHT:
        return CancelStatus.FINISHED
    if not cancelling:
        tx.execute("UPDATE state SET cancelling = 1 WHERE seq = ?", (ids[0],))
    return CancelStatus.REQUESTED


@write_operation
def retry_now(
    tx: WriteTransaction, tenant: str, task_id: str, quota: int | None = None
) -> RetryNowStatus | None:
    """Make a task due now, unless it is IN_FLIGHT or SUCCEEDED; see `Store.retry_now`."""
    row = tx.execute(_READ_STATE, (pack_id(task_id),)).fetchone()
    if row is None or row[_TENANT_COLUMN] != tx.names.tenant_id(tenant):
        return None
    *ids, _, status, _, _, due = row
    if status in {EXHAUSTED, CANCELLED}:
        if quota is not None and tx.count_live_tasks(row[_TENANT_COLUMN]) >= quota:
            return RetryNowStatus.OVER_QUOTA
        replay_task(tx, ids, status)
    elif status == PENDING:
        _make_pending(tx, ids, PENDING, min(due, tx.now))
    elif status == IN_FLIGHT:
        return RetryNowStatus.IN_FLIGHT
    else:
        return RetryNowStatus.SUCCEEDED
    return RetryNowStatus.DUE


def replay_task(tx: WriteTransaction, ids: TaskRowIds, old_status: int) -> None:
    """Make a finished task PENDING and due now; the policy will not count its attempts so far."""
    _make_pending(tx, ids, old_status, tx.now, _REPLAY)


@write_operation
def end_leases_of_dead_workers(tx: WriteTransaction, limit: int) -> bool:
    """End up to `limit` leases of worker processes that have died; return whether more may remain.

    If an attempt of a leased task was started, its lease expires now, and the next claim logs the
    attempt as lost. All other tasks become PENDING again, or CANCELLED if that was requested. Dead
    workers that have no lease any more are deleted.
    """
    worker_lock, limit_left = tx.worker_lock, limit
    if worker_lock is None:
        return False
    tokens = {token for (token,) in tx.execute(LOCK_TOKENS)}
    dead_tokens = worker_lock.find_dead_locks(tokens)
    for token in dead_tokens:
        starts = worker_lock.read_starts(token)
        rows = tx.execute(_LEASES_OF_LOCK, (tx.now, token, limit_left)).fetchall()
        for packed_id, version, *ids, due, cancelling, attempts in rows:
            # Without any record, the file was written by an older version, or is lost.
            may_be_started = not starts or pack_start(unpack_id(packed_id), version) in starts
            if may_be_started and due <= tx.now:
                seq, _, lane_id, _ = ids
                tx.execute("UPDATE state SET wake_at = ? WHERE seq = ?", (tx.now, seq))
                lane = tx.lane(lane_id)
                lane.lower_lease_end_at(tx.now)
                lane.update_check_times()  # a probe of a half-open lane ended: another may start
            elif cancelling:
                mark_cancelled(tx, ids, IN_FLIGHT, attempts)
            else:
                _make_pending(tx, ids, IN_FLIGHT, due)
        limit_left -= len(rows)
        if limit_left <= 0:
            return True
        tx.execute(_DELETE_WORKERS, (token,))
    worker_lock.remove_dead_files(tokens.difference(dead_tokens))
    return False
