"""`ReferenceStore`: an implementation of the store port with dicts and heaps."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

import msgspec

from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects
from tarry.service.model import (
    AttemptRecord,
    LaneRecord,
    PolicyVersion,
    ReplayRecord,
    Status,
    Task,
)
from tarry.service.rules.replays import (
    REPLAY_QUOTA_PAUSE_MS,
    next_replay_count_at,
    next_replay_step_at,
)
from tarry.service.store import (
    MAX_BUSIEST_LANES,
    MAX_LISTED_RECORDS,
    MAX_PAGE_BYTES,
    PROCESS_KIND,
    AddResult,
    AddStatus,
    AttemptsOfMinute,
    CancelStatus,
    ClaimResult,
    ConfiguredLimits,
    Counters,
    DueLane,
    FinishStatus,
    LaneLimits,
    LaneWriteStatus,
    LeaseTerms,
    NewTask,
    PolicyWriteStatus,
    RecordAddress,
    RecordChange,
    RecordKind,
    RecordPage,
    Release,
    Retention,
    RetryNowStatus,
    StoredRecord,
    StoredTaskFilter,
    SweepResult,
    TaskResult,
    decay_budget,
    select_due_lanes,
)
from tarry.wire.tasks import DownstreamLimits
from tests.service.stores.reference_store import transfer
from tests.service.stores.reference_store.state import (
    DAY_MS,
    MINUTE_MS,
    Queue,
    ReferenceState,
    Row,
    Tenant,
    is_skipped,
)

S = TypeVar("S", bound=msgspec.Struct)

MAX_CURSOR_DIGITS = 20
MAX_LISTED_REPLAYS = 100
MAX_LISTED_KEYS = 1000


class ReferenceStore:
    """A `Store` in the memory of the process.

    `clock` returns epoch milliseconds; the default is the system clock. A store that is created
    with the `state` of another store continues with its tasks, as after a crash.
    """

    def __init__(
        self, clock: Callable[[], int] | None = None, state: ReferenceState | None = None
    ) -> None:
        self._clock = clock or _system_clock
        self.state: ReferenceState = state or ReferenceState()

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def close(self) -> None:
        """Stop leading and listening; the state stays available to a new store."""
        self.state.listeners.pop(self, None)
        if self.state.leader is self:
            self.state.leader = None

    @property
    def partition_count(self) -> int:
        """There is one partition."""
        return 1

    def partition_of(self, tenant: str) -> int:
        """All tenants are in partition 0."""
        return 0

    async def ping(self, partition: int | None = None) -> int:
        """Return the store's time."""
        return self._clock()

    # --- add --------------------------------------------------------------------------------------

    async def add(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> list[AddResult]:
        """Add tasks one by one."""
        now = self._clock()
        self._notify()
        return [self._add(new, terms, now, quota, lane_quota) for new in tasks]

    def _add(
        self,
        new: NewTask,
        terms: LeaseTerms | None,
        now: int,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> AddResult:
        task, tenant = new.task, self.state.tenant(new.task.tenant)
        existing = self.state.rows.get(tenant.keys.get(task.key, 0))
        is_replaced = existing is not None and (
            existing.task.status is Status.CANCELLED and existing.task.id != task.id
        )
        if existing is not None and not is_replaced:
            found = existing.task
            is_same = found.fingerprint == task.fingerprint
            return AddResult(AddStatus.EXISTING if is_same else AddStatus.CONFLICT, copy(found))
        if self._free_quota(task.tenant, quota) <= 0:
            return AddResult(AddStatus.OVER_QUOTA, copy(task))
        if self._exceeds_quota(task.lane, lane_quota):
            return AddResult(AddStatus.TOO_MANY_LANES, copy(task))
        if existing is not None:
            self.state.delete(existing)
        due = task.next_attempt_at if new.delay_ms is None else now + new.delay_ms
        due_task = msgspec.structs.replace(task, next_attempt_at=max(now, due))
        row = self.state.add(due_task, now, terms if new.lease_on_add else None)
        stored = row.task
        task.set_added(
            stored.created_at,
            stored.next_attempt_at,
            wake_at=stored.wake_at,
            worker=stored.worker,
        )
        return AddResult(AddStatus.ADDED, task, stored.status is Status.IN_FLIGHT)

    def _free_quota(self, tenant: str, quota: int | None) -> int:
        """Return how many more live tasks a tenant may have; a large number without a quota."""
        counts = self.state.tenant(tenant).counts
        live_count = counts[Status.PENDING] + counts[Status.IN_FLIGHT]
        return 2**62 if quota is None else quota - live_count

    # --- claim ------------------------------------------------------------------------------------

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Lease tasks that are due within the horizon or have an expired lease, in fair order."""
        state, now = self.state, self._clock()
        for wake_times, until in (
            (state.due_wake_times, now + terms.horizon_ms),
            (state.expiry_wake_times, now),
        ):
            for name in wake_times.pop_due(until):
                state.add_to_rotation(state.queues[name])
        claimed = ClaimResult(now, [], {}, None)
        visited: list[Queue] = []
        while limit > 0 and (queue := state.pop_lane()):
            visited.append(queue)
            name = queue.lane.name
            if not is_skipped(name, lane_limits):
                lane_limit = min(limit, per_lane, lane_limits.get(name, per_lane))
                limit -= self._claim_from_lane(queue, terms, lane_limit, claimed)
            state.return_tenant(queue)
        for queue in visited:
            self._update_rotation(queue, terms, now)
        claimed.tasks.sort(key=lambda task: (task.next_attempt_at, state.ids[task.id]))
        claimed.next_at = self._next_at(terms, now, lane_limits)
        return claimed

    def _claim_from_lane(
        self, queue: Queue, terms: LeaseTerms, limit: int, claimed: ClaimResult
    ) -> int:
        """Lease tasks of one lane; return how many, including tasks that were cancelled instead."""
        state, now = self.state, claimed.now
        queue.expire_leases(now)
        free_slots = 0 if queue.is_blocked(now) else queue.free_slots(limit)
        claimed_count, tasks_before = 0, len(claimed.tasks)
        for row in queue.pop_claimable(free_slots, now, now + terms.horizon_ms):
            claimed_count += 1
            if row.task.worker == terms.worker:
                state.renew_lease(row, terms, now)
                claimed.renewed_tasks.append(copy(row.task))
                continue
            claimed.lost_attempts += row.task.status is Status.IN_FLIGHT
            if self._lease(row, terms, now):
                claimed.tasks.append(copy(row.task))
        if claimed_count:
            state.record_served(queue, now)
        if len(claimed.tasks) > tasks_before and queue.lane.parked_until is not None:
            claimed.consecutive_opens_by_lane[queue.lane.name] = queue.lane.consecutive_opens
        return claimed_count

    def _lease(self, row: Row, terms: LeaseTerms, now: int) -> bool:
        """Lease a task; return False if it was being cancelled, and is CANCELLED instead."""
        state, task = self.state, row.task
        if task.status is Status.PENDING:
            state.lease(row, terms, task.next_attempt_at, now)
            return True
        state.log_lost_attempt(row, now)
        if task.cancelling:
            state.finish(row, Status.CANCELLED, now, attempts=task.attempts + 1)
            return False
        counts = {"attempts": task.attempts + 1, "lost_attempts": task.lost_attempts + 1}
        state.lease(row, terms, task.wake_at, now, **counts)
        return True

    def _update_rotation(self, queue: Queue, terms: LeaseTerms, now: int) -> None:
        """Return a lane to the rotation if it has more claimable tasks, else set its wake times."""
        earliest = queue.earliest_claimable()
        has_more = earliest is not None and earliest <= now + terms.horizon_ms
        queue.is_ready = False
        if has_more and not queue.is_blocked(now) and queue.free_slots(1) > 0:
            self.state.add_to_rotation(queue)
        else:
            self.state.schedule(queue, now)

    def _next_at(self, terms: LeaseTerms, now: int, lane_limits: Mapping[str, int]) -> int | None:
        ready_lanes = (
            self.state.tenants[tenant].ready_lanes for _, tenant in self.state.ready_tenants
        )
        if any(not is_skipped(name, lane_limits) for lanes in ready_lanes for _, name in lanes):
            return now
        due, expiry = (
            self.state.due_wake_times.earliest(lane_limits),
            self.state.expiry_wake_times.earliest(lane_limits),
        )
        times = (None if due is None else due - terms.horizon_ms, expiry)
        return min((at for at in times if at is not None), default=None)

    # --- finish and release -----------------------------------------------------------------------

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write the results of tasks whose version has not changed since they were leased."""
        now = self._clock()
        return [self._finish(result, now) for result in results]

    def _finish(self, result: TaskResult, now: int) -> FinishStatus:
        state, row = self.state, self.state.leased_row(result.task)
        if row is None:
            state.tenant(result.task.tenant).superseded += 1
            return FinishStatus.SUPERSEDED
        attempts = row.task.attempts
        if result.attempt is not None:
            state.log_attempt(row, result.attempt, now)
            attempts += 1
        fields = {
            "attempts": attempts,
            "previous_delay": result.previous_delay,
            "backoff_offset": result.backoff_offset,
            "last_outcome_kind": result.last_outcome_kind,
        }
        if row.task.cancelling and result.status is not Status.SUCCEEDED:
            state.finish(row, Status.CANCELLED, now, **fields)
            return FinishStatus.CANCELLED
        if result.status is not Status.PENDING:
            state.finish(row, result.status, now, **fields, reason=result.reason)
        elif result.renewed_lease is not None:
            state.lease(row, result.renewed_lease, result.next_attempt_at, now, **fields)
        else:
            state.set_pending(row, result.next_attempt_at, now, **fields)
        if result.callback_task is not None:
            self._add(NewTask(result.callback_task), None, now)
        return FinishStatus.APPLIED

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release the leases of tasks whose attempt has not started."""
        now = self._clock()
        self._notify()
        return [self._release(release, now) for release in releases]

    def _release(self, release: Release, now: int) -> FinishStatus:
        row = self.state.leased_row(release.task)
        if row is None:
            return FinishStatus.SUPERSEDED
        if row.task.cancelling:
            self.state.finish(row, Status.CANCELLED, now)
            return FinishStatus.CANCELLED
        due = row.task.next_attempt_at
        self.state.set_pending(row, due, now, wake_at=max(due, release.deferred_until or 0))
        return FinishStatus.APPLIED

    def record_start(self, slot: int, task: Task) -> None:
        """Do nothing: this store does not survive a crash of the process."""

    async def release_unknown_leases(
        self, terms: LeaseTerms, known_ids: Collection[str], partition: int | None = None
    ) -> int:
        """Release the leases of a worker, except those of known tasks."""
        known_ids = set(known_ids)
        unknown = [
            row.task
            for row in self.state.rows.values()
            if row.task.status is Status.IN_FLIGHT
            and row.task.worker == terms.worker
            and row.task.id not in known_ids
        ]
        for task in unknown:
            startable_at = task.wake_at - terms.length_ms
            is_deferred = startable_at > self._clock()
            await self.release([Release(task, startable_at if is_deferred else None)])
        return len(unknown)

    # --- lanes ------------------------------------------------------------------------------------

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        """Stop claims from a lane until a time; afterwards, allow `probes` leases at a time."""
        record = self.state.queue(lane).lane
        record.parked_until, record.probes, record.consecutive_opens = (
            until,
            probes,
            consecutive_opens,
        )
        self._reschedule(lane)

    async def unpark(self, lane: str) -> None:
        """End the parking of a lane."""
        self._unpark(lane, resume=False)

    async def resume(self, lane: str) -> None:
        """End the parking and the pause of a lane."""
        self._unpark(lane, resume=True)

    def _unpark(self, lane: str, *, resume: bool) -> None:
        if lane in self.state.queues:
            found = self.state.queues[lane].lane
            found.parked_until, found.probes, found.consecutive_opens = None, 0, 0
            if resume and found.paused:
                found.paused = False
                self._increment_limits_version()
            self._reschedule(lane)
            self._notify()

    async def pause(self, lane: str, *, lane_quota: int | None = None) -> LaneWriteStatus:
        """Stop claims from a lane until it is resumed."""
        if self._exceeds_quota(lane, lane_quota):
            return LaneWriteStatus.TOO_MANY_LANES
        self.state.queue(lane).lane.paused = True
        self._increment_limits_version()
        self._reschedule(lane)
        return LaneWriteStatus.CHANGED

    def _exceeds_quota(self, lane: str, lane_quota: int | None) -> bool:
        """Return whether the lane does not exist, and its tenant has `lane_quota` lanes."""
        if lane_quota is None or lane in self.state.queues:
            return False
        prefix = lane.partition("/")[0] + "/"
        return sum(name.startswith(prefix) for name in self.state.queues) >= lane_quota

    async def record_lane_limits(self, limits: Sequence[LaneLimits]) -> None:
        """Store the limits of lanes that exist."""
        for each in limits:
            if each.lane in self.state.queues:
                self.state.lane_limits[each.lane] = each

    async def list_lane_limits(self, limit: int, partition: int | None = None) -> list[LaneLimits]:
        """Return the limits of lanes whose rate is limited, last used lanes first."""
        limited = [each for each in self.state.lane_limits.values() if each.rate is not None]

        def sort_key(each: LaneLimits) -> tuple[int, str]:
            _, changed_at = self.state.budgets.get(each.lane, (0.0, 0))
            claimed_at = self.state.queues[each.lane].lane.last_claim_at or 0
            return -max(claimed_at, changed_at), each.lane

        return sorted(limited, key=sort_key)[:limit]

    async def set_limits(
        self,
        lane: str,
        limits: DownstreamLimits | None,
        *,
        max_limited: int,
        lane_quota: int | None = None,
    ) -> LaneWriteStatus:
        """Set the limits of a lane."""
        by_lane, tenant = dict(self.state.limits.by_lane), lane.partition("/")[0]
        by_lane.pop(lane, None)
        if limits is not None:
            if max_limited <= sum(name.partition("/")[0] == tenant for name in by_lane):
                return LaneWriteStatus.TOO_MANY_LIMITED
            if self._exceeds_quota(lane, lane_quota):
                return LaneWriteStatus.TOO_MANY_LANES
            by_lane[lane] = limits
            self.state.queue(lane)
        self.state.limits = msgspec.structs.replace(self.state.limits, by_lane=by_lane)
        self._increment_limits_version()
        return LaneWriteStatus.CHANGED

    def _increment_limits_version(self) -> None:
        limits = self.state.limits
        self.state.limits = msgspec.structs.replace(limits, version=limits.version + 1)

    async def load_limits(self, known: ConfiguredLimits) -> ConfiguredLimits | None:
        """Return the limits and pauses, unless they are known."""
        _, working = await self.list_records("", PROCESS_KIND)
        limits = msgspec.structs.replace(
            self.state.limits,
            process_count=max(1, len(working)),
            paused_lanes=frozenset(
                name for name, queue in self.state.queues.items() if queue.lane.paused
            ),
        )
        versions = (limits.version, limits.process_count), (known.version, known.process_count)
        return None if versions[0] == versions[1] else limits

    async def add_to_budgets(self, changes: dict[str, float]) -> dict[str, float]:
        """Add to the values of the budgets of lanes that exist."""
        now, budgets, values = self._clock(), self.state.budgets, dict[str, float]()
        for lane, change in changes.items():
            if lane in self.state.queues:
                value, changed_at = budgets.get(lane, (0.0, 0))
                values[lane] = decay_budget(value, now - changed_at) + change
                budgets[lane] = (values[lane], now)
        return values

    def _reschedule(self, lane: str) -> None:
        self.state.schedule(self.state.queues[lane], self._clock())

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[LaneRecord]:
        """List lanes by name."""
        names = sorted(
            name
            for name, queue in self.state.queues.items()
            if tenant in {None, queue.lane.tenant} and (cursor is None or name > cursor)
        )
        items = [copy(self.state.queues[name].lane) for name in names[:limit]]
        return RecordPage(items, names[limit - 1] if len(names) > limit else None)

    async def get_lane(self, name: str) -> LaneRecord | None:
        """Return a lane, or None."""
        queue = self.state.queues.get(name)
        return None if queue is None else copy(queue.lane)

    # --- tasks ------------------------------------------------------------------------------------

    async def get_task(self, tenant: str, task_id: str) -> Task | None:
        """Return a task, or None."""
        row = self.state.row(task_id, tenant)
        return None if row is None else copy(row.task)

    async def list_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> RecordPage[Task]:
        """List tasks, newest first by default."""
        numbers = self.state.tenant(tenant).numbers
        if oldest_first:
            begin = 0 if cursor is None else bisect_right(numbers, _parse_cursor(cursor))
            numbers = numbers[begin:]
        else:
            end = len(numbers) if cursor is None else bisect_left(numbers, _parse_cursor(cursor))
            numbers = numbers[:end][::-1]
        items: list[Task] = []
        page_bytes = 0
        for number in numbers:
            row = self.state.rows.get(number)
            if row is None or not _matches(row, task_filter):
                continue
            if len(items) == limit or page_bytes >= MAX_PAGE_BYTES:
                return RecordPage(items, str(self.state.ids[items[-1].id]))
            items.append(copy(row.task))
            page_bytes += len(row.task.packed_content)
        return RecordPage(items, None)

    async def count_tasks(self, tenant: str, task_filter: StoredTaskFilter) -> int:
        """Count tasks."""
        rows = [self.state.rows.get(number) for number in self.state.tenant(tenant).numbers]
        return sum(row is not None and _matches(row, task_filter) for row in rows)

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        """Return a page of a task's attempt log, starting after attempt number `after`."""
        row = self.state.row(task_id, tenant)
        attempts: list[AttemptRecord] = []
        page_bytes = 0
        for entry in [] if row is None else row.log:
            attempt = msgspec.msgpack.decode(entry, type=AttemptRecord)
            if attempt.attempt_number <= after:
                continue
            if len(attempts) == limit or page_bytes >= MAX_PAGE_BYTES:
                break
            attempts.append(attempt)
            page_bytes += len(entry)
        return attempts

    async def list_attempts_of_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
    ) -> RecordPage[tuple[str, AttemptRecord]]:
        """List attempts, newest task first; the cursor is the number of attempts read so far."""
        begin = 0 if cursor is None else _parse_cursor(cursor)
        tasks = (await self.list_tasks(tenant, task_filter, limit=1_000_000)).items
        attempts = [
            (task.id, attempt)
            for task in tasks
            for attempt in await self.list_attempts(tenant, task.id, limit=1_000_000)
        ]
        end = begin + limit
        return RecordPage(attempts[begin:end], str(end) if end < len(attempts) else None)

    async def last_attempts(self, tenant: str, task_ids: Sequence[str]) -> dict[str, AttemptRecord]:
        """Return the latest attempt of each task."""
        rows = [(task_id, self.state.row(task_id, tenant)) for task_id in task_ids]
        return {
            task_id: msgspec.msgpack.decode(row.log[-1], type=AttemptRecord)
            for task_id, row in rows
            if row is not None and row.log
        }

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task."""
        row = self.state.row(task_id, tenant)
        if row is None:
            return None
        if row.task.status.is_finished:
            return CancelStatus.FINISHED
        if row.task.status is Status.PENDING:
            self.state.finish(row, Status.CANCELLED, self._clock())
            return CancelStatus.CANCELLED
        row.task.cancelling = True
        return CancelStatus.REQUESTED

    async def retry_now(
        self, tenant: str, task_id: str, *, quota: int | None = None
    ) -> RetryNowStatus | None:
        """Make a task due now, unless it is leased or succeeded."""
        row, now = self.state.row(task_id, tenant), self._clock()
        if row is None:
            return None
        match row.task.status:
            case Status.PENDING:
                self.state.set_pending(row, min(row.task.next_attempt_at, now), now)
            case Status.EXHAUSTED | Status.CANCELLED:
                if self._free_quota(tenant, quota) <= 0:
                    return RetryNowStatus.OVER_QUOTA
                self.state.replay_task(row, now)
            case Status.IN_FLIGHT:
                return RetryNowStatus.IN_FLIGHT
            case Status.SUCCEEDED:
                return RetryNowStatus.SUCCEEDED
        self._notify()
        return RetryNowStatus.DUE

    # --- dead letters -----------------------------------------------------------------------------

    def _find_dead_letters(self, tenant: str, task_ids: Sequence[str]) -> list[Row]:
        rows = [self.state.row(task_id, tenant) for task_id in task_ids]
        return [row for row in rows if row is not None and row.task.status is Status.EXHAUSTED]

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        """Store a replay; if its id exists, return the stored replay."""
        now = self._clock()
        if replay.id not in self.state.replays:
            new = msgspec.structs.replace(
                replay,
                before=min(replay.before or now, now),
                replayed=0,
                unfinished=0,
                finished={},
                count_cursor=None,
                cursor=None,
                status="running",
                created_at=now,
                next_at=now,
                finished_at=None,
            )
            self.state.replays[new.id] = new
        return copy_replay(self.state.replays[replay.id])

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """Return a replay of a tenant."""
        replay = self.state.replays.get(replay_id)
        return None if replay is None or replay.tenant != tenant else copy_replay(replay)

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        """List all replays, newest first, or replays that need further steps by due time."""
        replays = [
            copy_replay(replay)
            for replay in self.state.replays.values()
            if tenant in {None, replay.tenant} and (not running or replay.needs_steps)
        ]
        if running:
            replays.sort(key=lambda replay: (replay.next_at, replay.id))
        else:
            replays.sort(key=lambda replay: (replay.created_at, replay.id), reverse=True)
        return replays[:MAX_LISTED_REPLAYS]

    async def replay_step(
        self,
        replay_id: str,
        cursor: str | None,
        task_ids: Sequence[str],
        next_cursor: str | None,
        *,
        quota: int | None = None,
    ) -> ReplayRecord | None:
        """If the replay is due, replay dead letters, and set the next due time."""
        replay, now = self.state.replays.get(replay_id), self._clock()
        if replay is None:
            return None
        if not replay.needs_steps or replay.next_at > now:
            return copy_replay(replay)
        replayed_ids = self.state.replayed_ids.setdefault(replay.id, set())
        if replay.status == "running":
            if replay.cursor != cursor:
                return copy_replay(replay)
            dead_letters = self._find_dead_letters(replay.tenant, task_ids)
            rows = dead_letters[: max(0, self._free_quota(replay.tenant, quota))]
            for row in rows:
                self.state.replay_task(row, now)
                replayed_ids.add(row.task.id)
            self._notify()
            replay.replayed += len(rows)
            replay.next_at = next_replay_step_at(replay, len(rows), now)
            if len(rows) < len(dead_letters):
                replay.next_at = max(replay.next_at, now + REPLAY_QUOTA_PAUSE_MS)
                replay.cursor = str(rows[-1].number) if rows else cursor
            elif next_cursor is None:
                replay.status = "waiting"
            else:
                replay.cursor = next_cursor
        for replayed_id in list(replayed_ids):
            task = await self.get_task(replay.tenant, replayed_id)
            if task is None or task.status.is_finished:
                name = "DELETED" if task is None else task.status.name
                replay.finished[name] = replay.finished.get(name, 0) + 1
                replayed_ids.remove(replayed_id)
        replay.unfinished = len(replayed_ids)
        if replay.status != "running":
            replay.next_at = next_replay_count_at(replay, now)
        if replay.status == "waiting" and not replay.unfinished:
            replay.status, replay.finished_at = "done", now
        return copy_replay(replay)

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """Stop a replay."""
        replay = self.state.replays.get(replay_id)
        if replay is None or replay.tenant != tenant:
            return None
        if replay.status in {"running", "waiting"}:
            replay.status, replay.finished_at = "cancelled", self._clock()
            replay.next_at = replay.finished_at
        return copy_replay(replay)

    async def delete_dead_letters(self, tenant: str, task_ids: Sequence[str]) -> int:
        """Delete dead letters."""
        rows = self._find_dead_letters(tenant, task_ids)
        for row in rows:
            self.state.delete(row)
        return len(rows)

    # --- policies ---------------------------------------------------------------------------------

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool, quota: int | None = None
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        """Write a policy, or a new version of it if `replace` is set."""
        owner, now = self.state.tenant(policy.tenant), self._clock()
        versions = owner.policies.get(policy.id, [])
        if versions and versions[-1].document == policy.document:
            return PolicyWriteStatus.UNCHANGED, copy(versions[-1])
        if versions and not replace:
            return PolicyWriteStatus.CONFLICT, copy(versions[-1])
        if quota is not None and sum(map(len, owner.policies.values())) >= quota:
            return PolicyWriteStatus.OVER_QUOTA, copy(versions[-1] if versions else policy)
        status = PolicyWriteStatus.CREATED
        if versions:
            status = PolicyWriteStatus.REPLACED
            owner.replaced_at[policy.id, versions[-1].version] = now
        version = owner.policy_versions[policy.id] + 1
        new = msgspec.structs.replace(policy, version=version, created_at=now)
        owner.policy_versions[policy.id] = version
        owner.policies[policy.id] = [*versions, new]
        return status, copy(new)

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        """Return a version of a policy, by default the newest."""
        versions = self.state.tenant(tenant).policies.get(policy_id, [])
        if version is not None:
            versions = [found for found in versions if found.version == version]
        return copy(versions[-1]) if versions else None

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[PolicyVersion]:
        """List the newest version of each policy, by id."""
        found = self.state.tenant(tenant).policies
        ids = sorted(policy_id for policy_id in found if cursor is None or policy_id > cursor)
        items: list[PolicyVersion] = []
        page_bytes = 0
        for policy_id in ids:
            if len(items) == limit or page_bytes >= MAX_PAGE_BYTES:
                return RecordPage(items, items[-1].id)
            items.append(copy(found[policy_id][-1]))
            page_bytes += len(items[-1].document)
        return RecordPage(items, None)

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        """Delete all versions of a policy, unless unfinished tasks use it."""
        owner = self.state.tenant(tenant)
        if policy_id not in owner.policies:
            return PolicyWriteStatus.MISSING
        if owner.policy_use[policy_id]:
            return PolicyWriteStatus.CONFLICT
        for policy in owner.policies.pop(policy_id):
            owner.replaced_at.pop((policy_id, policy.version), None)
        return PolicyWriteStatus.DELETED

    # --- API keys ---------------------------------------------------------------------------------

    # --- signing secrets --------------------------------------------------------------------------

    # --- counters ---------------------------------------------------------------------------------

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` when another store over the same state has made tasks claimable."""
        self.state.listeners[self] = callback

    def _notify(self) -> None:
        """Call the callbacks of other stores when the current call has ended."""
        for store, callback in self.state.listeners.items():
            if store is not self:
                asyncio.get_running_loop().call_soon(callback)

    async def try_lead(self) -> bool:
        """Return whether this store leads the stores with the same state."""
        if self.state.leader is None:
            self.state.leader = self
        return self.state.leader is self

    async def counters(self, tenant: str | None = None) -> Counters:
        """Return the counters of one tenant or of all, computed from all tasks and lanes."""
        tenants, now = self._select_tenants(tenant), self._clock()
        lanes = [
            queue.lane
            for queue in self.state.queues.values()
            if tenant in {None, queue.lane.tenant}
        ]
        names = {lane.name for lane in lanes}
        due_times_by_lane: dict[str, list[int]] = {}
        for row in self.state.rows.values():
            is_due = row.task.status is Status.PENDING and row.task.wake_at <= now
            if is_due and row.task.lane in names:
                due_times_by_lane.setdefault(row.task.lane, []).append(row.task.wake_at)
        used = [lane for lane in lanes if lane.pending or lane.in_flight or lane.exhausted]
        busiest = sorted(used, key=lambda lane: (-lane.pending, lane.name))[:MAX_BUSIEST_LANES]
        return Counters(
            task_counts={
                status: sum(owner.counts[status] for owner in tenants) for status in Status
            },
            superseded_count=sum(owner.superseded for owner in tenants),
            due_lanes=select_due_lanes(
                DueLane(name, min(due_times), self.state.queues[name].lane.waiting_for)
                for name, due_times in due_times_by_lane.items()
            ),
            busiest_lanes=[copy(lane) for lane in busiest],
        )

    async def attempts_per_minute(
        self, tenant: str | None, *, since: int
    ) -> list[AttemptsOfMinute]:
        """Return the number of attempts by minute and outcome, from the minute of `since` on."""
        first = max(since, self._clock() - DAY_MS)
        total: dict[int, Counter[str]] = {}
        for owner in self._select_tenants(tenant):
            for minute, outcomes in owner.attempts_per_minute.items():
                if minute > first - MINUTE_MS:
                    total.setdefault(minute, Counter()).update(outcomes)
        return [AttemptsOfMinute(minute, dict(total[minute])) for minute in sorted(total)]

    def _select_tenants(self, tenant: str | None) -> list[Tenant]:
        return [owner for owner in self.state.tenants.values() if tenant in {None, owner.name}]

    # --- retention --------------------------------------------------------------------------------

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Delete up to `limit` expired tasks, expired replays, unused lanes and policies."""
        now, deleted = self._clock(), 0
        expiry_times = ((False, now - retention.succeeded_ms), (True, now - retention.exhausted_ms))
        replays = self.state.replays.values()
        replaying_tenants = {replay.tenant for replay in replays if replay.status == "running"}
        skipped_entries: list[tuple[int, int, int]] = []
        for is_exhausted, until in expiry_times:
            while deleted < limit and (
                row := self._first_finished(until, is_exhausted=is_exhausted)
            ):
                entry = heappop(self.state.finished[is_exhausted])
                if is_exhausted and row.task.tenant in replaying_tenants:
                    skipped_entries.append(entry)
                else:
                    self.state.delete(row)
                    deleted += 1
        has_more = any(
            self._first_finished(until, is_exhausted=is_exhausted)
            for is_exhausted, until in expiry_times
        )
        for entry in skipped_entries:
            heappush(self.state.finished[True], entry)
        self._delete_replays(now - retention.exhausted_ms)
        for address, record in tuple(self.state.records.items()):
            if self._is_expired(record):
                del self.state.records[address]
        self.state.remove_unused_lanes(now)
        self.state.remove_unused_policies(now)
        return SweepResult(deleted, has_more)

    def _delete_replays(self, until: int) -> None:
        for replay in list(self.state.replays.values()):
            is_finished = replay.finished_at is not None and not replay.needs_steps
            if is_finished and (replay.finished_at or 0) <= until:
                del self.state.replays[replay.id]

    def _first_finished(self, until: int, *, is_exhausted: bool) -> Row | None:
        """Return the task that finished first, or None if it finished after `until`."""
        entries = self.state.finished[is_exhausted]
        while entries:
            finished_at, number, version = entries[0]
            row = self.state.rows.get(number)
            if row is not None and row.task.version == version:
                return row if finished_at <= until else None
            heappop(entries)
        return None

    async def list_orphaned_bodies(self, limit: int) -> list[str]:
        """Return references to bodies whose task was deleted."""
        return list(self.state.orphaned_bodies)[:limit]

    # --- transfer ---------------------------------------------------------------------------------

    async def export_records(
        self, kind: RecordKind, *, cursor: str | None = None, limit: int = 1000
    ) -> RecordPage[Any]:
        """Return a page of records; the cursor is the number of records read so far."""
        begin = 0 if cursor is None else int(cursor)
        records = transfer.EXPORTS[kind](self.state)
        items: list[Any] = []
        page_bytes = 0
        for record in records[begin:]:
            if len(items) == limit or page_bytes >= MAX_PAGE_BYTES:
                return RecordPage(items, str(begin + len(items)))
            items.append(record)
            page_bytes += len(msgspec.msgpack.encode(record))
        return RecordPage(items, None)

    async def import_records(self, kind: RecordKind, records: Sequence[Any]) -> None:
        """Store records that are not stored already."""
        for record in records:
            transfer.import_record(self.state, kind, record, self._clock())

    async def has_other_processes(self) -> bool | None:
        """Return None: heartbeats show whether a process is registered."""
        return None

    # --- records ----------------------------------------------------------------------------------

    def _is_expired(self, record: StoredRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock()

    def _find_record(self, address: tuple[str, str, str]) -> StoredRecord | None:
        record = self.state.records.get(address)
        return None if record is None or self._is_expired(record) else record

    async def read_records(
        self, addresses: Sequence[RecordAddress]
    ) -> tuple[int, list[StoredRecord | None]]:
        """Return the time and the records."""
        return self._clock(), [
            self._find_record((address.owner, address.kind, address.key)) for address in addresses
        ]

    async def list_records(
        self, owner: str, kind: str, *, after: str = "", limit: int = MAX_LISTED_RECORDS
    ) -> tuple[int, list[StoredRecord]]:
        """Return the time and the first records after a key."""
        found = [
            record
            for address, record in sorted(self.state.records.items())
            if address[:2] == (owner, kind) and record.key > after and not self._is_expired(record)
        ]
        page: list[StoredRecord] = []
        for record in found[:limit]:
            page.append(record)
            if sum(len(each.value) for each in page) >= MAX_PAGE_BYTES:
                break
        return self._clock(), page

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Apply the changes, unless one conflicts."""
        now = self._clock()
        for change in changes:
            record = self._find_record((change.owner, change.kind, change.key))
            value = None if record is None else record.value
            if value != change.expected and not change.is_unconditional:
                return False
        for change in changes:
            address = (change.owner, change.kind, change.key)
            if change.value is None:
                self.state.records.pop(address, None)
            elif self.state.may_own_records(change.owner):
                lifetime_ms = change.lifetime_ms
                expires_at = None if lifetime_ms is None else now + lifetime_ms
                self.state.records[address] = StoredRecord(*address, change.value, now, expires_at)
        return True

    async def forget_orphaned_bodies(self, refs: Sequence[str]) -> None:
        """Remove bodies that were deleted from the list of orphaned bodies."""
        for ref in refs:
            self.state.orphaned_bodies.pop(ref, None)


def _system_clock() -> int:
    return int(effects.unix_time() * 1000)


def copy(value: S) -> S:
    """Return a copy, so that callers cannot change the store's state."""
    return msgspec.structs.replace(value)


def copy_replay(replay: ReplayRecord) -> ReplayRecord:
    """Return a copy of a replay."""
    return msgspec.structs.replace(replay, finished=dict(replay.finished))


def _parse_cursor(cursor: str) -> int:
    """Return the number of the task in a cursor."""
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= MAX_CURSOR_DIGITS):
        raise ConfigurationError("cursor", "must be a cursor from a page of this list", cursor[:50])
    return int(cursor)


