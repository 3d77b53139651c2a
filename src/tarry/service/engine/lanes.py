"""The lanes in this process: the state of each downstream, and the leased tasks of each lane.

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

from msgspec import Struct

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import RatioBudget
from tarry.core.downstream import Downstream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.model import Task, TaskContent

_MAX_LANES = 10_000
"""Above this number, lanes without tasks are evicted at once, not only when they have been idle."""
_FIRST_ATTEMPTS_PER_RETRY = 2
"""First attempts between two retries of a lane. Retries of tasks that always fail are then at most
a third of the attempts: too few to open the breaker of a healthy lane, which takes a half."""
_MIN_RETRY_DEFERRAL_MS, _MAX_RETRY_DEFERRAL_MS = 1_000, 60_000
_DEFERRED_RETRY_SPACING_MS = 50
"""Deferred retries become due 20 a second. The budget admits 10 a second plus a share of the calls,
so that at most about half of them are deferred again."""
_LIMIT_REFRESH_MS = 50
"""Milliseconds for which an in-flight limit is assumed to be unchanged after it was reached."""
_MAX_TIMER_MS = 1_000
"""The clock is read at least this often while tasks wait, because the store's clock may be set."""


# Not a Struct: each attempt sets several attributes, which takes 0.02 instead of 0.09 us each.
@dataclass(slots=True, eq=False)
class LaneState:
    """One downstream, and the tasks of its lane that are leased to this process."""

    name: str
    downstream: Downstream
    due_retries: deque[LeasedTask] = field(default_factory=deque)
    """Due tasks that were attempted before. They have their own queue, so that retries start near
    their due time: while both queues have tasks, every third attempt is a retry."""
    due_first_attempts: deque[LeasedTask] = field(default_factory=deque)
    """Due tasks that were not attempted yet, in the order in which they became due."""
    leased: int = 0  # tasks of the lane that are leased to this process
    running: int = 0  # attempts in flight
    is_in_rotation: bool = False  # whether the lane is in `LeasedTasks.rotation`
    is_paused: bool = False  # whether an operator paused the lane through this process
    was_used: bool = True  # whether the lane had a task since the last call of `Lanes.forget_idle`
    running_at_limit: int | None = None
    """`running` when the in-flight limit last refused an attempt; None: unknown or outdated."""
    _limit_reached_at: int = 0
    _first_attempts_in_a_row: int = 0
    _last_reserved_time: int = 0

    def pop_due(self) -> LeasedTask | None:
        """Remove and return a due task: every third one is a retry while both queues have tasks."""
        if self.due_first_attempts and (
            not self.due_retries or self._first_attempts_in_a_row < _FIRST_ATTEMPTS_PER_RETRY
        ):
            self._first_attempts_in_a_row += 1
            return self.due_first_attempts.popleft()
        self._first_attempts_in_a_row = 0
        return self.due_retries.popleft() if self.due_retries else None

    def due_queue(self, task: Task) -> deque[LeasedTask]:
        """Return the queue in which a due task waits."""
        # Attempts before the last replay and lost attempts do not make it a retry.
        is_retry = task.attempts > task.attempts_before_replay + task.lost_attempts
        return self.due_retries if is_retry else self.due_first_attempts

    def reserve_retry_time(self, now: int) -> int:
        """Return the time to which a retry is deferred, because the retry budget is empty."""
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
        """Whether no task is leased and no attempt runs; an attempt may outlive its lease."""
        return not self.leased and not self.running

    @property
    def is_at_in_flight_limit(self) -> bool:
        """Whether at least as many attempts run as when the in-flight limit last refused one."""
        return self.running_at_limit is not None and self.running >= self.running_at_limit

    def on_limit_reached(self, now: int) -> None:
        """Remember that the in-flight limit refused an attempt, so that no other one is tried."""
        self.running_at_limit, self._limit_reached_at = max(1, self.running), now

    def on_attempt_ended(self, now: int) -> None:
        """Forget an old refusal of the in-flight limit, because the limit grows after an outage."""
        if now >= self._limit_reached_at + _LIMIT_REFRESH_MS:
            self.running_at_limit = None

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
    is_busy: bool = False  # whether an attempt runs, or a result or a cancellation is being written
    is_queued: bool = False  # whether it is in the heap of `LeasedTasks` or in a queue of its lane
    is_dropped: bool = False  # whether the lease is gone: a queue that holds the task skips it


