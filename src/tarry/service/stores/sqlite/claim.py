"""Claims: lease due tasks and tasks with an expired lease, in a fair order of lanes.

The order is: tenants in turn, and of each tenant the least recently served lane (a lane is the
queue of one downstream). Lanes and tenants are either *ready*, that is in the rotation that a claim
walks through, or *asleep* until one of their two *check times*. The check times of a lane are the
next due time of a task (`due_check_at`), and the next end of a lease or, while the lane is parked
(its breaker is open), the end of the parking (`expiry_check_at`). The check times of a tenant are
the earliest check times of its sleeping lanes.

A claim first wakes lanes and tenants whose check time has come: it makes them ready. A lane
from which tasks were leased moves to the end of the rotation. A lane from which no more tasks can
be leased now is put to sleep. So the cost of a claim grows with the number of tasks that it
returns, not with the number of sleeping lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tarry.service.model import LOST, AttemptRecord, Status
from tarry.service.store import ClaimResult, LeaseTerms
from tarry.service.stores.records import encode
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import (
    SELECT_TASK,
    SEQ,
    STATUS,
    WAKE_AT,
    decode_task,
)
from tarry.service.stores.sqlite.statements import MultiRowUpdate
from tarry.service.stores.sqlite.transaction import IN_FLIGHT, PENDING, WriteTransaction
from tarry.service.stores.sqlite.transitions import log_attempts, mark_cancelled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tarry.service.model import Task
    from tarry.service.stores.sqlite.transaction import LaneRow

    Row = tuple[Any, ...]

# `wake_at` is the due time of a PENDING task, and the end of the lease of an IN_FLIGHT task.
# `last_outcome_kind` is NULL if no attempt has failed, or if the task was replayed since.
_FIRST_ATTEMPT = f"status = {PENDING} AND last_outcome_kind IS NULL"
_RETRY = f"status = {PENDING} AND last_outcome_kind IS NOT NULL"
_LEASED = f"status = {IN_FLIGHT}"
_DUE_FIRST_ATTEMPTS, _DUE_RETRIES, _EXPIRED_LEASES = (
    f"{SELECT_TASK} WHERE s.lane = ? AND {condition} AND s.wake_at <= ? ORDER BY s.wake_at LIMIT ?"
    for condition in (_FIRST_ATTEMPT, _RETRY, _LEASED)
)
_LEASE_TASKS = MultiRowUpdate(f"""
UPDATE state SET status = {IN_FLIGHT}, wake_at = ?, next_attempt_at = ?, version = ?, attempts = ?,
    lost_attempts = ?, worker = ?
WHERE seq = ?
""")
_PAGE_SIZE = 16  # ready tenants or lanes that are read with one query
# Limits for one claim and for each of the two check columns:
_MAX_TENANTS_WOKEN = 1000
_MAX_CHECK_TIMES_CORRECTED = 16  # see `_earliest_check`
_CHECK_COLUMNS = ("due_check_at", "expiry_check_at")
_WAKE_TENANTS = tuple(
    "UPDATE tenant SET ready = 1 WHERE id IN (SELECT id FROM tenant "
    f"WHERE ready = 0 AND {column} <= ? ORDER BY {column} LIMIT ?)"
    for column in _CHECK_COLUMNS
)
_WAKE_LANES = tuple(
    "UPDATE lane SET ready = 1 WHERE id IN (SELECT id FROM lane "
    f"WHERE tenant = ? AND ready = 0 AND {column} <= ? ORDER BY {column} LIMIT ?)"
    for column in _CHECK_COLUMNS
)
_EARLIEST_SLEEPING_TENANT = tuple(
    f"SELECT {column}, id FROM tenant WHERE ready = 0 AND {column} IS NOT NULL "
    f"ORDER BY {column} LIMIT 1"
    for column in _CHECK_COLUMNS
)
_EARLIEST_LANE_CHECKS = "SELECT " + ", ".join(
    f"(SELECT min({column}) FROM lane WHERE tenant = ?1 AND ready = 0 AND {column} IS NOT NULL)"
    for column in _CHECK_COLUMNS
)
_EARLIEST_DUE_AND_LEASE_END = "SELECT " + ", ".join(
    f"(SELECT min(wake_at) FROM state WHERE lane = ?1 AND {condition})"
    for condition in (_FIRST_ATTEMPT, _RETRY, _LEASED)
)
_READY_TENANTS = """
SELECT last_turn, id FROM tenant WHERE ready = 1 AND (last_turn, id) > (?, ?)
ORDER BY last_turn, id LIMIT ?
"""
_READY_LANES = """
SELECT last_turn, id, name FROM lane WHERE tenant = ? AND ready = 1 AND (last_turn, id) > (?, ?)
ORDER BY last_turn, id LIMIT ?
"""
_HAS_READY_LANE = "SELECT 1 FROM lane WHERE tenant = ? AND ready = 1 LIMIT 1"
_RUNNING_LEASES = f"""
SELECT count(*), min(wake_at) FROM (
    SELECT wake_at FROM state WHERE lane = ? AND status = {IN_FLIGHT} AND wake_at > ?
    ORDER BY wake_at LIMIT ?)
