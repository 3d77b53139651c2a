"""The lanes in this process: their downstreams, and their tasks that are leased to this process.

A lane is the queue of one tenant's tasks for one downstream. A leased task waits in a heap for its
due time, and then in one of two queues of its lane. The store decides for all workers whether a
lane is parked (its breaker opened) or paused (by an operator). The state here only decides whether
this process starts attempts of the lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from msgspec import Struct

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import RatioBudget
from tarry.core.downstream import Downstream
from tarry.service.engine.attempt_slots import FAST_ATTEMPT_MS, LaneRotation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.engine.attempt_slots import AttemptSlots
    from tarry.service.model import Task, TaskContent

_MAX_LANES = 10_000  # at this number, lanes without tasks are removed to create another one
_FIRST_ATTEMPTS_PER_RETRY = 2
"""First attempts between two retries of a lane. Retries of tasks that always fail are then at most
a third of the attempts: too few to open the breaker of a healthy lane, which opens at one half."""
_MIN_RETRY_DEFERRAL_MS, _MAX_RETRY_DEFERRAL_MS = 1_000, 60_000  # while the retry budget is empty
_DEFERRED_RETRY_SPACING_MS = 50
"""The deferred retries of a lane become due 20 a second. Its budget admits 10 a second plus a share
of the calls, so at most about half of the deferred retries are deferred again."""
_LIMIT_REFRESH_MS = 50  # time for which an observed in-flight limit is assumed to be unchanged
_MAX_TIMER_MS = 1_000  # so that the clock is read again soon, because it may be set


_MAX_SLOW_LANE_LEASED = 256
"""How many tasks of a slow lane are leased at a time. More would only wait for a slot, and their
leases would be released before they start."""
_DURATION_WEIGHT = 1 / 8  # of the newest attempt in the mean duration of a lane


@dataclass(slots=True, eq=False, weakref_slot=True)
class TenantState:
    """The attempts of one tenant in flight in this process, see `AttemptSlots`."""

    running_count: int = 0
    slow_count: int = 0


# Not a Struct: each attempt sets several attributes, which takes 0.02 instead of 0.09 us each.
@dataclass(slots=True, eq=False)
class LaneState:
    """The downstream of a lane, and the lane's tasks that are leased to this process."""

    name: str
    downstream: Downstream
    tenant: TenantState = field(default_factory=TenantState)
    due_retries: deque[LeasedTask] = field(default_factory=deque)
    """Due tasks that were attempted before. They have their own queue, so that retries start near
    their due time: while both queues have tasks, every third attempt is a retry."""
    due_first_attempts: deque[LeasedTask] = field(default_factory=deque)
    """Due tasks that were not attempted yet, in the order in which they became due."""
    leased_count: int = 0  # tasks of the lane that are leased to this process
    running_count: int = 0  # attempts in flight
    slow_count: int = 0  # attempts in flight in slow slots
    is_slow: bool = True
    """Whether attempts usually take longer than a second, or none has ended yet."""
    _mean_duration_ms: float = 0.0
    is_in_rotation: bool = False  # whether the lane is in a rotation of `LeasedTasks`
    is_paused: bool = False  # whether an operator paused the lane through this process
    was_used: bool = True  # whether the lane had a task since the last call of `Lanes.forget_idle`
    observed_limit: int | None = None
    """`running_count` when the in-flight limit last rejected an attempt; None if not known."""
    _limit_reached_at: int = 0
    _first_attempts_in_a_row: int = 0
    _last_reserved_time: int = 0

    def pop_due(self) -> LeasedTask | None:
        """Remove and return the next due task (None: no task is due), see `due_retries`."""
        if self.due_first_attempts and (
            not self.due_retries or self._first_attempts_in_a_row < _FIRST_ATTEMPTS_PER_RETRY
        ):
            self._first_attempts_in_a_row += 1
            return self.due_first_attempts.popleft()
        self._first_attempts_in_a_row = 0
        return self.due_retries.popleft() if self.due_retries else None

    def due_queue(self, task: Task) -> deque[LeasedTask]:
        """Return the queue in which a due task waits."""
        # Attempts before the last replay and lost attempts do not make the next attempt a retry.
        is_retry = task.attempts > task.attempts_before_replay + task.lost_attempts
        return self.due_retries if is_retry else self.due_first_attempts

    def record_duration(self, duration_ms: float, *, timed_out: bool) -> None:
        """Update `is_slow` after an attempt."""
        self._mean_duration_ms += (duration_ms - self._mean_duration_ms) * _DURATION_WEIGHT
        self.is_slow = timed_out or self._mean_duration_ms >= FAST_ATTEMPT_MS

    def reserve_retry_time(self, now: int) -> int:
        """Reserve and return a time for a retry that the empty retry budget has rejected."""
        after_last = self._last_reserved_time + _DEFERRED_RETRY_SPACING_MS
        retry_at = max(now + _MIN_RETRY_DEFERRAL_MS, after_last)
        self._last_reserved_time = min(retry_at, now + _MAX_RETRY_DEFERRAL_MS)
        return self._last_reserved_time

    @property
    def breaker(self) -> Breaker:
        """The breaker of the downstream."""
        breaker = self.downstream.breaker
        assert breaker is not None  # noqa: S101 - `build_downstream` creates one
        return breaker

    @property
    def is_empty(self) -> bool:
        """Whether no task is leased and no attempt runs. An attempt may outlive its lease."""
        return not self.leased_count and not self.running_count

    @property
    def is_at_in_flight_limit(self) -> bool:
        """Whether at least as many attempts run as when the in-flight limit last rejected one."""
        return self.observed_limit is not None and self.running_count >= self.observed_limit

    def on_limit_reached(self, now: int) -> None:
        """Remember how many attempts run, because the in-flight limit has rejected another."""
        self.observed_limit, self._limit_reached_at = max(1, self.running_count), now

    def on_attempt_ended(self, now: int) -> None:
        """Forget an observed limit that is not new, because the limit may have grown since."""
        if now >= self._limit_reached_at + _LIMIT_REFRESH_MS:
            self.observed_limit = None

    @property
    def is_tripped(self) -> bool:
        """Whether the breaker is open or half-open."""
        state = self.breaker.state
        return state is BreakerState.OPEN or state is BreakerState.HALF_OPEN


