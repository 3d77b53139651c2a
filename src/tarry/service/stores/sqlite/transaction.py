"""One transaction: its time, and the lanes, counters and names that it uses.

Each lane row and counter is read at most once, changed in memory, and written once by `flush`. So a
thousand tasks of one lane cost only one UPDATE of that lane.

A lane (the queue of one downstream) is *ready*, that is in the rotation that claims walk through
(see `ClaimRotation` in `claim`), or *asleep* until one of its two *check times*. `due_check_at` is
the due time of its earliest pending task. A claim makes the lane ready one lease horizon earlier,
because tasks are leased that early. `expiry_check_at` is the end of its earliest lease or, if the
lane is parked (its breaker is open), of the parking. A claim makes the lane ready at that time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tarry.service.model import Status
from tarry.service.rules.transitions import COUNTER_CHANGES, COUNTERS
from tarry.service.stores.sqlite.statements import (
    NULL_NUMBER_PARAM,
    NULLABLE_NUMBER_SQL,
    MultiRowStatement,
    MultiRowUpdate,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from sqlite3 import Connection, Cursor

    from tarry.service.stores.sqlite.worker_locks import WorkerLock

    TaskRowIds: TypeAlias = Sequence[int]
    """The `seq` (row id) of one task, and the ids of its tenant, lane and policy."""

MINUTE_MS = 60_000
# Plain ints: comparing them is faster than comparing enum members.
PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = (int(status) for status in Status)
TENANT_COUNTERS = (*COUNTERS, "superseded")
"""Columns with a tenant's number of tasks in each status, and of superseded results."""
_SUPERSEDED_INDEX = len(COUNTERS)  # in TENANT_COUNTERS
_MAX_CACHED_NAMES = 100_000
_INCREMENTS = ", ".join(f"{name} = {name} + ?" for name in TENANT_COUNTERS)
_ADD_TO_TENANT_COUNTERS = f"UPDATE tenant SET {_INCREMENTS} WHERE id = ?"
_MOVE_DUE_CHECK_EARLIER, _MOVE_EXPIRY_CHECK_EARLIER = (
    f"UPDATE tenant SET {column} = ?1 "
    f"WHERE id = ?2 AND ready = 0 AND ({column} IS NULL OR {column} > ?1)"
    for column in ("due_check_at", "expiry_check_at")
)
_INSERT_LANE = "INSERT INTO lane (tenant, name) VALUES (?, ?) RETURNING id"
_ADD_TO_POLICY_USE = (
    "UPDATE policy_use SET live_tasks = live_tasks + ?, tasks = tasks + ? WHERE id = ?"
)
_ADD_TO_ATTEMPTS_PER_MINUTE = MultiRowStatement("""
INSERT INTO series (tenant, minute, outcome, count) VALUES [?, ?, ?, ?]
ON CONFLICT DO UPDATE SET count = count + excluded.count
""")
# All lanes are returned as one JSON row, because each fetched row releases the GIL.
_READ_LANES = MultiRowStatement("""
WITH wanted (id) AS (VALUES [?])
SELECT json_group_array(json_array(l.id, l.tenant, l.name, l.parked_until, l.probes,
    l.consecutive_opens, l.paused, l.pending, l.in_flight, l.exhausted, l.last_claim_at,
    l.last_turn, l.due_at, l.lease_end_at, l.due_check_at, l.expiry_check_at, l.ready, l.last_probe,
    l.tasks))
FROM wanted CROSS JOIN lane AS l ON l.id = wanted.id
""")
_WRITE_LANE_COUNTS = MultiRowUpdate(f"""
UPDATE lane SET tasks = ?, pending = ?, in_flight = ?, exhausted = ?,
    due_at = {NULLABLE_NUMBER_SQL}, lease_end_at = {NULLABLE_NUMBER_SQL}
WHERE id = ?
""")
_WRITE_LANE_SCHEDULES = MultiRowUpdate(f"""
UPDATE lane SET parked_until = {NULLABLE_NUMBER_SQL}, probes = ?, consecutive_opens = ?, paused = ?,
    last_claim_at = {NULLABLE_NUMBER_SQL}, last_turn = ?, due_check_at = {NULLABLE_NUMBER_SQL},
    expiry_check_at = {NULLABLE_NUMBER_SQL}, ready = ?, last_probe = {NULLABLE_NUMBER_SQL}
WHERE id = ?
""")


