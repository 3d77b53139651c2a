"""Names and the time at which each wants attention; the earliest is found without a search."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

STALE = 64
"""Notes that may lie about in a heap beyond twice what is valid before it is made anew."""


class Alarms:
    """One time for each name. The heap also holds notes that are no longer valid."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def set(self, name: str, time: int | None) -> None:
        """Wake a name at this time and no other; None: never."""
        if time == self._times.get(name):
            return
        if time is None:
            del self._times[name]
            return
        self._times[name] = time
        heappush(self._heap, (time, name))
        if len(self._heap) > 2 * len(self._times) + STALE:
            self._heap = [(time, name) for name, time in self._times.items()]
            heapify(self._heap)

    def due(self, until: int) -> Iterator[str]:
        """Take out the names whose time has come by then, earliest first."""
        while self._heap and self._heap[0][0] <= until:
            time, name = heappop(self._heap)
            if self._times.get(name) == time:
                del self._times[name]
                yield name

    def first(self, skip: Collection[str]) -> int | None:
        """Return the earliest time, that of names in `skip` aside."""
        aside: list[tuple[int, str]] = []
        while self._heap:
            time, name = self._heap[0]
            if self._times.get(name) != time:
                heappop(self._heap)
            elif name in skip:
                aside.append(heappop(self._heap))
            else:
                break
        found = self._heap[0][0] if self._heap else None
        for note in aside:
            heappush(self._heap, note)
        return found