def _matches(row: Row, task_filter: StoredTaskFilter) -> bool:
    """Return whether a task matches a filter."""
    task = row.task
    pairs: Iterable[tuple[object, object]] = (
        (task_filter.status, task.status),
        (task_filter.policy_id, task.policy_id),
        (task_filter.lane, task.lane),
        (task_filter.reason, task.reason),
        (task_filter.key, task.key),
    )
    windows: Iterable[tuple[int | None, int | None, int | None]] = (
        (task.created_at, task_filter.created_from, task_filter.created_until),
        (task.finished_at, task_filter.finished_from, task_filter.finished_until),
    )
    return (
        all(wanted is None or wanted == found for wanted, found in pairs)
        and task.lane.startswith(task_filter.lane_prefix or "")
        and not (task_filter.is_live and task.status.is_finished)
        and all(
            (start is None or (time is not None and start <= time))
            and (end is None or (time is not None and time <= end))
            for time, start, end in windows
        )
        and _matches_decoded(row, task_filter)
    )


def _matches_decoded(row: Row, task_filter: StoredTaskFilter) -> bool:
    """Return whether a task matches the functions of a filter that decode it."""
    matches_attempt, matches_content = task_filter.matches_attempt, task_filter.matches_content
    if matches_attempt is not None:
        logged = [msgspec.msgpack.decode(entry, type=AttemptRecord) for entry in row.log[-1:]]
        if not any(map(matches_attempt, logged)):
            return False
    return matches_content is None or matches_content(row.task.packed_content)