"""
_PUT_TENANT_TO_SLEEP = (
    "UPDATE tenant SET due_check_at = ?, expiry_check_at = ?, ready = 0 WHERE id = ?"
)


@write_operation
def claim(
    tx: WriteTransaction,
    terms: LeaseTerms,
    limit: int,
    per_lane: int,
    lane_limits: Mapping[str, int],
) -> ClaimResult:
    """Lease up to `limit` tasks; see `Store.claim`."""
    tx.flush()  # the statements below read lanes from the file
    lost_before_claim = tx.lost_attempts  # by other claims in the same transaction
    rotation = ClaimRotation(tx, terms.horizon_ms, limit, lane_limits)
    served_lane_ids: set[int] = set()
    leased: list[tuple[int, int, Task]] = []  # (due time, `seq`, task)
    renewed: list[Task] = []
    consecutive_opens: dict[str, int] = {}  # by name of a half-open lane
    lanes, remaining = rotation.lanes(), limit
    while remaining > 0 and (lane := next(lanes, None)):
        lane_limit = min(remaining, per_lane, lane_limits.get(lane.name, per_lane))
        rows = _find_claimable(tx, rotation, lane, terms, lane_limit)
        if not rows:
            continue
        remaining -= len(rows)
        served_lane_ids.add(lane.id)
        leased_of_lane = _lease_rows(tx, lane, terms, rows, renewed)
        leased += leased_of_lane
        if leased_of_lane and lane.parked_until is not None:
            consecutive_opens[lane.name] = lane.consecutive_opens
    rotation.record_served(served_lane_ids)
    leased.sort(key=lambda entry: entry[:2])
    tasks = [task for _, _, task in leased]
    next_at = rotation.end_claim(is_full=remaining <= 0)
    lost_attempts = tx.lost_attempts - lost_before_claim
    return ClaimResult(tx.now, tasks, consecutive_opens, next_at, lost_attempts, renewed)


def _find_claimable(
    tx: WriteTransaction, rotation: ClaimRotation, lane: LaneRow, terms: LeaseTerms, limit: int
) -> list[Row]:
    """Return the rows of up to `limit` tasks of a lane that may be leased; see `Store.claim`."""
    now, is_half_open = tx.now, lane.parked_until is not None
    if lane.parked_until is not None:
        if lane.parked_until > now:
            return []
        limit = min(limit, lane.probes - rotation.running_leases(lane)[0])
    if limit <= 0:
        return []
    expired: list[Row] = []
    if lane.lease_end_at is not None and lane.lease_end_at <= now:
        expired = tx.execute(_EXPIRED_LEASES, (lane.id, now, limit)).fetchall()
    due_until = now + terms.horizon_ms
    first_attempts = tx.execute(_DUE_FIRST_ATTEMPTS, (lane.id, due_until, limit)).fetchall()
    # One more than `limit`, because the task of the last probe may be among them, and comes last.
    retries = tx.execute(_DUE_RETRIES, (lane.id, due_until, limit + 1)).fetchall()
    if is_half_open:
        last = [row for row in retries if row[SEQ] == lane.last_probe]
        others = [row for row in retries if row[SEQ] != lane.last_probe]
        ready_count = sum(row[WAKE_AT] <= now for row in others)
        first_count = (limit + now % 3) // 3  # a third, rounded as below
        rows = first_attempts[:first_count] + others[:ready_count] + first_attempts[first_count:]
        rows = (rows + expired + others[ready_count:] + last)[:limit]
        lane.last_probe = rows[-1][SEQ] if rows else lane.last_probe
        return rows
    limit -= len(expired)
    # A third are retries. `now % 3` sometimes rounds up, so that a limit of 1 also selects retries.
    retry_count = max((limit + now % 3) // 3, limit - len(first_attempts))
    retries = retries[:retry_count]
    return expired + first_attempts[: limit - len(retries)] + retries


def _lease_rows(
    tx: WriteTransaction, lane: LaneRow, terms: LeaseTerms, rows: list[Row], renewed: list[Task]
) -> list[tuple[int, int, Task]]:
    """Lease the tasks in `rows`; return due time, `seq` and task of each leased task.

    Expired leases of the claiming worker are renewed, and their tasks added to `renewed`.
    """
    worker = tx.names.worker_id(terms.worker)
    leased: list[tuple[int, int, Task]] = []
    parameters: list[Any] = []
    for row in rows:
        task = decode_task(row)
        is_renewal = task.worker == terms.worker  # PENDING tasks have no worker
        if task.status is Status.IN_FLIGHT and not is_renewal and _end_lost_attempt(tx, task, row):
            continue
        task.status = Status.IN_FLIGHT
        task.version += not is_renewal
        task.worker = terms.worker
        startable_at = task.wake_at if row[STATUS] == PENDING else task.next_attempt_at
        task.wake_at = max(tx.now, startable_at) + terms.length_ms
        seq, tenant, _, policy = row[SEQ:]
        parameters += (task.wake_at, task.next_attempt_at, task.version)
        parameters += (task.attempts, task.lost_attempts, worker, seq)
        if is_renewal:
            renewed.append(task)
        else:
            leased.append((task.next_attempt_at, seq, task))
        tx.count_transition(tenant, lane, policy, row[STATUS], IN_FLIGHT)
    _LEASE_TASKS.execute(tx.execute, parameters)
    return leased


def _end_lost_attempt(tx: WriteTransaction, task: Task, row: Row) -> bool:
    """Log the attempt of an expired lease as lost; return whether the task is now CANCELLED."""
    task.attempts += 1
    task.lost_attempts += 1
    tx.lost_attempts += 1
    due = task.next_attempt_at
    attempt = AttemptRecord(
        attempt_number=task.attempts,
        scheduled_at=due,
        started_at=due,
        outcome=LOST,
        worker=task.worker,
    )
    encoded_attempt = bytearray(encode(attempt))
    seq, tenant, _, _ = row[SEQ:]
    log_attempts(tx, [(tenant, seq, task.attempts, LOST, encoded_attempt)])
    if task.cancelling:
        mark_cancelled(tx, row[SEQ:], IN_FLIGHT, task.attempts)
        return True
    task.next_attempt_at = task.wake_at
    return False


class ClaimRotation:
    """The rotation as one claim uses it: yields the ready lanes, then updates the rotation.

    Iterate over `lanes`, call `record_served`, then call `end_claim`.
    """

    def __init__(
        self, tx: WriteTransaction, horizon_ms: int, limit: int, lane_limits: Mapping[str, int]
    ) -> None:
        self._tx = tx
        self._horizon_ms = horizon_ms
        self._wake_until = (tx.now + horizon_ms, tx.now)
        """The end of the horizon, and now. A claim wakes lanes and tenants with a `due_check_at` up
        to the first of these times, or with an `expiry_check_at` up to the second."""
        self._max_lanes_woken = 2 * limit + 64  # of each tenant
        self._skipped_lanes = {name for name, limit in lane_limits.items() if not limit}
        tenant_names = (name for name in self._skipped_lanes if "/" not in name)  # lanes have one
        self._skipped_tenants = {tx.names.tenant_id(name) for name in tenant_names}
        self._visited_tenants: list[int] = []
        self._fully_visited_tenants: set[int] = set()
        """Tenants whose ready lanes were all visited, except skipped lanes."""
        self._visited_lanes: list[LaneRow] = []

    def lanes(self) -> Iterator[LaneRow]:
        """Yield one ready lane of each tenant, then another of each tenant, and so on."""
        for statement, until in zip(_WAKE_TENANTS, self._wake_until, strict=True):
            self._tx.execute(statement, (until, _MAX_TENANTS_WOKEN))
        unvisited_tenants = self._ready_tenants()
        # Tenants that have had a turn, each with the iterator over its remaining lanes.
        waiting_tenants: deque[tuple[int, Iterator[LaneRow]]] = deque()
        while True:
            tenant = next(unvisited_tenants, None)
            if tenant is not None:
                self._visited_tenants.append(tenant)
                lanes = self._ready_lanes(tenant)
            elif waiting_tenants:
                tenant, lanes = waiting_tenants.popleft()
            else:
                return
            lane = next(lanes, None)
            if lane is None:
                self._fully_visited_tenants.add(tenant)
            else:
                self._visited_lanes.append(lane)
                yield lane
                waiting_tenants.append((tenant, lanes))

    def _ready_tenants(self) -> Iterator[int]:
        last_turn, tenant = -1, -1
        while page := self._tx.execute(_READY_TENANTS, (last_turn, tenant, _PAGE_SIZE)).fetchall():
            yield from (tenant for _, tenant in page if tenant not in self._skipped_tenants)
            last_turn, tenant = page[-1]

    def _ready_lanes(self, tenant: int) -> Iterator[LaneRow]:
        execute, max_woken = self._tx.execute, self._max_lanes_woken
        yielded: set[int] = set()
        has_more = True
        while has_more:
            # If the limit of a statement was reached, more lanes may wait behind skipped ones.
            has_more = False
            for statement, until in zip(_WAKE_LANES, self._wake_until, strict=True):
                has_more |= execute(statement, (tenant, until, max_woken)).rowcount == max_woken
            last_turn, lane = -1, -1
            while page := execute(_READY_LANES, (tenant, last_turn, lane, _PAGE_SIZE)).fetchall():
                for _, lane, name in page:
                    if name not in self._skipped_lanes and lane not in yielded:
                        yielded.add(lane)
                        yield self._tx.lane(lane)
                last_turn, lane, _ = page[-1]

    def running_leases(self, lane: LaneRow) -> tuple[int, int | None]:
        """Return how many leases of a half-open lane have not expired, and their earliest end.

        A lane is half-open after it was parked: up to `lane.probes` of its tasks may be leased. The
        count stops at `lane.probes`, because callers only compare it with that number.
        """
        parameters = (lane.id, self._tx.now, lane.probes)
        [(count, first_end)] = self._tx.execute(_RUNNING_LEASES, parameters)
        return count, first_end

    def record_served(self, served_lane_ids: Collection[int]) -> None:
        """Move served lanes to the end of the rotation, and put idle lanes to sleep."""
        tx = self._tx
        # The rotation is ordered by `last_turn`, so each served lane gets the next turn number.
        turn = old_turn = tx.execute("SELECT value FROM meta WHERE name = 'turn'").fetchone()[0]
        turn_of_tenant: dict[int, int] = {}
        for lane in self._visited_lanes:
            lane.schedule_changed = True
            if lane.id in served_lane_ids:
                turn += 1
                lane.last_claim_at, lane.last_turn = tx.now, turn
                turn_of_tenant[lane.tenant] = turn
            self._put_to_sleep_if_idle(lane)
        tx.flush()
        if turn != old_turn:
            tx.execute("UPDATE meta SET value = ? WHERE name = 'turn'", (turn,))
            rows = [(turn, tenant) for tenant, turn in turn_of_tenant.items()]
            tx.executemany("UPDATE tenant SET last_turn = ? WHERE id = ?", rows)

    def _put_to_sleep_if_idle(self, lane: LaneRow) -> None:
        """Put a lane to sleep, unless a claim could lease more of its tasks now."""
        horizon_end, now = self._wake_until
        times = self._tx.execute(_EARLIEST_DUE_AND_LEASE_END, (lane.id,)).fetchone()
        *due_times, lane.lease_end_at = times
        lane.due_at = min((time for time in due_times if time is not None), default=None)
        if lane.parked_until is not None:
            if lane.parked_until > now:
                lane.sleep_until(None, lane.parked_until)
                return
            lease_count, first_end = self.running_leases(lane)
            if lease_count >= lane.probes:
                lane.sleep_until(None, first_end)
                return
        has_due_task = lane.due_at is not None and lane.due_at <= horizon_end
        has_expired_lease = lane.lease_end_at is not None and lane.lease_end_at <= now
        if not (has_due_task or has_expired_lease):
            lane.put_to_sleep()

    def end_claim(self, *, is_full: bool) -> int | None:
        """Put visited tenants without a ready lane to sleep, and return `ClaimResult.next_at`.

        `is_full` means that the claim stopped at its limit. Tenants that it did not visit may then
        have tasks that are due now.
        """
        tx, now = self._tx, self._tx.now
        times: list[int] = []
        for tenant in self._visited_tenants:
            due_check, expiry_check = tx.execute(_EARLIEST_LANE_CHECKS, (tenant,)).fetchone()
            if not tx.execute(_HAS_READY_LANE, (tenant,)).fetchall():
                tx.execute(_PUT_TENANT_TO_SLEEP, (due_check, expiry_check, tenant))
            elif tenant in self._fully_visited_tenants:
                # This tenant may be ready only because of skipped lanes. `_earliest_check` reads
                # only sleeping tenants, so the check times of its sleeping lanes are added here.
                times += self._wake_times(due_check, expiry_check)
        if any(lane.ready for lane in self._visited_lanes):
            return now
        if is_full and tx.execute(_READY_TENANTS, (-1, -1, 1)).fetchall():
            return now
        earliest = [self._earliest_check(index) for index in range(len(_CHECK_COLUMNS))]
        times += self._wake_times(*earliest)
        return max(now, min(times)) if times else None

    def _earliest_check(self, index: int) -> int | None:
        """Return the earliest time in a column of `_CHECK_COLUMNS` among sleeping tenants.

        The check time of a tenant is only a lower bound, because it is not updated when the check
        times of its lanes become later. A few of these outdated times are corrected here.
        """
        execute = self._tx.execute
        earliest: int | None = None
        for _ in range(_MAX_CHECK_TIMES_CORRECTED):
            row = execute(_EARLIEST_SLEEPING_TENANT[index]).fetchone()
            if row is None:
                return None
            earliest, tenant = row
            exact_checks = execute(_EARLIEST_LANE_CHECKS, (tenant,)).fetchone()
            if exact_checks[index] == earliest:
                break
            execute(_PUT_TENANT_TO_SLEEP, (*exact_checks, tenant))
        return earliest

    def _wake_times(self, due_check: int | None, expiry_check: int | None) -> list[int]:
        """Return the times from which a claim wakes a lane or tenant with these check times."""
        times = (None if due_check is None else due_check - self._horizon_ms, expiry_check)
        return [at for at in times if at is not None]
