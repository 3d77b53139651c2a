"""The tasks leased to this process: each waits for its due time, then for the turn of its lane."""

from __future__ import annotations

import asyncio
from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from tarry.service.engine.lanes import LeasedTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tarry.service.engine.clock import StoreClock
    from tarry.service.engine.lanes import Lanes, LaneState
    from tarry.service.model import Task, TaskContent

_MAX_TIMER_MS = 1_000
"""The clock is read at least this often, because the store's clock may be set meanwhile."""


class LeasedTasks:
    """Leased tasks by id, in a heap by due time, and, once due, in the queue of their lane.

    Lanes with due tasks are served round robin. `on_due` is called when a task becomes due.
    """

    def __init__(
        self, lanes: Lanes, clock: StoreClock, *, max_leased: int, on_due: Callable[[], None]
    ) -> None:
        self._lanes = lanes
        self._clock = clock
        self._max_leased = max_leased
        self._on_due = on_due
        self._by_id: dict[str, LeasedTask] = {}
        self._heap: list[tuple[int, int, LeasedTask]] = []
        """`(due time, tie breaker, task)`. Dropped tasks stay until their time comes."""
        self._tie_breaker = count()
        self.rotation: deque[LaneState] = deque()
        """Lanes with due tasks, in the order in which they are served; read-only for others."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def __len__(self) -> int:
        """Return the number of leased tasks."""
        return len(self._by_id)

    @property
    def free_slots(self) -> int:
        """How many more tasks may be leased."""
        return self._max_leased - len(self._by_id)

    def __iter__(self) -> Iterator[LeasedTask]:
        """Iterate over a copy of the leased tasks, in no particular order."""
        return iter(tuple(self._by_id.values()))

    def find(self, task_id: str) -> LeasedTask | None:
        """Return the leased task with this id, or None."""
        return self._by_id.get(task_id)

    def add(
        self, tasks: Sequence[Task], contents: Sequence[TaskContent | None] | None = None
    ) -> None:
        """Add tasks that were just leased to this process.

        If a task is here already, its earlier lease was lost, and the new lease replaces it.
        """
        now, lanes = self._clock.now(), self._lanes
        is_due = False
        for task, content in zip(tasks, contents or [None] * len(tasks), strict=True):
            earlier = self._by_id.get(task.id)
            if earlier is not None:
                earlier.is_dropped = True
                lanes.count_dropped(earlier.lane)
            lane = lanes[task.lane]
            leased = self._by_id[task.id] = LeasedTask(task, lane, content)
            lanes.count_leased(lane)
            is_due = self._enqueue(leased, now) or is_due
        if is_due:
            self._on_due()

    def requeue(self, leased: LeasedTask) -> None:
        """Put a task that is no longer busy into the queue, for its `next_attempt_at`."""
        leased.is_busy = False
        if not leased.is_queued and self._enqueue(leased, self._clock.now()):
            self._on_due()

    def drop(self, leased: LeasedTask) -> None:
        """Forget a task whose lease has ended or is about to be released."""
        leased.is_dropped = True
        if self._by_id.get(leased.task.id) is leased:
            del self._by_id[leased.task.id]
            self._lanes.count_dropped(leased.lane)

    def next_due(self) -> LeasedTask | None:
        """Remove and return the next due task of the next lane in the rotation, or None.

        The caller calls `rotate` when it has served the lane. A lane at its in-flight limit leaves
        the rotation until one of its attempts ends.
        """
        rotation = self.rotation
        while rotation:
            lane = rotation.popleft()
            lane.is_in_rotation = False
            if lane.limit is not None and lane.is_full:
                continue
            while (leased := lane.pop_due()) is not None:
                leased.is_queued = False
                # Queues are not searched when a task is dropped or cancelled: it is skipped here.
                if not leased.is_dropped and not leased.is_busy:
                    return leased
        return None

    def put_back(self, leased: LeasedTask) -> None:
        """Make a task that `next_due` returned the next one of its lane again."""
        leased.is_queued = True
        leased.lane.due_queue(leased.task).appendleft(leased)

    def rotate(self, lane: LaneState) -> None:
        """Put a lane at the end of the rotation if it has due tasks."""
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
            self._mark_due(leased)
            return True
        heappush(self._heap, (due_at, next(self._tie_breaker), leased))
        self._arm_timer()
        return False

    def _mark_due(self, leased: LeasedTask) -> None:
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
        delay = min(max(0, due_at - self._clock.now()), _MAX_TIMER_MS) / 1000
        self._timer_at = due_at
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        # Timers may fire early (uvloop's by up to 1.4 ms), so the clock decides what is due, and
        # the timer is set again for the rest.
        self._timer = None
        now = self._clock.now()
        is_due = False
        while self._heap and self._heap[0][0] <= now:
            leased = heappop(self._heap)[2]
            if not leased.is_dropped:
                self._mark_due(leased)
                is_due = True
        self._arm_timer()
        if is_due:
            self._on_due()