class LaneRow(msgspec.Struct, gc=False, array_like=True):
    """A row of the table `lane`; the columns are explained in `schema`."""

    id: int
    tenant: int
    name: str
    parked_until: int | None
    probes: int
    consecutive_opens: int
    paused: int
    pending: int
    in_flight: int
    exhausted: int
    last_claim_at: int | None
    last_turn: int
    due_at: int | None
    lease_end_at: int | None
    due_check_at: int | None
    expiry_check_at: int | None
    ready: int
    last_probe: int | None
    tasks: int
    schedule_changed: bool = False
    """Whether `_WRITE_LANE_SCHEDULES` has to be executed. Most transitions change only the columns
    of `_WRITE_LANE_COUNTS`, which are cheaper to write: no index of a lane with tasks contains
    them."""

    def lower_due_at(self, due_at: int) -> None:
        """Lower `self.due_at` to the due time of a pending task, unless it is earlier already."""
        if self.due_at is None or due_at < self.due_at:
            self.due_at = due_at
            self.update_check_times()

    def lower_lease_end_at(self, end_at: int) -> None:
        """Lower `self.lease_end_at` to the end of a lease, unless it is earlier already."""
        if self.lease_end_at is None or end_at < self.lease_end_at:
            self.lease_end_at = end_at
            self.update_check_times()

    def update_check_times(self) -> None:
        """Update the check times of a lane that is asleep; a ready lane needs none."""
        if self.ready:
            return
        due_check, expiry_check = self.due_at, self.lease_end_at
        if self.paused:
            due_check = expiry_check = None
        elif self.parked_until is not None:
            # No task of a parked lane is leased before the parking ends. So if a task is due before
            # that time, the lane is made ready exactly when the parking ends.
            if due_check is not None and due_check <= self.parked_until:
                due_check, expiry_check = None, self.parked_until
            elif expiry_check is not None:
                expiry_check = max(expiry_check, self.parked_until)
        self.sleep_until(due_check, expiry_check)

    def put_to_sleep(self) -> None:
        """Take the lane out of the rotation until check times that are computed here."""
        self.ready, self.schedule_changed = 0, True
        self.update_check_times()

    def sleep_until(self, due_check: int | None, expiry_check: int | None) -> None:
        """Take the lane out of the rotation until the given check times."""
        if self.ready or due_check != self.due_check_at or expiry_check != self.expiry_check_at:
            self.due_check_at, self.expiry_check_at = due_check, expiry_check
            self.ready, self.schedule_changed = 0, True


_decode_lanes = msgspec.json.Decoder(list[LaneRow]).decode


class InternedNames:
    """Maps the names of tenants, lanes, policies and workers to ids, and caches the ids.

    Rows refer to a name by its id, an integer. Ids become invalid if a failed transaction has
    assigned them, or if this or another process has removed names: SQLite then uses their ids
    again. `lock_token` is the token of this process's `WorkerLock`; None: it has no such lock.
    """

    def __init__(self, connection: Connection, lock_token: str | None = None) -> None:
        self._execute = connection.execute
        self._lock_token = lock_token
        self._cache: dict[str | tuple[str, ...], int] = {}
        self._removal_count: int | None = None
        """The number of removals in the file when the cache was filled; None: the cache is empty,
        or has ids from the current transaction."""

    def clear(self) -> None:
        """Empty the cache. Called after a failed transaction, and when names were removed."""
        self._cache.clear()
        self._removal_count = None

    def clear_if_outdated(self) -> None:
        """Empty the cache if names were removed. Called at the beginning of a transaction."""
        [(count,)] = self._execute("SELECT value FROM meta WHERE name = 'removals'")
        if count != self._removal_count:
            self._cache.clear()
            self._removal_count = count

    def record_removal(self) -> None:
        """Make all processes empty their caches. Called in the transaction that removes names."""
        self._execute("UPDATE meta SET value = value + 1 WHERE name = 'removals'")
        self.clear()

    def tenant_id(self, name: str) -> int:
        """Return the id of a tenant."""
        return self._cache.get(name) or self._find_or_insert(
            name,
            "SELECT id FROM tenant WHERE name = ?",
            "INSERT INTO tenant (name) VALUES (?) RETURNING id",
            (name,),
        )

    def lane_id(self, name: str) -> int:
        """Return the id of a lane. The part of the name before the first slash is the tenant."""
        lane_id = self.find_lane(name)
        if lane_id is None:
            values = (self.tenant_id(name.partition("/")[0]), name)
            row = self._execute(_INSERT_LANE, values).fetchone()
            self._execute("UPDATE tenant SET lanes = lanes + 1 WHERE id = ?", values[:1])
            lane_id = self._cache_id(("lane", name), row)
        return lane_id

    def find_lane(self, name: str) -> int | None:
        """Return the id of a lane, or None if the lane does not exist."""
        lane_id = self._cache.get(("lane", name))
        if lane_id is None:
            row = self._execute("SELECT id FROM lane WHERE name = ?", (name,)).fetchone()
            lane_id = None if row is None else self._cache_id(("lane", name), row)
        return lane_id

    def policy_id(self, tenant: str, policy: str) -> int:
        """Return the id of a tenant's policy; the policy itself need not be stored."""
        return self._cache.get(("policy", tenant, policy)) or self._find_or_insert(
            ("policy", tenant, policy),
            "SELECT id FROM policy_use WHERE tenant = ? AND policy = ?",
            "INSERT INTO policy_use (tenant, policy) VALUES (?, ?) RETURNING id",
            (self.tenant_id(tenant), policy),
        )

    def worker_id(self, name: str) -> int:
        """Return the id of a worker of this process; its row has the token of the lock."""
        return self._cache.get(("worker", name, "")) or self._find_or_insert(
            ("worker", name, ""),
            "SELECT id FROM worker WHERE name = ? AND lock IS ?",
            "INSERT INTO worker (name, lock) VALUES (?, ?) RETURNING id",
            (name, self._lock_token),
        )

    def _find_or_insert(
        self, key: str | tuple[str, ...], select: str, insert: str, values: tuple[object, ...]
    ) -> int:
        """Return the id of a name that is not cached, and cache the id."""
        row = self._execute(select, values).fetchone() or self._execute(insert, values).fetchone()
        return self._cache_id(key, row)

    def _cache_id(self, key: str | tuple[str, ...], row: Sequence[int]) -> int:
        if len(self._cache) >= _MAX_CACHED_NAMES:
            self._cache.clear()
        self._cache[key] = name_id = row[0]
        return name_id