class LeasedTask(Struct, eq=False):
    """One task leased to this process."""

    task: Task
    lane: LaneState
    content: TaskContent | None  # unpacked; None until the first attempt needs it
    is_busy: bool = False  # whether a policy load, attempt, write or cancellation is running
    is_queued: bool = False  # whether it is in the heap of `LeasedTasks` or in a queue of its lane
    is_dropped: bool = False  # whether it was removed from `LeasedTasks`; queues skip it


class Lanes(dict[str, LaneState]):
    """Lanes by name. `lanes[name]` creates a lane; `forget_idle` removes idle lanes."""

    def __init__(self, build_downstream: Callable[[str], Downstream], *, max_leased: int) -> None:
        super().__init__()
        self.build_downstream: Callable[[str], Downstream] = build_downstream
        self._max_leased = max_leased
        self._tenants: WeakValueDictionary[str, TenantState] = WeakValueDictionary()
        self.parked: set[str] = set()  # names of lanes that this process has parked in the store
        self.fully_leased: set[str] = set()  # names of lanes with as many leases as they may have

    def __missing__(self, name: str) -> LaneState:
        """Create and return a lane."""
        if len(self) >= _MAX_LANES:
            self._evict_empty()
        tenant_name = name.partition("/")[0]
        tenant = self._tenants.get(tenant_name)
        if tenant is None:
            tenant = self._tenants[tenant_name] = TenantState()
        lane = self[name] = LaneState(name, self.build_downstream(name), tenant)
        return lane

    def most_notable(self, limit: int, tenant: str | None = None) -> list[LaneState]:
        """Return lanes of a tenant (None: of all): tripped lanes first, then by leased tasks."""
        lanes = (lane for lane in self.values() if tenant in {None, lane.name.partition("/")[0]})
        return nlargest(limit, lanes, key=lambda lane: (lane.is_tripped, lane.leased_count))

    def increment_leased(self, lane: LaneState) -> None:
        """Count a task that was leased to this process."""
        lane.leased_count += 1
        lane.was_used = True
        if lane.leased_count >= self._lease_limit(lane):
            self.fully_leased.add(lane.name)

    def decrement_leased(self, lane: LaneState) -> None:
        """Stop counting a task that is no longer leased."""
        lane.leased_count -= 1
        if self.fully_leased and lane.leased_count < self._lease_limit(lane):
            self.fully_leased.discard(lane.name)

    def _lease_limit(self, lane: LaneState) -> int:
        limit = self._max_leased
        return min(limit, _MAX_SLOW_LANE_LEASED) if lane.is_slow else limit

    def forget_idle(self) -> int:
        """Remove disposable lanes that had no task since the last call; return their number."""
        # Only latency statistics are lost: the time windows of outcomes are empty by then.
        idle = [lane for lane in self.values() if not lane.was_used and self._is_disposable(lane)]
        for lane in self.values():
            lane.was_used = not lane.is_empty
        self._remove(idle)
        return len(idle)

    def _evict_empty(self) -> None:
        """Remove the older half of the disposable lanes; if there are none, of the empty lanes."""
        # A parked lane stays parked: the store reports it when tasks of the lane are claimed.
        empty = [lane for lane in self.values() if lane.is_empty]
        candidates = [lane for lane in empty if self._is_disposable(lane)] or empty
        self._remove(candidates[: len(candidates) // 2 + 1])

    def _is_disposable(self, lane: LaneState) -> bool:
        """Return whether a lane is empty, its breaker closed, and it is not paused or parked."""
        is_closed = lane.breaker.state is BreakerState.CLOSED
        is_stopped = lane.is_paused or lane.name in self.parked
        return lane.is_empty and is_closed and not is_stopped

    def _remove(self, lanes: list[LaneState]) -> None:
        for lane in lanes:
            del self[lane.name]
            self.parked.discard(lane.name)


def build_downstream(
    name: str, *, max_in_flight: int, build_breaker: Callable[[], Breaker] = Breaker
) -> Downstream:
    """Build the downstream of a lane, with a breaker, a retry budget and an in-flight limit."""
    # Ten retries a second are always admitted, so that a lane with only retries makes progress.
    budget = RatioBudget(0.3, min_per_second=10.0)
    return Downstream(name, breaker=build_breaker(), budget=budget, max_in_flight=max_in_flight)


class LeasedTasks(dict[str, LeasedTask]):
    """Leased tasks by id. Each waits in a heap until it is due, and then in a queue of its lane.

    Lanes with due tasks are served as `slots` admits them. `now` returns the store's time in
    milliseconds. `on_due` is called when a task becomes due.
    """

    def __init__(
        self,
        lanes: Lanes,
        slots: AttemptSlots,
        now: Callable[[], int],
        *,
        max_leased: int,
        on_due: Callable[[], None],
    ) -> None:
        super().__init__()
        self._lanes = lanes
        self._now = now
        self._max_leased = max_leased
        self._on_due = on_due
        self._heap: list[tuple[int, int, LeasedTask]] = []
        """`(due time, tie breaker, task)`. Dropped tasks stay in the heap until they are due."""
        self._tie_breaker = count()
        self._fast_lanes = LaneRotation(slots)
        self._slow_lanes = LaneRotation(slots)
        self._is_turn_of_slow_lanes = True
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    @property
    def free_slots(self) -> int:
        """How many more tasks may be leased."""
        return self._max_leased - len(self)

    def add(
        self, tasks: Sequence[Task], contents: Sequence[TaskContent | None] | None = None
    ) -> None:
        """Add tasks that were leased to this process; a task that is already here is replaced."""
        now, lanes = self._now(), self._lanes
        is_due = False
        for task, content in zip(tasks, contents or [None] * len(tasks), strict=True):
            replaced_task = self.get(task.id)
            if replaced_task is not None:  # it was leased again, or made due by `retry_now`
                replaced_task.is_dropped = True
                lanes.decrement_leased(replaced_task.lane)
            lane = lanes[task.lane]
            leased_task = self[task.id] = LeasedTask(task, lane, content)
            lanes.increment_leased(lane)
            is_due = self._enqueue(leased_task, now) or is_due
        if is_due:
            self._on_due()

    def requeue(self, leased_task: LeasedTask) -> None:
        """Mark a task as not busy, and queue it for its `next_attempt_at`."""
        leased_task.is_busy = False
        if not leased_task.is_queued and self._enqueue(leased_task, self._now()):
            self._on_due()

    def drop(self, leased_task: LeasedTask) -> None:
        """Remove a task whose lease has ended or is about to be released."""
        leased_task.is_dropped = True
        if self.get(leased_task.task.id) is leased_task:
            del self[leased_task.task.id]
            self._lanes.decrement_leased(leased_task.lane)

    def pop_next_due(self) -> LeasedTask | None:
        """Remove the next lane from its rotation, and return one of its due tasks, or None."""
        while (lane := self._pop_lane()) is not None:
            if lane.observed_limit is not None and lane.is_at_in_flight_limit:
                continue  # the lane returns to the rotation when one of its attempts ends
            while (leased_task := lane.pop_due()) is not None:
                leased_task.is_queued = False
                # Dropped and busy tasks are skipped here, because finding them in a queue is slow.
                if not leased_task.is_dropped and not leased_task.is_busy:
                    return leased_task
        return None

    def _pop_lane(self) -> LaneState | None:
        """Return the next lane that may start an attempt: fast and slow lanes in turn."""
        self._is_turn_of_slow_lanes = not self._is_turn_of_slow_lanes
        if self._is_turn_of_slow_lanes:
            return self._slow_lanes.pop() or self._fast_lanes.pop()
        return self._fast_lanes.pop() or self._slow_lanes.pop()

    @property
    def has_turns(self) -> bool:
        """Whether a lane with due tasks may start an attempt."""
        return self._fast_lanes.has_turns or self._slow_lanes.has_turns

    def on_slot_released(self) -> None:
        """Let tenants that had their share of the slots try again."""
        self._fast_lanes.readmit_tenant()
        self._slow_lanes.readmit_tenant()

    def return_to_front(self, leased_task: LeasedTask) -> None:
        """Put a task that `pop_next_due` returned back at the front of its lane's queue."""
        leased_task.is_queued = True
        leased_task.lane.due_queue(leased_task.task).appendleft(leased_task)

    def add_to_rotation(self, lane: LaneState) -> None:
        """Add a lane to the end of the rotation, if it has due tasks and is not in the rotation."""
        if (lane.due_first_attempts or lane.due_retries) and not lane.is_in_rotation:
            (self._slow_lanes if lane.is_slow else self._fast_lanes).append(lane)

    def stop_timer(self) -> None:
        """Cancel the timer, so that no more tasks become due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _enqueue(self, leased_task: LeasedTask, now: int) -> bool:
        """Queue a task in its lane if it is due, else in the heap; return whether it is due."""
        leased_task.is_queued = True
        due_at = leased_task.task.next_attempt_at
        if due_at <= now:
            self._queue_in_lane(leased_task)
            return True
        heappush(self._heap, (due_at, next(self._tie_breaker), leased_task))
        self._arm_timer()
        return False

    def _queue_in_lane(self, leased_task: LeasedTask) -> None:
        lane = leased_task.lane
        lane.due_queue(leased_task.task).append(leased_task)
        if not lane.is_in_rotation:
            (self._slow_lanes if lane.is_slow else self._fast_lanes).append(lane)

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
        now = self._now()
        is_due = False
        while self._heap and self._heap[0][0] <= now:
            leased_task = heappop(self._heap)[2]
            if not leased_task.is_dropped:
                self._queue_in_lane(leased_task)
                is_due = True
        self._arm_timer()
        if is_due:
            self._on_due()
