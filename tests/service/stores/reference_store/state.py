"""The state of the reference store, and the only code that changes a task in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from tarry.service.model import (
    LOST,
    AttemptRecord,
    LaneRecord,
    PolicyVersion,
    ReplayRecord,
    Status,
    Task,
)
from tarry.service.store import (
    POLICY_RETENTION_MS,
    ConfiguredLimits,
    LaneLimits,
    LeaseTerms,
    StoredRecord,
)

MINUTE_MS = 60_000
DAY_MS = 86_400_000
_FIELDS_OF_CALLER = (
    "id",
    "tenant",
    "lane",
    "key",
    "fingerprint",
    "packed_content",
    "owned_body_ref",
    "policy_id",
    "policy_version",
)
"""The fields of a new task that are stored as they are; the store sets all others."""
_MAX_STALE_ENTRIES = 64
"""A heap is rebuilt when its length exceeds twice its valid entries plus this number."""

WakeEntry = tuple[int, int, int]
"""Wake time of a task, its number, and the task version for which the entry is valid."""


def is_skipped(lane_name: str, lane_limits: Mapping[str, int]) -> bool:
    """Return whether a claim skips a lane: the lane or its tenant has a limit of 0."""
    return 0 in {lane_limits.get(lane_name), lane_limits.get(lane_name.partition("/")[0])}


class LaneWakeTimes:
    """A wake time for each lane. The heap also has entries that are no longer valid."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def set(self, name: str, time: int | None) -> None:
        """Set the wake time of a lane; None removes it."""
        if time == self._times.get(name):
            return
        if time is None:
            del self._times[name]
            return
        self._times[name] = time
        heappush(self._heap, (time, name))
        if len(self._heap) > 2 * len(self._times) + _MAX_STALE_ENTRIES:
            self._heap = [(time, name) for name, time in self._times.items()]
            heapify(self._heap)

    def pop_due(self, until: int) -> Iterator[str]:
        """Remove and yield the lanes whose time is not after `until`, earliest first."""
        while self._heap and self._heap[0][0] <= until:
            time, name = heappop(self._heap)
            if self._times.get(name) == time:
                del self._times[name]
                yield name

    def earliest(self, lane_limits: Mapping[str, int]) -> int | None:
        """Return the earliest time of a lane that is not skipped."""
        skipped: list[tuple[int, str]] = []
        while self._heap:
            time, name = self._heap[0]
            if self._times.get(name) != time:
                heappop(self._heap)
            elif is_skipped(name, lane_limits):
                skipped.append(heappop(self._heap))
            else:
                break
        earliest = self._heap[0][0] if self._heap else None
        for entry in skipped:
            heappush(self._heap, entry)
        return earliest


class Row:
    """A task, its number in the order of addition, and its encoded attempt log."""

    __slots__ = ("log", "number", "task")

    def __init__(self, number: int, task: Task) -> None:
        self.number: int = number
        self.task: Task = task
        self.log: list[bytes] = []

    @property
    def wake_entry(self) -> WakeEntry:
        """The entry for the current version of the task."""
        return self.task.wake_at, self.number, self.task.version


class WakeHeap:
    """Rows by wake time. An outdated entry stays in the heap until it is the first."""

    __slots__ = ("_heap", "_rows")

    def __init__(self, rows: Mapping[int, Row]) -> None:
        self._rows = rows
        self._heap: list[WakeEntry] = []

    def add(self, row: Row, max_valid: int) -> None:
        """Add a row; `max_valid` is an upper bound of the number of valid entries."""
        heappush(self._heap, row.wake_entry)
        if len(self._heap) > 2 * max_valid + _MAX_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapify(self._heap)

    def earliest(self) -> int | None:
        """Return the earliest wake time."""
        while self._heap and not self._is_valid(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, until: int) -> Row | None:
        """Remove and return the earliest row whose wake time is not after `until`."""
        earliest = self.earliest()
        if earliest is None or earliest > until:
            return None
        return self._rows[heappop(self._heap)[1]]

    def pop_many(self, until: int, limit: int) -> list[Row]:
        """Remove and return up to `limit` rows that wake up by `until`, earliest first."""
        rows: list[Row] = []
        while len(rows) < limit and (row := self.pop(until)) is not None:
            rows.append(row)
        return rows

    def _is_valid(self, entry: WakeEntry) -> bool:
        row = self._rows.get(entry[1])
        return row is not None and row.task.version == entry[2]