class ReadTransaction:
    """A read transaction: a snapshot of the database, and the time in epoch milliseconds."""

    def __init__(self, connection: Connection, now: int) -> None:
        self.execute: Callable[..., Cursor] = connection.execute
        self.now = now


class WriteTransaction(ReadTransaction):
    """A write transaction. Call `flush` before SQL that reads lanes or counters.

    Tenants, lanes and policies are passed by their ids, see `InternedNames`.
    """

    def __init__(
        self, connection: Connection, names: InternedNames, now: int, lock: WorkerLock | None
    ) -> None:
        super().__init__(connection, now)
        self.executemany: Callable[..., Cursor] = connection.executemany
        self.names = names
        self.worker_lock = lock
        self.lost_attempts: int = 0
        """The number of attempts that claims of this transaction have logged as lost."""
        self._lanes: dict[int, LaneRow] = {}
        self._counter_changes: dict[int, list[int]] = {}
        """For each tenant: the changes of `TENANT_COUNTERS`."""
        self._stored_live_counts: dict[int, int] = {}
        """For each tenant: the number of live (PENDING or IN_FLIGHT) tasks in the file, without the
        changes of this transaction."""
        self._policy_changes: dict[int, list[int]] = {}
        """For each policy: the changes of the number of live tasks, and of all tasks, that use
        it."""
        self._attempt_counts: dict[tuple[int, str], int] = {}
        """The number of logged attempts by tenant and outcome."""

    def lane(self, lane_id: int) -> LaneRow:
        """Return a lane. The caller may change it; `flush` writes the changes."""
        lane = self._lanes.get(lane_id)
        if lane is None:
            self.load_lanes([lane_id])
            lane = self._lanes[lane_id]
        return lane

    def load_lanes(self, lane_ids: Iterable[int]) -> None:
        """Read the lanes that are not cached yet, many of them with one statement."""
        missing = [lane_id for lane_id in lane_ids if lane_id not in self._lanes]
        for _, cursor in _READ_LANES.execute_chunks(self.execute, missing):
            for lane in _decode_lanes(cursor.fetchone()[0]):
                self._lanes[lane.id] = lane

    def count_transition(
        self,
        tenant: int,
        lane: LaneRow,
        policy: int,
        old_status: int | None,
        new_status: int | None,
        task_count: int = 1,
    ) -> None:
        """Count tasks that change their status; no old status: added, no new status: deleted."""
        counts, live_change, task_change = COUNTER_CHANGES[old_status, new_status]
        pending, in_flight, succeeded, exhausted, cancelled = counts
        counters = self._counter_changes.get(tenant)
        if counters is None:
            counters = self._counter_changes[tenant] = [0] * len(TENANT_COUNTERS)
        if old_status == PENDING:
            if lane.pending == task_count:  # there is no other
                lane.due_at = None
                lane.update_check_times()
        elif old_status == IN_FLIGHT:
            is_last = lane.in_flight == task_count
            if is_last:
                lane.lease_end_at = None
            # When a probe of a half-open lane ends, another may start.
            if is_last or lane.parked_until is not None:
                lane.update_check_times()
        # Each change is 0, 1 or -1.
        if pending:
            counters[PENDING] += pending * task_count
            lane.pending += pending * task_count
        if in_flight:
            counters[IN_FLIGHT] += in_flight * task_count
            lane.in_flight += in_flight * task_count
        if succeeded:
            counters[SUCCEEDED] += succeeded * task_count
        if exhausted:
            counters[EXHAUSTED] += exhausted * task_count
            lane.exhausted += exhausted * task_count
        if cancelled:
            counters[CANCELLED] += cancelled * task_count
        if live_change or task_change:
            lane.tasks += task_change * task_count
            policy_changes = self._policy_changes.setdefault(policy, [0, 0])
            policy_changes[0] += live_change * task_count
            policy_changes[1] += task_change * task_count

    def count_superseded(self, tenant: int) -> None:
        """Count a result that arrived after its lease was lost."""
        changes = self._counter_changes.setdefault(tenant, [0] * len(TENANT_COUNTERS))
        changes[_SUPERSEDED_INDEX] += 1

    def count_attempt(self, tenant: int, outcome: str) -> None:
        """Count an attempt for `attempts_per_minute`."""
        self._attempt_counts[tenant, outcome] = self._attempt_counts.get((tenant, outcome), 0) + 1

    def count_live_tasks(self, tenant: int) -> int:
        """Return how many live tasks a tenant has, including changes of this transaction."""
        if tenant not in self._stored_live_counts:
            row = self.execute("SELECT pending + in_flight FROM tenant WHERE id = ?", (tenant,))
            self._stored_live_counts[tenant] = row.fetchone()[0]
        changes = self._counter_changes.get(tenant, (0, 0))
        return self._stored_live_counts[tenant] + changes[PENDING] + changes[IN_FLIGHT]

    def count_lanes(self, tenant: int) -> int:
        """Return how many lanes a tenant has."""
        row = self.execute("SELECT lanes FROM tenant WHERE id = ?", (tenant,)).fetchone()
        return int(row[0])

    def flush(self) -> None:
        """Write the changed lanes and counters to the file, and empty the caches."""
        counts: list[Any] = []
        schedules: list[Any] = []
        due_checks: dict[int, int] = {}
        expiry_checks: dict[int, int] = {}
        for lane in self._lanes.values():
            counts += (lane.tasks, lane.pending, lane.in_flight, lane.exhausted)
            counts += (_number_param(lane.due_at), _number_param(lane.lease_end_at), lane.id)
            if lane.schedule_changed:
                schedules += (_number_param(lane.parked_until), lane.probes)
                schedules += (lane.consecutive_opens, lane.paused)
                schedules += (_number_param(lane.last_claim_at), lane.last_turn)
                due_check, expiry_check = lane.due_check_at, lane.expiry_check_at
                schedules += (_number_param(due_check), _number_param(expiry_check), lane.ready)
                schedules += (_number_param(lane.last_probe), lane.id)
                _keep_earliest(due_checks, lane.tenant, due_check)
                _keep_earliest(expiry_checks, lane.tenant, expiry_check)
        _WRITE_LANE_COUNTS.execute(self.execute, counts)
        _WRITE_LANE_SCHEDULES.execute(self.execute, schedules)
        tenant_counters = [(*changes, tenant) for tenant, changes in self._counter_changes.items()]
        policy_use = [(*changes, policy) for policy, changes in self._policy_changes.items()]
        for statement, rows in (
            (_MOVE_DUE_CHECK_EARLIER, [(at, tenant) for tenant, at in due_checks.items()]),
            (_MOVE_EXPIRY_CHECK_EARLIER, [(at, tenant) for tenant, at in expiry_checks.items()]),
            (_ADD_TO_TENANT_COUNTERS, tenant_counters),
            (_ADD_TO_POLICY_USE, policy_use),
        ):
            if rows:
                self.executemany(statement, rows)
        self._write_attempts_per_minute()
        self._lanes.clear()
        self._counter_changes.clear()
        self._stored_live_counts.clear()
        self._policy_changes.clear()
        self._attempt_counts.clear()

    def _write_attempts_per_minute(self) -> None:
        """Add the attempts to the current minute of their tenants and of tenant 0 (the totals)."""
        minute = self.now - self.now % MINUTE_MS
        totals: dict[str, int] = {}
        parameters: list[Any] = []
        for (tenant, outcome), count in self._attempt_counts.items():
            parameters += (tenant, minute, outcome, count)
            totals[outcome] = totals.get(outcome, 0) + count
        for outcome, count in totals.items():
            parameters += (0, minute, outcome, count)
        _ADD_TO_ATTEMPTS_PER_MINUTE.execute(self.execute, parameters)


def _number_param(number: int | None) -> int | str:
    return NULL_NUMBER_PARAM if number is None else number


def _keep_earliest(times: dict[int, int], tenant: int, at: int | None) -> None:
    if at is not None:
        times[tenant] = min(times.get(tenant, at), at)
