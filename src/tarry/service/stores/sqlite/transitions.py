"""The life of a task, between its attempts: released, cancelled, retried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus
from tarry.service.stores.sqlite.multirow import MultiRowStatement
from tarry.service.stores.sqlite.task_rows import attempt_row_id, pack_id
from tarry.service.stores.sqlite.transaction import CANCELLED, EXHAUSTED, IN_FLIGHT, PENDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import Release
    from tarry.service.stores.sqlite.transaction import Transaction

_STATE = """
SELECT seq, tenant, lane, policy, version, status, cancelling, attempts, next_attempt_at
FROM state WHERE seq = (SELECT seq FROM task WHERE id = ?)
"""
_RELEASE = """
UPDATE state SET status = 0, wake_at = ?1, next_attempt_at = ?1, version = version + 1,
    worker = NULL
WHERE seq = ?2
"""
_CANCEL = """
UPDATE state SET status = 4, finished_at = ?, attempts = ?, version = version + 1, worker = NULL,
    wake_at = 0
WHERE seq = ?
"""
_REVIVE = """
UPDATE state SET status = 0, wake_at = ?1, next_attempt_at = ?1, started_at = ?1,
    finished_at = NULL, reason = NULL, version = version + 1, forgiven = attempts,
    replays = replays + 1, lost = 0,
    previous_delay = NULL, restarted = 0, last_kind = NULL
WHERE seq = ?2
"""
_LOCKS = "SELECT lock FROM worker WHERE lock IS NOT NULL"
_HELD = """
SELECT seq, tenant, lane, policy, next_attempt_at, cancelling, attempts
FROM state INDEXED BY state_leased
WHERE status = 1 AND wake_at > ? AND worker IN (SELECT id FROM worker WHERE lock = ?) LIMIT ?
"""
_FORGET = """
DELETE FROM worker WHERE lock = ? AND id NOT IN (
    SELECT worker FROM state INDEXED BY state_leased WHERE status = 1 AND worker IS NOT NULL)
"""
AttemptRow: TypeAlias = tuple[int, int, int, str, bytearray]
"""A line of the attempt log: its tenant, task, and number, its outcome, and the attempt, packed."""
_LOG = MultiRowStatement("INSERT INTO attempt (id, log) VALUES {rows}", "(?, ?)")


def release(tx: Transaction, leases: Sequence[Release]) -> list[FinishStatus]:
    """Hand unstarted leases back, where they are still held."""
    return [_release(tx, one) for one in leases]


def _release(tx: Transaction, one: Release) -> FinishStatus:
    row = tx.execute(_STATE, (pack_id(one.task.id),)).fetchone()
    if row is None or row[4] != one.task.version or row[5] != IN_FLIGHT:
        return FinishStatus.SUPERSEDED
    seq, tenant, lane_id, policy, _, _, cancelling, attempts, due = row
    if cancelling:
        mark_cancelled(tx, seq, tenant, lane_id, policy, IN_FLIGHT, attempts)
        return FinishStatus.CANCELLED
    due = due if one.next_attempt_at is None else max(due, one.next_attempt_at)
    return_to_queue(tx, seq, tenant, lane_id, policy, due)
    return FinishStatus.DONE


def return_to_queue(
    tx: Transaction, seq: int, tenant: int, lane_id: int, policy: int, due: int
) -> None:
    """End a lease under which no attempt was made."""
    lane = tx.lane(lane_id)
    tx.execute(_RELEASE, (due, seq))
    tx.count_transition(tenant, lane, policy, IN_FLIGHT, PENDING)
    lane.due(due)


def mark_cancelled(
    tx: Transaction, seq: int, tenant: int, lane_id: int, policy: int, old: int, attempts: int
) -> None:
    """End a task that somebody cancelled."""
    tx.execute(_CANCEL, (tx.now, attempts, seq))
    tx.count_transition(tenant, tx.lane(lane_id), policy, old, CANCELLED)


def log_attempts(tx: Transaction, lines: Sequence[AttemptRow]) -> None:
    """Write lines of the attempt log, and count them."""
    values: list[Any] = []
    for tenant, seq, number, outcome, attempt in lines:
        values += (attempt_row_id(seq, number), attempt)
        tx.count_attempt(tenant, outcome)
    _LOG.run(tx.execute, values)


def cancel(tx: Transaction, tenant: str, task_id: str) -> CancelStatus | None:
    """Cancel a task."""
    row = tx.execute(_STATE, (pack_id(task_id),)).fetchone()
    if row is None or row[1] != tx.names.tenant_id(tenant):
        return None
    seq, whose, lane_id, policy, _, status, cancelling, attempts, _ = row
    if status == PENDING:
        mark_cancelled(tx, seq, whose, lane_id, policy, status, attempts)
        return CancelStatus.CANCELLED
    if status != IN_FLIGHT:
        return CancelStatus.TERMINAL
    if not cancelling:
        tx.execute("UPDATE state SET cancelling = 1 WHERE seq = ?", (seq,))
    return CancelStatus.REQUESTED


def retry_now(tx: Transaction, tenant: str, task_id: str) -> RetryNowStatus | None:
    """Make a task due that waits or is dead."""
    row = tx.execute(_STATE, (pack_id(task_id),)).fetchone()
    if row is None or row[1] != tx.names.tenant_id(tenant):
        return None
    seq, whose, lane_id, policy, _, status, _, _, due = row
    if status == IN_FLIGHT:
        return RetryNowStatus.RUNNING
    if status == EXHAUSTED:
        revive_dead_letter(tx, seq, whose, lane_id, policy)
        return RetryNowStatus.DUE
    if status != PENDING:
        return RetryNowStatus.FINISHED
    due = min(due, tx.now)
    tx.execute(_RELEASE, (due, seq))
    tx.lane(lane_id).due(due)
    return RetryNowStatus.DUE


def revive_dead_letter(tx: Transaction, seq: int, tenant: int, lane_id: int, policy: int) -> None:
    """Bring a dead letter back: it begins anew, and its log goes on."""
    lane = tx.lane(lane_id)
    tx.execute(_REVIVE, (tx.now, seq))
    tx.count_transition(tenant, lane, policy, EXHAUSTED, PENDING)
    lane.due(tx.now)


def recover_leases(tx: Transaction, limit: int) -> bool:
    """End up to `limit` leases of workers that are dead; True: there may be more.

    An attempt that may have begun is abandoned now, and the next claim logs it as lost. A lease
    taken ahead of its time is handed back. A worker is forgotten with its last lease.
    """
    worker_lock, room = tx.worker_lock, limit
    if worker_lock is None:
        return False
    for lock in worker_lock.remove_dead({lock for (lock,) in tx.execute(_LOCKS).fetchall()}):
        held = tx.execute(_HELD, (tx.now, lock, room)).fetchall()
        for seq, tenant, lane_id, policy, due, cancelling, attempts in held:
            if due <= tx.now:
                tx.execute("UPDATE state SET wake_at = ? WHERE seq = ?", (tx.now, seq))
                lane = tx.lane(lane_id)
                lane.leased(tx.now)
                lane.reschedule()  # a probe that died makes room for another
            elif cancelling:
                mark_cancelled(tx, seq, tenant, lane_id, policy, IN_FLIGHT, attempts)
            else:
                return_to_queue(tx, seq, tenant, lane_id, policy, due)
        room -= len(held)
        if room <= 0:
            return True
        tx.execute(_FORGET, (lock,))
    worker_lock.remove_leftover_files()
    return False
