"""The tasks that this process has leases for: each waits here for its time, then for its turn."""

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

_LONGEST = 1_000
"""Milliseconds until the clock is looked at again: the store's may have been set meanwhile."""


class LeasedTasks:
    """Leased tasks: a heap by time, a queue for each lane, and the lanes in turn.

    `ready` is called when something is due.
    """

    def __init__(
        self, lanes: Lanes, clock: StoreClock, *, most: int, ready: Callable[[], None]
    ) -> None:
        self._lanes = lanes
        self._clock = clock
        self._most = most
        self._ready = ready
        self._tasks: dict[str, LeasedTask] = {}
        self._heap: list[tuple[int, int, LeasedTask]] = []
        self._order = count()
        self.turn: deque[LaneState] = deque()
        """The lanes in which something is due, in their order; to look at."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def __len__(self) -> int:
        """Return how many tasks are held."""
        return len(self._tasks)

    @property
    def room(self) -> int:
        """How many more there is room for."""
        return self._most - len(self._tasks)

    def __iter__(self) -> Iterator[LeasedTask]:
        """Go over all tasks, in no order."""
        return iter(tuple(self._tasks.values()))

    def find(self, task_id: str) -> LeasedTask | None:
        """Return a task that is held."""
        return self._tasks.get(task_id)

    def take(
        self, tasks: Sequence[Task], contents: Sequence[TaskContent | None] | None = None
    ) -> None:
        """Hold tasks from now on. One that was here before has lost its lease: it is replaced."""
        now, lanes = self._clock.now(), self._lanes
        is_due = False
        for task, content in zip(tasks, contents or [None] * len(tasks), strict=True):
            before = self._tasks.get(task.id)
            if before is not None:
                before.gone = True
                lanes.dropped(before.lane)
            lane = lanes[task.lane]
            held = self._tasks[task.id] = LeasedTask(task, lane, content)
            lanes.took(lane)
            is_due = self._place(held, now) or is_due
        if is_due:
            self._ready()

    def wait(self, held: LeasedTask) -> None:
        """Let a held task wait for its time."""
        held.started = False
        if not held.queued and self._place(held, self._clock.now()):
            self._ready()

    def drop(self, held: LeasedTask) -> None:
        """Hold a task no longer."""
        held.gone = True
        if self._tasks.get(held.task.id) is held:
            del self._tasks[held.task.id]
            self._lanes.dropped(held.lane)

    def next_due(self) -> LeasedTask | None:
        """Take the next task of the lane whose turn it is, if it is due and in nobody's hand.

        Whoever serves it puts its lane back with `queue`. A full one is left out: an attempt that
        ends makes room.
        """
        turn = self.turn
        while turn:
            lane = turn.popleft()
            lane.in_turn = False
            if lane.limit is not None and lane.is_full:
                continue
            while (held := lane.next_due()) is not None:
                held.queued = False
                if not held.gone and not held.started:
                    return held
        return None

    def put_back(self, held: LeasedTask) -> None:
        """Let a task that was due be the next of its lane again."""
        held.queued = True
        held.lane.queue_of(held.task).appendleft(held)

    def queue(self, lane: LaneState) -> None:
        """Put a lane at the end of the line, if anything is due in it."""
        if (lane.due or lane.again) and not lane.in_turn:
            lane.in_turn = True
            self.turn.append(lane)

    def stop(self) -> None:
        """Let no more time pass."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _place(self, held: LeasedTask, now: int) -> bool:
        """Let a task wait for its time, or for its turn; whether it is that."""
        held.queued = True
        due_at = held.task.next_attempt_at
        if due_at <= now:
            self._due(held)
            return True
        heappush(self._heap, (due_at, next(self._order), held))
        self._arm()
        return False

    def _due(self, held: LeasedTask) -> None:
        lane = held.lane
        lane.queue_of(held.task).append(held)
        if not lane.in_turn:
            lane.in_turn = True
            self.turn.append(lane)

    def _arm(self) -> None:
        while self._heap and self._heap[0][2].gone:
            heappop(self._heap)
        if not self._heap:
            return
        at = self._heap[0][0]
        if self._timer is not None:
            if at >= self._timer_at:
                return
            self._timer.cancel()
        delay = min(max(0, at - self._clock.now()), _LONGEST) / 1000
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_time)

    def _on_time(self) -> None:
        # Timers may fire early (uvloop's by 1.4 ms): the clock decides, and the timer is set anew.
        self._timer = None
        now = self._clock.now()
        found = False
        while self._heap and self._heap[0][0] <= now:
            held = heappop(self._heap)[2]
            if not held.gone:  # one that is not here any more waits for nothing
                self._due(held)
                found = True
        self._arm()
        if found:
            self._ready()
