"""A claim: what lanes give when it is their turn, and what became of those who held it before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import LOST, AttemptRecord, Status
from tarry.service.store import ClaimResult
from tarry.service.stores.sqlite.fair_order import FairOrder
from tarry.service.stores.sqlite.multirow import MultiRowStatement
from tarry.service.stores.sqlite.task_rows import (
    LANE,
    POLICY,
    SELECT_TASK,
    SEQ,
    STATUS,
    TENANT,
    WAKE_AT,
    decode_task,
    encode,
)
from tarry.service.stores.sqlite.transitions import log_attempts, mark_cancelled

if TYPE_CHECKING:
    from collections.abc import Collection

    from tarry.service.model import Task
    from tarry.service.store import Lease
    from tarry.service.stores.sqlite.transaction import LaneRow, Transaction

    Row = tuple[Any, ...]

_DUE = (
    SELECT_TASK + "WHERE s.lane = ? AND s.status = 0 AND s.wake_at <= ? ORDER BY s.wake_at LIMIT ?"
)
_ABANDONED = (
    SELECT_TASK + "WHERE s.lane = ? AND s.status = 1 AND s.wake_at <= ? ORDER BY s.wake_at LIMIT ?"
)
_LEASE = MultiRowStatement(
    """
INSERT INTO state (seq, tenant, lane, policy, started_at, status, wake_at, next_attempt_at, version,
    attempts, lost, worker)
VALUES {rows}
ON CONFLICT (seq) DO UPDATE SET status = 1, wake_at = excluded.wake_at,
    next_attempt_at = excluded.next_attempt_at, version = excluded.version,
    attempts = excluded.attempts, lost = excluded.lost, worker = excluded.worker
""",
    "(?, 0, 0, 0, 0, 1, ?, ?, ?, ?, ?, ?)",
)


def claim(
    tx: Transaction, lease: Lease, limit: int, per_lane: int, skip: Collection[str]
) -> ClaimResult:
    """Lease tasks that are due within the horizon, or abandoned, from lanes that are open."""
    tx.flush()
    lost = tx.lost
    ring = FairOrder(tx, lease.horizon, limit, skip)
    gave: set[int] = set()
    taken: list[tuple[int, int, Task]] = []
    probing: dict[str, int] = {}
    turns, room = ring.turns(), limit
    while room > 0 and (lane := next(turns, None)):
        rows = _offered(tx, ring, lane, lease, min(room, per_lane))
        if not rows:
            continue
        room -= len(rows)
        gave.add(lane.id)
        given = _lease(tx, lane, lease, rows)
        taken += given
        if given and lane.parked_until is not None:
            probing[lane.name] = lane.opened
    ring.seat(gave)
    tasks = [task for _, _, task in sorted(taken, key=_order)]
    next_at = ring.next_at(full=room <= 0)
    return ClaimResult(tx.now, tasks, probing, next_at, tx.lost - lost)


def _order(taken: tuple[int, int, Task]) -> tuple[int, int]:
    return taken[:2]


def _offered(tx: Transaction, ring: FairOrder, lane: LaneRow, lease: Lease, most: int) -> list[Row]:
    """Return what a lane may give, earliest first."""
    now = tx.now
    if lane.parked_until is not None:
        if lane.parked_until > now:
            return []
        most = min(most, lane.probes - ring.held(lane)[0])
    if most <= 0:
        return []
    rows = tx.execute(_DUE, (lane.id, now + lease.horizon, most)).fetchall()
    if lane.lapse_at is not None and lane.lapse_at <= now:
        rows += tx.execute(_ABANDONED, (lane.id, now, most)).fetchall()
        rows.sort(key=lambda row: (row[WAKE_AT], row[SEQ]))
    return rows[:most]


def _lease(
    tx: Transaction, lane: LaneRow, lease: Lease, rows: list[Row]
) -> list[tuple[int, int, Task]]:
    """Lease tasks; return each with its time and number."""
    worker = tx.names.worker_id(lease.worker)
    taken: list[tuple[int, int, Task]] = []
    leases: list[Any] = []
    for row in rows:
        task = decode_task(row)
        if task.status is Status.IN_FLIGHT and _lose(tx, task, row):
            continue
        task.status = Status.IN_FLIGHT
        task.version += 1
        task.worker = lease.worker
        task.wake_at = max(tx.now, task.next_attempt_at) + lease.length
        state = (task.wake_at, task.next_attempt_at, task.version, task.attempts, task.lost)
        leases += (row[SEQ], *state, worker)
        taken.append((task.next_attempt_at, row[SEQ], task))
        tx.count_transition(row[TENANT], lane, row[POLICY], row[STATUS], Status.IN_FLIGHT)
    _LEASE.run(tx.execute, leases)
    return taken


def _lose(tx: Transaction, task: Task, row: Row) -> bool:
    """Log an abandoned attempt; True: the task was cancelled, and ends with it."""
    task.attempts += 1
    task.lost += 1
    tx.lost += 1
    attempt = AttemptRecord(
        number=task.attempts,
        scheduled_at=task.next_attempt_at,
        started_at=task.next_attempt_at,
        outcome=LOST,
        worker=task.worker,
    )
    seq, tenant = row[SEQ], row[TENANT]
    log_attempts(tx, [(tenant, seq, task.attempts, LOST, bytearray(encode(attempt)))])
    if task.cancelling:
        old = int(Status.IN_FLIGHT)
        mark_cancelled(tx, seq, tenant, row[LANE], row[POLICY], old, task.attempts)
        return True
    task.next_attempt_at = task.wake_at
    return False
