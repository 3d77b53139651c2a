"""The life of a task, between its attempts: released, cancelled, retried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus
from tarry.service.stores.sqlite.multirow import Bulk
from tarry.service.stores.sqlite.task_rows import found, log_key
from tarry.service.stores.sqlite.transaction import CANCELLED, EXHAUSTED, IN_FLIGHT, PENDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import Release
    from tarry.service.stores.sqlite.transaction import Ledger

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
LogLine: TypeAlias = tuple[int, int, int, str, bytearray]
"""A line of the attempt log: its tenant, task, and number, its outcome, and the attempt, packed."""
_LOG = Bulk("INSERT INTO attempt (id, log) VALUES {rows}", "(?, ?)")


def release(ledger: Ledger, leases: Sequence[Release]) -> list[FinishStatus]:
    """Hand unstarted leases back, where they are still held."""
    return [_release(ledger, one) for one in leases]


def _release(ledger: Ledger, one: Release) -> FinishStatus:
    row = ledger.execute(_STATE, (found(one.task.id),)).fetchone()
    if row is None or row[4] != one.task.version or row[5] != IN_FLIGHT:
        return FinishStatus.SUPERSEDED
    seq, tenant, lane_id, policy, _, _, cancelling, attempts, due = row
    if cancelling:
        end_cancelled(ledger, seq, tenant, lane_id, policy, IN_FLIGHT, attempts)
        return FinishStatus.CANCELLED
    due = due if one.next_attempt_at is None else max(due, one.next_attempt_at)
    hand_back(ledger, seq, tenant, lane_id, policy, due)
    return FinishStatus.DONE


def hand_back(ledger: Ledger, seq: int, tenant: int, lane_id: int, policy: int, due: int) -> None:
    """End a lease under which no attempt was made."""
    lane = ledger.lane(lane_id)
    ledger.execute(_RELEASE, (due, seq))
    ledger.move(tenant, lane, policy, IN_FLIGHT, PENDING)
    lane.due(due)


def end_cancelled(
    ledger: Ledger, seq: int, tenant: int, lane_id: int, policy: int, old: int, attempts: int
) -> None:
    """End a task that somebody cancelled."""
    ledger.execute(_CANCEL, (ledger.now, attempts, seq))
    ledger.move(tenant, ledger.lane(lane_id), policy, old, CANCELLED)


def log(ledger: Ledger, lines: Sequence[LogLine]) -> None:
    """Write lines of the attempt log, and count them."""
    values: list[Any] = []
    for tenant, seq, number, outcome, attempt in lines:
        values += (log_key(seq, number), attempt)
        ledger.seen(tenant, outcome)
    _LOG.run(ledger.execute, values)


def cancel(ledger: Ledger, tenant: str, task_id: str) -> CancelStatus | None:
    """Cancel a task."""
    row = ledger.execute(_STATE, (found(task_id),)).fetchone()
    if row is None or row[1] != ledger.names.tenant(tenant):
        return None
    seq, whose, lane_id, policy, _, status, cancelling, attempts, _ = row
    if status == PENDING:
        end_cancelled(ledger, seq, whose, lane_id, policy, status, attempts)
        return CancelStatus.CANCELLED
    if status != IN_FLIGHT:
        return CancelStatus.TERMINAL
    if not cancelling:
        ledger.execute("UPDATE state SET cancelling = 1 WHERE seq = ?", (seq,))
    return CancelStatus.REQUESTED


def retry_now(ledger: Ledger, tenant: str, task_id: str) -> RetryNowStatus | None:
    """Make a task due that waits or is dead."""
    row = ledger.execute(_STATE, (found(task_id),)).fetchone()
    if row is None or row[1] != ledger.names.tenant(tenant):
        return None
    seq, whose, lane_id, policy, _, status, _, _, due = row
    if status == IN_FLIGHT:
        return RetryNowStatus.RUNNING
    if status == EXHAUSTED:
        revive(ledger, seq, whose, lane_id, policy)
        return RetryNowStatus.DUE
    if status != PENDING:
        return RetryNowStatus.FINISHED
    due = min(due, ledger.now)
    ledger.execute(_RELEASE, (due, seq))
    ledger.lane(lane_id).due(due)
    return RetryNowStatus.DUE


def revive(ledger: Ledger, seq: int, tenant: int, lane_id: int, policy: int) -> None:
    """Bring a dead letter back: it begins anew, and its log goes on."""
    lane = ledger.lane(lane_id)
    ledger.execute(_REVIVE, (ledger.now, seq))
    ledger.move(tenant, lane, policy, EXHAUSTED, PENDING)
    lane.due(ledger.now)


def recover(ledger: Ledger, limit: int) -> bool:
    """End up to `limit` leases of workers that are dead; True: there may be more.

    An attempt that may have begun is abandoned now, and the next claim logs it as lost. A lease
    taken ahead of its time is handed back. A worker is forgotten with its last lease.
    """
    presence, room = ledger.presence, limit
    if presence is None:
        return False
    for lock in presence.gone({lock for (lock,) in ledger.execute(_LOCKS).fetchall()}):
        held = ledger.execute(_HELD, (ledger.now, lock, room)).fetchall()
        for seq, tenant, lane_id, policy, due, cancelling, attempts in held:
            if due <= ledger.now:
                ledger.execute("UPDATE state SET wake_at = ? WHERE seq = ?", (ledger.now, seq))
                lane = ledger.lane(lane_id)
                lane.leased(ledger.now)
                lane.settle()  # a probe that died makes room for another
            elif cancelling:
                end_cancelled(ledger, seq, tenant, lane_id, policy, IN_FLIGHT, attempts)
            else:
                hand_back(ledger, seq, tenant, lane_id, policy, due)
        room -= len(held)
        if room <= 0:
            return True
        ledger.execute(_FORGET, (lock,))
    presence.tidy()
    return False
