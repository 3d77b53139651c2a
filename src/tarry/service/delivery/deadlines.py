"""When requests have to end: one timer for all of them, because most end before."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Deadline: TypeAlias = list[Any]
"""A time, a number that no other has, and who is told at `WHO`; None: nobody is any more. A list
compares itself by its first items, which a heap does all the time."""
WHO = 2
_FEW = 512


class Late(Protocol):
    """What has to end in time."""

    def late(self) -> None:
        """Learn that the time is over."""
        ...


class Deadlines:
    """Tells requests when their time is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[Deadline] = []
        self._order = count()
        self._most = _FEW
        """How many there may be before those are removed that nobody is told of any more."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        """Return how many there are, with some of which nobody is told any more."""
        return len(self._heap)

    def add(self, at: float, who: Late) -> Deadline:
        """Set a deadline."""
        heap, deadline = self._heap, [at, next(self._order), who]
        if len(heap) >= self._most:
            heap[:] = [each for each in heap if each[WHO] is not None]
            heapify(heap)
            self._most = max(_FEW, 2 * len(heap))
        heappush(heap, deadline)
        if self._timer is None or at < self._timer_at:
            self._arm(at)
        return deadline

    def close(self) -> None:
        """Tell nobody any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        delay = max(0.0, at - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_time)

    def _on_time(self) -> None:
        # A timer may fire early: the clock decides, and the timer is set anew.
        self._timer = None
        heap, now = self._heap, self._clock()
        while heap and (heap[0][0] <= now or heap[0][WHO] is None):
            who = heappop(heap)[WHO]
            if who is not None:
                asyncio.get_running_loop().call_soon(who.late)
        if heap:
            self._arm(heap[0][0])
