"""The tasks that are leased to this process.

A leased task waits in a heap for its due time, and then in one of two queues of its lane.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from tarry.service.engine.attempt_slots import ADMITTED, LaneRotation
from tarry.service.engine.lanes import LeasedTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tarry.service.engine.attempt_slots import AttemptSlots
    from tarry.service.engine.lanes import Lanes, LocalLane, TenantState
    from tarry.service.model import Task, TaskContent

_MAX_TIMER_MS = 1_000  # the clock is read at least this often, because it may have been set
_MAX_CLOCK_ERROR_MS = 50  # of this process's estimate of the store's time


class LeasedTasks(dict[str, LeasedTask]):
    """Leased tasks by id. Each waits in a heap until it is due, and then in a queue of its lane.

    Due tasks are taken round robin from the lanes that `slots` admits. `now` returns the store's
    time in milliseconds. `on_due` is called when a task becomes due.
    """

    def __init__(
        self,
        lanes: Lanes,
        slots: AttemptSlots,
        now: Callable[[], int],
        *,
        max_leased: int,
        lease_ms: int,
        on_due: Callable[[], None],
    ) -> None:
        super().__init__()
        self._lanes = lanes
        self._now = now
        self._max_leased = max_leased
        self._lease_ms = lease_ms
        self._on_due = on_due
        self._heap: list[tuple[int, int, LeasedTask]] = []
        """`(due time, tie breaker, task)`. Dropped tasks stay in the heap until they are due."""
        self._tie_breaker = count()
        self._slots = slots
        self._fast_lanes = LaneRotation(slots)
        self._slow_lanes = LaneRotation(slots)
        self._rotations = self._fast_lanes, self._slow_lanes
        """Both rotations. `_pop_lane` tries the first one first, and then exchanges them."""
        self._free_start_slots: list[int] = []
        self._start_slot_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self.lost_replies: Counter[int] = Counter()
        """By partition: the failed store calls that may nevertheless have leased tasks to this
        process. The scheduler removes the entry when it has released the leases of these calls.

        Until then, new tasks of the partition are stored without a lease: the scheduler could
        mistake a new lease for an unknown one, and release it.
        """

    @property
    def free_leases(self) -> int:
        """How many more tasks may be leased."""
        return self._max_leased - len(self)

    def add(self, tasks: Sequence[Task], contents: Mapping[str, TaskContent] = {}) -> None:
        """Add tasks that were leased to this process; a task that is already here is replaced.

        `contents` are the unpacked contents that are known, by the ids of tasks.
        """
        now, lanes = self._now(), self._lanes
        latest_wake_at = now + _MAX_CLOCK_ERROR_MS + self._lease_ms  # see `startable_at`
        is_due, lane, lane_count = False, None, 0
        for task in tasks:
            task_id = task.id
            if task_id in self:  # it was leased again, or made due by `retry_now`
                self.drop(self[task_id])
            if lane is None or task.lane != lane.name:
                if lane is not None:  # now: a new lane may replace a lane without leases
                    lanes.increment_leased(lane, lane_count)
                lane, lane_count = lanes[task.lane], 0
            lane_count += 1
            leased_task = self[task_id] = LeasedTask(task, lane, contents.get(task_id))
            # Most tasks: saves two calls.
            if not task.attempts and task.next_attempt_at <= now and task.wake_at <= latest_wake_at:
                leased_task.is_queued = is_due = True
                lane.due_first_attempts.append(leased_task)
                if lane.rotation is None:
                    self.add_to_rotation(lane)
            elif self._enqueue(leased_task, now):
                is_due = True
        if lane is not None:
            lanes.increment_leased(lane, lane_count)
        if is_due:
            self._on_due()

    def startable_at(self, task: Task, now: int) -> int:
        """Return when a leased task is due or, if its attempt was deferred, when that ends."""
        deferred_until = task.wake_at - self._lease_ms
        is_deferred = deferred_until > now + _MAX_CLOCK_ERROR_MS
        return deferred_until if is_deferred else task.next_attempt_at

    def requeue(self, leased_task: LeasedTask) -> None:
        """Mark a task as not busy, and queue it for its `next_attempt_at`."""
        leased_task.is_busy = False
        if not leased_task.is_queued and self._enqueue(leased_task, self._now()):
            self._on_due()

    def drop(self, leased_task: LeasedTask) -> None:
        """Remove a task whose lease has ended or is about to be released."""
        leased_task.is_dropped = True
        task_id, start_slot = leased_task.task.id, leased_task.start_slot
        if self.get(task_id) is leased_task:
            del self[task_id]
            self._lanes.decrement_leased(leased_task.lane)
            if start_slot is not None:
                self._free_start_slots.append(start_slot)

    def assign_start_slot(self, leased_task: LeasedTask) -> int:
        """Return the `slot` for `Store.record_start`; the task keeps it until it is dropped."""
        slot = leased_task.start_slot
        if slot is None:
            if self._free_start_slots:
                slot = self._free_start_slots.pop()
            else:
                slot = self._start_slot_count
                self._start_slot_count += 1
            leased_task.start_slot = slot
        return slot

    def pop_next_due(self, last_lane: LocalLane | None = None) -> LeasedTask | None:
        """Return the next due task that may start, or None; its lane leaves the rotation.

        `last_lane` is the lane of the last task. It returns to the end of the rotation, unless the
        rotation has no other lane: then its next task is returned at once, which saves 4 us.
        """
        lane = last_lane
        if lane is not None and (
            lane.rotation is not None
            or self._fast_lanes.tenant_queue
            or self._slow_lanes.tenant_queue
            or self._slots.check(lane) is not ADMITTED
        ):
            self.add_to_rotation(lane)
            lane = None
        if lane is None:
            lane = self._pop_lane()
        while lane is not None:
            # Otherwise, the lane returns when its timer fires, or when one of its attempts or of
            # those that share its cap ends.
            if not (
                lane.waits_for_cap or lane.rate_timer is not None or lane.downstream.limiter.is_full
            ):
                while (leased_task := lane.pop_due()) is not None:
                    leased_task.is_queued = False
                    # Dropped and busy tasks are removed only here: a search for them would be slow.
                    if not leased_task.is_dropped and not leased_task.is_busy:
                        return leased_task
            else:
                lane.was_held_back = True
            lane = self._pop_lane()
        return None

    def _pop_lane(self) -> LocalLane | None:
        """Return the next lane that may start an attempt: fast and slow lanes in turn."""
        first, second = self._rotations
        self._rotations = second, first
        return first.pop() or second.pop()

    @property
    def has_startable_lanes(self) -> bool:
        """Whether a lane with due tasks may start an attempt."""
        return bool(self._fast_lanes.tenant_queue or self._slow_lanes.tenant_queue)

    def on_slot_released(self, tenant: TenantState, now: int) -> None:
        """Readmit tenants and lanes that waited for a slot, and queue the tasks that are due.

        `tenant` has released a slot. The tasks are queued here and not only by the timer, because
        the event loop handles all responses that have arrived before it checks its timers: 500
        responses take 80 ms. Meanwhile, tasks of other tenants would not be in the rotation.
        """
        first, second = self._rotations
        if (
            first.waiting_tenants
            or first.waiting_lanes
            or second.waiting_tenants
            or second.waiting_lanes
        ):
            for rotation in self._rotations:
                lane = rotation.readmit(tenant)
                if lane is not None:
                    self.add_to_rotation(lane)
        heap = self._heap
        if heap and heap[0][0] <= now:
            self.queue_due_tasks(now)

    def return_to_front(self, leased_task: LeasedTask) -> None:
        """Put a task that `pop_next_due` returned back at the front of its lane's queue."""
        leased_task.is_queued = True
        leased_task.lane.due_queue(leased_task.task).appendleft(leased_task)

    def add_to_rotation(self, lane: LocalLane) -> None:
        """Add a lane with due tasks to the end of its rotation, unless it is there already.

        A lane that has become fast or slow moves from the other rotation. There, a fast lane would
        wait behind slow lanes that are not admitted, and a slow lane would keep fast lanes waiting.
        """
        rotation = self._slow_lanes if lane.is_slow else self._fast_lanes
        if lane.rotation is not rotation and lane.has_due_tasks:
            rotation.append(lane)

    def stop_timer(self) -> None:
        """Cancel the timer, so that no more tasks become due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _enqueue(self, leased_task: LeasedTask, now: int) -> bool:
        """Queue a task in its lane if it is due, else in the heap; return whether it is due."""
        leased_task.is_queued = True
        due_at = self.startable_at(leased_task.task, now)
        if due_at <= now:
            self._queue_in_lane(leased_task)
            return True
        heappush(self._heap, (due_at, next(self._tie_breaker), leased_task))
        self._arm_timer()
        return False

    def _queue_in_lane(self, leased_task: LeasedTask) -> None:
        lane = leased_task.lane
        lane.due_queue(leased_task.task).append(leased_task)
        if lane.rotation is None:
            self.add_to_rotation(lane)

    def _arm_timer(self) -> None:
        while self._heap and self._heap[0][2].is_dropped:
            heappop(self._heap)
        if not self._heap:
            return
        due_at = self._heap[0][0]
        if self._timer is not None:
            if due_at >= self._timer_at:
                return
            self._timer.cancel()
        delay = min(max(0, due_at - self._now()), _MAX_TIMER_MS) / 1000
        self._timer_at = due_at
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        # A timer may fire early (uvloop's by up to 1.4 ms), so the clock decides which tasks are
        # due, and the timer is set again for the other tasks.
        self._timer = None
        is_due = self.queue_due_tasks(self._now())
        self._arm_timer()
        if is_due:
            self._on_due()

    def queue_due_tasks(self, now: int) -> bool:
        """Move tasks that are due from the heap to their lanes; return whether there were any."""
        heap, is_due = self._heap, False
        while heap and heap[0][0] <= now:
            leased_task = heappop(heap)[2]
            if not leased_task.is_dropped:
                self._queue_in_lane(leased_task)
                is_due = True
        return is_due
