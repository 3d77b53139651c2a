"""Claims: lease due tasks and tasks with an expired lease, in a fair order of lanes."""

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
from tarry.service.stores.sqlite.transaction import IN_FLIGHT, PENDING
from tarry.service.stores.sqlite.transitions import log_attempts, mark_cancelled

if TYPE_CHECKING:
    from collections.abc import Collection

    from tarry.service.model import Task
    from tarry.service.store import Lease
    from tarry.service.stores.sqlite.transaction import LaneRow, Transaction

    Row = tuple[Any, ...]

_DUE_TASKS = (
    f"{SELECT_TASK} WHERE s.lane = ? AND s.status = {PENDING} AND s.wake_at <= ? "
    "ORDER BY s.wake_at LIMIT ?"
)
_EXPIRED_LEASES = (
    f"{SELECT_TASK} WHERE s.lane = ? AND s.status = {IN_FLIGHT} AND s.wake_at <= ? "
    "ORDER BY s.wake_at LIMIT ?"
)
# The rows exist, so only the part after DO UPDATE is applied; status 1 is IN_FLIGHT.
_LEASE_TASKS = MultiRowStatement(
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
    """Lease up to `limit` tasks; see `Store.claim`."""
    tx.flush()  # the order of lanes is read with SQL
    lost_before = tx.lost_attempts
    order = FairOrder(tx, lease.horizon_ms, limit, skip)
    served_lanes: set[int] = set()
    leased: list[tuple[int, int, Task]] = []  # due time and row id, to sort by; task
    probing: dict[str, int] = {}
    lanes, slots_left = order.lanes(), limit
    while slots_left > 0 and (lane := next(lanes, None)):
        rows = _find_claimable(tx, order, lane, lease, min(slots_left, per_lane))
        if not rows:
            continue
        slots_left -= len(rows)
        served_lanes.add(lane.id)
        leased_of_lane = _lease_rows(tx, lane, lease, rows)
        leased += leased_of_lane
        if leased_of_lane and lane.parked_until is not None:
            probing[lane.name] = lane.opened
    order.record_served(served_lanes)
    leased.sort(key=lambda entry: entry[:2])
    return ClaimResult(
        tx.now,
        [task for _, _, task in leased],
        probing,
        order.next_claim_at(is_full=slots_left <= 0),
        tx.lost_attempts - lost_before,
    )


def _find_claimable(
    tx: Transaction, order: FairOrder, lane: LaneRow, lease: Lease, limit: int
) -> list[Row]:
    """Return the rows of up to `limit` tasks of a lane that may be leased, earliest first."""
    now = tx.now
    if lane.parked_until is not None:
        if lane.parked_until > now:
            return []
        limit = min(limit, lane.probes - order.running_leases(lane)[0])
    if limit <= 0:
        return []
    rows = tx.execute(_DUE_TASKS, (lane.id, now + lease.horizon_ms, limit)).fetchall()
    if lane.lease_end_at is not None and lane.lease_end_at <= now:
        rows += tx.execute(_EXPIRED_LEASES, (lane.id, now, limit)).fetchall()
        rows.sort(key=lambda row: (row[WAKE_AT], row[SEQ]))
    return rows[:limit]


def _lease_rows(
    tx: Transaction, lane: LaneRow, lease: Lease, rows: list[Row]
) -> list[tuple[int, int, Task]]:
    """Lease the tasks of rows; return due time, row id and task of each leased task."""
    worker = tx.names.worker_id(lease.worker)
    leased: list[tuple[int, int, Task]] = []
    parameters: list[Any] = []
    for row in rows:
        task = decode_task(row)
        if task.status is Status.IN_FLIGHT and _log_lost_attempt(tx, task, row):
            continue
        task.status = Status.IN_FLIGHT
        task.version += 1
        task.worker = lease.worker
        task.wake_at = max(tx.now, task.next_attempt_at) + lease.length_ms
        state = (task.wake_at, task.next_attempt_at, task.version, task.attempts, task.lost)
        parameters += (row[SEQ], *state, worker)
        leased.append((task.next_attempt_at, row[SEQ], task))
        tx.count_transition(row[TENANT], lane, row[POLICY], row[STATUS], IN_FLIGHT)
    _LEASE_TASKS.execute(tx.execute, parameters)
    return leased


def _log_lost_attempt(tx: Transaction, task: Task, row: Row) -> bool:
    """Log the attempt of an expired lease as lost.

    Returns True if the task was being cancelled: it is then CANCELLED and must not be leased again.
    """
    task.attempts += 1
    task.lost += 1
    tx.lost_attempts += 1
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
        mark_cancelled(tx, seq, tenant, row[LANE], row[POLICY], IN_FLIGHT, task.attempts)
        return True
    task.next_attempt_at = task.wake_at
    return False