class Queue:
    """A lane and its unfinished tasks."""

    __slots__ = (
        "expired",
        "expired_leases",
        "first_attempts",
        "is_ready",
        "lane",
        "last_probe",
        "last_turn",
        "leases",
        "retries",
        "tasks",
    )

    def __init__(self, lane: LaneRecord, rows: Mapping[int, Row]) -> None:
        self.lane: LaneRecord = lane
        self.first_attempts: WakeHeap = WakeHeap(rows)
        """PENDING tasks without a failed attempt."""
        self.retries: WakeHeap = WakeHeap(rows)
        """PENDING tasks with a failed attempt."""
        self.expired_leases: WakeHeap = WakeHeap(rows)
        self.leases: WakeHeap = WakeHeap(rows)
        self.expired: set[int] = set()
        """Numbers of IN_FLIGHT tasks that are claimable because their lease has expired."""
        self.is_ready: bool = False
        """Whether the lane is in the rotation. Then it has no wake times."""
        self.last_turn: int = 0
        self.last_probe: int | None = None
        """Number of the task that was last leased as a probe."""
        self.tasks: int = 0
        """Number of tasks in any status."""

    def expire_leases(self, now: int) -> None:
        """Make the tasks of expired leases claimable."""
        while row := self.leases.pop(now):
            self.expired.add(row.number)
            self.expired_leases.add(row, self.lane.in_flight)

    def earliest_claimable(self) -> int | None:
        """Return the earliest wake time of tasks that are PENDING or have an expired lease."""
        heaps = (self.first_attempts, self.retries, self.expired_leases)
        times = [time for heap in heaps if (time := heap.earliest()) is not None]
        return min(times, default=None)

    def pop_claimable(self, limit: int, now: int, due_until: int) -> list[Row]:
        """Remove and return up to `limit` tasks that may be leased, in the order of a claim."""
        if limit <= 0:
            return []
        expired = self.expired_leases.pop_many(due_until, limit)
        first_attempts = self.first_attempts.pop_many(due_until, limit)
        retries = self.retries.pop_many(due_until, limit + 1)  # the last probe may be skipped
        if self.lane.parked_until is not None:
            first_count = (limit + now % 3) // 3
            last = [row for row in retries if row.number == self.last_probe]
            ready = [row for row in retries if row not in last and row.task.wake_at <= now]
            early = [row for row in retries if row not in last and row.task.wake_at > now]
            chosen = [*first_attempts[:first_count], *ready, *first_attempts[first_count:]]
            chosen = [*chosen, *expired, *early, *last][:limit]
            self.last_probe = chosen[-1].number if chosen else self.last_probe
        else:
            left = limit - len(expired[:limit])
            retry_count = min(len(retries), max((left + now % 3) // 3, left - len(first_attempts)))
            chosen = [*expired[:limit], *first_attempts[: left - retry_count]]
            chosen += retries[:retry_count]
        numbers = {row.number for row in chosen}
        for heap, rows in (
            (self.expired_leases, expired),
            (self.first_attempts, first_attempts),
            (self.retries, retries),
        ):
            for row in rows:
                if row.number not in numbers:
                    heap.add(row, len(self.expired) + self.lane.pending)
        return chosen

    def is_blocked(self, now: int) -> bool:
        """Return whether the lane is paused, or parked at this time."""
        until = self.lane.parked_until
        return self.lane.paused or (until is not None and until > now)

    def free_slots(self, limit: int) -> int:
        """Return how many tasks may be claimed; for a half-open lane, the number of free probes."""
        if self.lane.parked_until is None:
            return limit
        return min(limit, self.lane.probes - self.lane.in_flight + len(self.expired))


class Tenant:
    """The tasks, counters, policies and ready lanes of one tenant."""

    __slots__ = (
        "attempts_per_minute",
        "counts",
        "keys",
        "last_turn",
        "name",
        "numbers",
        "policies",
        "policy_use",
        "policy_versions",
        "ready_lanes",
        "replaced_at",
        "superseded",
    )

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.keys: dict[str, int] = {}
        """Numbers of its tasks by idempotency key."""
        self.numbers: list[int] = []
        """Numbers of its tasks in the order of addition, including some deleted tasks."""
        self.counts: Counter[Status] = Counter()
        self.superseded: int = 0
        self.attempts_per_minute: dict[int, Counter[str]] = defaultdict(Counter)
        self.policies: dict[str, list[PolicyVersion]] = {}
        self.policy_use: Counter[str] = Counter()
        """Number of unfinished tasks of each policy."""
        self.policy_versions: Counter[str] = Counter()
        """Last version of each policy, including deleted policies."""
        self.replaced_at: dict[tuple[str, int], int] = {}
        """When a version (id and number) was replaced by the next one."""
        self.ready_lanes: list[tuple[int, str]] = []
        """Its lanes in the rotation, least recently served first."""
        self.last_turn: int = 0


class ReferenceState:
    """The complete state of a `ReferenceStore`, which survives a simulated crash."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.ids: dict[str, int] = {}
        self.queues: dict[str, Queue] = {}
        self.lane_limits: dict[str, LaneLimits] = {}
        self.limits = ConfiguredLimits()
        self.budgets: dict[str, tuple[float, int]] = {}
        """The value of each lane's retry budget, and the time of its last change."""
        self.tenants: dict[str, Tenant] = {}
        self.due_wake_times: LaneWakeTimes = LaneWakeTimes()
        """Lanes by the due time of their earliest task. Claims add their horizon to the time."""
        self.expiry_wake_times: LaneWakeTimes = LaneWakeTimes()
        """Lanes by the end of their earliest lease, or of their parking."""
        self.ready_tenants: list[tuple[int, str]] = []
        """Tenants that have lanes in the rotation, least recently served first."""
        self.finished: dict[bool, list[WakeEntry]] = {True: [], False: []}
        """Finished tasks by `finished_at`. Dead letters are in `finished[True]`."""
        self.orphaned_bodies: dict[str, None] = {}
        self.replays: dict[str, ReplayRecord] = {}
        self.replayed_ids: dict[str, set[str]] = {}
        """For each replay: ids of replayed tasks that were not counted as finished yet."""
        self.records: dict[tuple[str, str, str], StoredRecord] = {}
        """By owner, kind and key."""
        self.listeners: dict[object, Callable[[], None]] = {}
        """Callbacks of `listen`, by store."""
        self.leader: object | None = None
        """The store that leads."""
        self._last_number = 0
        self._last_turn = 0

    # --- lookups ----------------------------------------------------------------------------------

    def tenant(self, name: str) -> Tenant:
        """Return a tenant; create it if it does not exist."""
        if name not in self.tenants:
            self.tenants[name] = Tenant(name)
        return self.tenants[name]

    def queue(self, lane: str) -> Queue:
        """Return the queue of a lane; create it if it does not exist."""
        if lane not in self.queues:
            tenant = lane.partition("/")[0]
            self.queues[lane] = Queue(LaneRecord(name=lane, tenant=tenant), self.rows)
        return self.queues[lane]

    def may_own_records(self, owner: str) -> bool:
        """Return whether an owner is not a lane that does not exist."""
        return "/" not in owner or owner in self.queues

    def remove_unused_lanes(self, now: int) -> None:
        """Remove lanes without tasks or limits that are neither paused nor parked."""
        for name, queue in list(self.queues.items()):
            if queue.tasks or queue.is_blocked(now) or name in self.limits.by_lane:
                continue
            self.due_wake_times.set(name, None)
            self.expiry_wake_times.set(name, None)
            tenant = self.tenant(queue.lane.tenant)
            if queue.is_ready:
                tenant.ready_lanes.remove((queue.last_turn, name))
                heapify(tenant.ready_lanes)
                if not tenant.ready_lanes:
                    self.ready_tenants.remove((tenant.last_turn, tenant.name))
                    heapify(self.ready_tenants)
            del self.queues[name]
            self.lane_limits.pop(name, None)
            self.budgets.pop(name, None)
            for address in [each for each in self.records if each[0] == name]:
                del self.records[address]

    def remove_unused_policies(self, now: int) -> None:
        """Remove replaced versions, and the last numbers of deleted policies, without tasks."""
        if not any(each.replaced_at or each.policy_versions for each in self.tenants.values()):
            return
        tasks = [row.task for row in self.rows.values()]
        used_versions = {(task.tenant, task.policy_id, task.policy_version) for task in tasks}
        used_policies = {(task.tenant, task.policy_id) for task in tasks}
        for tenant in self.tenants.values():
            for (policy_id, number), replaced_at in list(tenant.replaced_at.items()):
                is_used = (tenant.name, policy_id, number) in used_versions
                if not is_used and replaced_at <= now - POLICY_RETENTION_MS:
                    del tenant.replaced_at[policy_id, number]
                    tenant.policies[policy_id] = [
                        policy for policy in tenant.policies[policy_id] if policy.version != number
                    ]
            for policy_id in list(tenant.policy_versions):
                is_used = (tenant.name, policy_id) in used_policies
                if not is_used and policy_id not in tenant.policies:
                    del tenant.policy_versions[policy_id]

    def row(self, task_id: str, tenant: str) -> Row | None:
        """Return the row of a task of a tenant, or None."""
        number = self.ids.get(task_id)
        row = None if number is None else self.rows[number]
        return row if row is not None and row.task.tenant == tenant else None

    def leased_row(self, task: Task) -> Row | None:
        """Return the row of a task if it is leased with the version of `task`."""
        row = self.row(task.id, task.tenant)
        if row is None or row.task.status is not Status.IN_FLIGHT:
            return None
        return row if row.task.version == task.version else None

    # --- changes ----------------------------------------------------------------------------------

    def add(self, task: Task, now: int, terms: LeaseTerms | None) -> Row:
        """Add a task whose key is new; its state fields are reset."""
        queue = self.queue(task.lane)
        is_active = not queue.lane.paused and queue.lane.parked_until is None
        stored = Task(**{name: getattr(task, name) for name in _FIELDS_OF_CALLER})
        stored.set_added(now, task.next_attempt_at)
        if is_active and terms is not None and stored.next_attempt_at <= now + terms.horizon_ms:
            stored = msgspec.structs.replace(
                stored, **_lease_fields(terms, stored.next_attempt_at, now)
            )
        return self.insert(stored, now)

    def insert(self, task: Task, now: int) -> Row:
        """Add a task whose id and key are new, in any state."""
        self._last_number += 1
        tenant, queue = self.tenant(task.tenant), self.queue(task.lane)
        row = Row(self._last_number, task)
        self.rows[row.number] = row
        self.ids[task.id] = tenant.keys[task.key] = row.number
        tenant.numbers.append(row.number)
        queue.tasks += 1
        self._update_counters(row, 1)
        self._add_to_heap(row, now)
        return row

    def change(self, row: Row, now: int, **fields: Any) -> None:
        """Change a task, and update counters, heaps and wake times."""
        self._update_counters(row, -1)
        self.queues[row.task.lane].expired.discard(row.number)
        version = row.task.version + 1
        row.task = msgspec.structs.replace(row.task, version=version, **fields)
        self._update_counters(row, 1)
        self._add_to_heap(row, now)

    def lease(
        self, row: Row, terms: LeaseTerms, next_attempt_at: int, now: int, **fields: Any
    ) -> None:
        """Lease a task to a worker."""
        is_pending = row.task.status is Status.PENDING
        fields |= _lease_fields(terms, row.task.wake_at if is_pending else next_attempt_at, now)
        self.change(row, now, **fields | {"next_attempt_at": next_attempt_at})

    def renew_lease(self, row: Row, terms: LeaseTerms, now: int) -> None:
        """Renew an expired lease; the version of the task stays the same."""
        self.queues[row.task.lane].expired.discard(row.number)
        fields = _lease_fields(terms, row.task.next_attempt_at, now)
        row.task = msgspec.structs.replace(row.task, **fields)
        self._add_to_heap(row, now)

    def set_pending(self, row: Row, next_attempt_at: int, now: int, **fields: Any) -> None:
        """Make a task PENDING; it is due at `next_attempt_at`."""
        fields = {"wake_at": next_attempt_at, "next_attempt_at": next_attempt_at} | fields
        fields |= {"status": Status.PENDING, "worker": None}
        self.change(row, now, **fields)

    def finish(self, row: Row, status: Status, now: int, **fields: Any) -> None:
        """Change a task to a finished status."""
        self.change(row, now, **fields, status=status, worker=None, wake_at=0, finished_at=now)

    def replay_task(self, row: Row, now: int) -> None:
        """Make a dead letter or a cancelled task due now."""
        self.set_pending(
            row,
            now,
            now,
            first_due_at=now,
            reason=None,
            finished_at=None,
            attempts_before_replay=row.task.attempts,
            lost_attempts=0,
            previous_delay=None,
            backoff_offset=0,
            last_outcome_kind=None,
            replays=row.task.replays + 1,
            cancelling=False,
        )

    def delete(self, row: Row) -> None:
        """Delete a finished task, and list its body as orphaned."""
        task, tenant = row.task, self.tenants[row.task.tenant]
        self._update_counters(row, -1)
        self.queues[task.lane].tasks -= 1
        del self.rows[row.number], self.ids[task.id], tenant.keys[task.key]
        if task.owned_body_ref is not None:
            self.orphaned_bodies[task.owned_body_ref] = None
        if len(tenant.numbers) > 2 * len(tenant.keys):
            tenant.numbers = [number for number in tenant.numbers if number in self.rows]

    def log_attempt(self, row: Row, attempt: AttemptRecord, now: int) -> None:
        """Add an attempt to the attempt log and to the attempts per minute."""
        row.log.append(msgspec.msgpack.encode(attempt))
        counts = self.tenants[row.task.tenant].attempts_per_minute
        counts[now - now % MINUTE_MS][attempt.outcome] += 1
        for minute in list(counts):
            if minute >= now - DAY_MS:
                break
            del counts[minute]

    def log_lost_attempt(self, row: Row, now: int) -> None:
        """Log the attempt of an expired lease as lost."""
        task = row.task
        lost = AttemptRecord(
            attempt_number=task.attempts + 1,
            scheduled_at=task.next_attempt_at,
            started_at=task.next_attempt_at,
            outcome=LOST,
            worker=task.worker,
        )
        self.log_attempt(row, lost, now)

    # --- rotation of lanes ------------------------------------------------------------------------

    def schedule(self, queue: Queue, now: int) -> None:
        """Set the wake times of a lane that is not in the rotation."""
        if queue.is_ready:
            return
        lane, due, expiry = queue.lane, None, None
        if queue.is_blocked(now):
            has_tasks = lane.pending + lane.in_flight > 0
            expiry = lane.parked_until if has_tasks and not lane.paused else None
        else:
            due = queue.earliest_claimable() if queue.free_slots(1) > 0 else None
            expiry = queue.leases.earliest()
        self.due_wake_times.set(lane.name, due)
        self.expiry_wake_times.set(lane.name, expiry)

    def add_to_rotation(self, queue: Queue) -> None:
        """Add a lane to the rotation, ordered by the last turns of lane and tenant."""
        tenant = self.tenant(queue.lane.tenant)
        queue.is_ready = True
        self.due_wake_times.set(queue.lane.name, None)
        self.expiry_wake_times.set(queue.lane.name, None)
        if not tenant.ready_lanes:
            heappush(self.ready_tenants, (tenant.last_turn, tenant.name))
        heappush(tenant.ready_lanes, (queue.last_turn, queue.lane.name))

    def pop_lane(self) -> Queue | None:
        """Remove the next lane from the rotation, and its tenant until `return_tenant`."""
        if not self.ready_tenants:
            return None
        tenant = self.tenants[heappop(self.ready_tenants)[1]]
        return self.queues[heappop(tenant.ready_lanes)[1]]

    def return_tenant(self, queue: Queue) -> None:
        """Return the tenant of a removed lane to the rotation, if it has other ready lanes."""
        tenant = self.tenants[queue.lane.tenant]
        if tenant.ready_lanes:
            heappush(self.ready_tenants, (tenant.last_turn, tenant.name))

    def record_served(self, queue: Queue, now: int) -> None:
        """Make a lane and its tenant the last in the rotation."""
        self._last_turn += 1
        queue.last_turn = self.tenants[queue.lane.tenant].last_turn = self._last_turn
        queue.lane.last_claim_at = now

    def _update_counters(self, row: Row, by: int) -> None:
        task, tenant = row.task, self.tenants[row.task.tenant]
        lane = self.queues[task.lane].lane
        tenant.counts[task.status] += by
        if not task.status.is_finished:
            tenant.policy_use[task.policy_id] += by
        if task.status is Status.PENDING:
            lane.pending += by
        elif task.status is Status.IN_FLIGHT:
            lane.in_flight += by
        elif task.status is Status.EXHAUSTED:
            lane.exhausted += by

    def _add_to_heap(self, row: Row, now: int) -> None:
        task, queue = row.task, self.queues[row.task.lane]
        if task.status is Status.PENDING:
            heap = queue.first_attempts if task.last_outcome_kind is None else queue.retries
            heap.add(row, queue.lane.pending)
        elif task.status is Status.IN_FLIGHT:
            queue.leases.add(row, queue.lane.in_flight)
        else:
            entry = (task.finished_at or now, row.number, task.version)
            heappush(self.finished[task.status is Status.EXHAUSTED], entry)
        self.schedule(queue, now)


def _lease_fields(terms: LeaseTerms, next_attempt_at: int, now: int) -> dict[str, Any]:
    """Return the fields of a leased task."""
    return {
        "status": Status.IN_FLIGHT,
        "worker": terms.worker,
        "next_attempt_at": next_attempt_at,
        "wake_at": max(now, next_attempt_at) + terms.length_ms,
    }