class Lanes(dict[str, LaneState]):
    """Lanes by name, created when they are first needed; idle lanes are forgotten."""

    def __init__(self, build_downstream: Callable[[str], Downstream], *, max_leased: int) -> None:
        super().__init__()
        self.build_downstream: Callable[[str], Downstream] = build_downstream
        self._max_leased = max_leased
        self.parked: set[str] = set()  # names of lanes that this process has parked in the store
        self.fully_leased: set[str] = set()  # names of lanes with `max_leased` leased tasks

    def __missing__(self, name: str) -> LaneState:
        """Create the lane that `lanes[name]` needs."""
        if len(self) >= _MAX_LANES:
            self._evict_empty()
        lane = self[name] = LaneState(name, self.build_downstream(name))
        return lane

    def most_notable(self, limit: int, tenant: str | None = None) -> list[LaneState]:
        """Return lanes of one tenant or of all: tripped ones first, then the busiest."""
        lanes = (lane for lane in self.values() if tenant in {None, lane.name.partition("/")[0]})
        return nlargest(limit, lanes, key=lambda lane: (lane.is_tripped, lane.leased))

    def count_leased(self, lane: LaneState) -> None:
        """Count a task that is leased from now on."""
        lane.leased += 1
        lane.was_used = True
        if lane.leased >= self._max_leased:
            self.fully_leased.add(lane.name)

    def count_dropped(self, lane: LaneState) -> None:
        """Count a task that is no longer leased."""
        lane.leased -= 1
        if self.fully_leased and lane.leased < self._max_leased:
            self.fully_leased.discard(lane.name)

    def forget_idle(self) -> int:
        """Forget healthy lanes that were not used since the last call; return how many."""
        # Only latency statistics are lost: the time windows of outcomes are empty by then.
        idle = [lane for lane in self.values() if not lane.was_used and self._is_disposable(lane)]
        for lane in self.values():
            lane.was_used = not lane.is_empty
        self._remove(idle)
        return len(idle)

    def _evict_empty(self) -> None:
        """Forget half of the disposable lanes, oldest first; without any, of the empty ones."""
        # A parked lane is not lost: the store reports it when tasks of the lane are claimed.
        empty = [lane for lane in self.values() if lane.is_empty]
        candidates = [lane for lane in empty if self._is_disposable(lane)] or empty
        self._remove(candidates[: len(candidates) // 2 + 1])

    def _is_disposable(self, lane: LaneState) -> bool:
        """Return whether a lane is empty and healthy, and neither paused nor parked."""
        is_healthy = lane.breaker.state is BreakerState.CLOSED
        is_stopped = lane.is_paused or lane.name in self.parked
        return lane.is_empty and is_healthy and not is_stopped

    def _remove(self, lanes: list[LaneState]) -> None:
        for lane in lanes:
            del self[lane.name]
            self.parked.discard(lane.name)


def build_downstream(
    name: str, *, max_in_flight: int, breaker: Callable[[], Breaker] = Breaker
) -> Downstream:
    """Build the downstream of a lane: breaker, retry budget, and an in-flight limit."""
    # Ten retries a second are always admitted: a lane with only retries left must make progress.
    budget = RatioBudget(0.3, min_per_second=10.0)
    return Downstream(name, breaker=breaker(), budget=budget, max_in_flight=max_in_flight)


class LeasedTasks(dict[str, LeasedTask]):
    """Leased tasks by id, in a heap by due time, and, once due, in the queue of their lane.

    Lanes with due tasks are served round robin. `now` returns the store's time in milliseconds.
    `on_due` is called when a task becomes due.
    """

    def __init__(
        self, lanes: Lanes, now: Callable[[], int], *, max_leased: int, on_due: Callable[[], None]
    ) -> None:
        super().__init__()
        self._lanes = lanes
        self._now = now
        self._max_leased = max_leased
        self._on_due = on_due
        self._heap: list[tuple[int, int, LeasedTask]] = []
        """`(due time, tie breaker, task)`. Dropped tasks stay until they are due."""
        self._tie_breaker = count()
        self.rotation: deque[LaneState] = deque()
        """Lanes with due tasks, in the order in which they are served; read-only for others."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    @property
    def free_slots(self) -> int:
        """How many more tasks may be leased."""
        return self._max_leased - len(self)

    def add(
        self, tasks: Sequence[Task], contents: Sequence[TaskContent | None] | None = None
    ) -> None:
        """Add tasks that were just leased to this process."""
        now, lanes = self._now(), self._lanes
        is_due = False
        for task, content in zip(tasks, contents or [None] * len(tasks), strict=True):
            earlier = self.get(task.id)
            if earlier is not None:  # leased again after a lost lease, or made due by `retry_now`
                earlier.is_dropped = True
                lanes.count_dropped(earlier.lane)
            lane = lanes[task.lane]
            leased = self[task.id] = LeasedTask(task, lane, content)
            lanes.count_leased(lane)
            is_due = self._enqueue(leased, now) or is_due
        if is_due:
            self._on_due()

    def requeue(self, leased: LeasedTask) -> None:
        """Mark a task as not busy, and queue it for its `next_attempt_at`."""
        leased.is_busy = False
        if not leased.is_queued and self._enqueue(leased, self._now()):
            self._on_due()

    def drop(self, leased: LeasedTask) -> None:
        """Forget a task whose lease has ended or is about to be released."""
        leased.is_dropped = True
        if self.get(leased.task.id) is leased:
            del self[leased.task.id]
            self._lanes.count_dropped(leased.lane)

    def next_due(self) -> LeasedTask | None:
        """Remove and return a due task of the next lane; the caller calls `add_to_rotation`."""
        rotation = self.rotation
        while rotation:
            lane = rotation.popleft()
            lane.is_in_rotation = False
            if lane.running_at_limit is not None and lane.is_at_in_flight_limit:
                continue  # the lane returns to the rotation when one of its attempts ends
            while (leased := lane.pop_due()) is not None:
                leased.is_queued = False
                # A dropped or cancelled task is not searched for in the queues, but skipped here.
                if not leased.is_dropped and not leased.is_busy:
                    return leased
        return None

    def return_to_front(self, leased: LeasedTask) -> None:
        """Put a task that `next_due` returned back to the front of the queue of its lane."""
        leased.is_queued = True
        leased.lane.due_queue(leased.task).appendleft(leased)

    def add_to_rotation(self, lane: LaneState) -> None:
        """Put a lane with due tasks at the end of the rotation, unless it is in the rotation."""
        if (lane.due_first_attempts or lane.due_retries) and not lane.is_in_rotation:
            lane.is_in_rotation = True
            self.rotation.append(lane)

    def stop_timer(self) -> None:
        """Cancel the timer, so that no more tasks become due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _enqueue(self, leased: LeasedTask, now: int) -> bool:
        """Queue a task in its lane if it is due, else in the heap; return whether it is due."""
        leased.is_queued = True
        due_at = leased.task.next_attempt_at
        if due_at <= now:
            self._queue_in_lane(leased)
            return True
        heappush(self._heap, (due_at, next(self._tie_breaker), leased))
        self._arm_timer()
        return False

    def _queue_in_lane(self, leased: LeasedTask) -> None:
        lane = leased.lane
        lane.due_queue(leased.task).append(leased)
        if not lane.is_in_rotation:
            lane.is_in_rotation = True
            self.rotation.append(lane)

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
        # Timers may fire early (uvloop's by up to 1.4 ms), so the clock decides which tasks are
        # due, and the timer is set again for the others.
        self._timer = None
        now = self._now()
        is_due = False
        while self._heap and self._heap[0][0] <= now:
            leased = heappop(self._heap)[2]
            if not leased.is_dropped:
                self._queue_in_lane(leased)
                is_due = True
        self._arm_timer()
        if is_due:
            self._on_due()
