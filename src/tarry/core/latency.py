"""How long a dependency takes: quantiles over its last calls, exact and bounded."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SAMPLES = 512
_FRESH = 32
"""So many new durations, at most, are not yet in the sorted copy."""


class Latency:
    """The durations of the last 512 calls."""

    __slots__ = ("_durations", "_new", "_sorted", "add")

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._new: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._sorted: list[float] = []
        self.add: Callable[[float], None] = self._new.append
        """Remember one duration. It is on the path of every call, so it is no more than that."""

    def __len__(self) -> int:
        """Return how many durations are remembered."""
        return min(MAX_SAMPLES, len(self._durations) + len(self._new))

    def quantile(self, q: float) -> float | None:
        """Return the duration that the share `q` of the last calls did not exceed."""
        new = self._new
        if new and (len(new) >= _FRESH or len(self._sorted) < MAX_SAMPLES):
            self._durations.extend(new)
            new.clear()
            self._sorted = sorted(self._durations)
        if not self._sorted:
            return None
        return self._sorted[min(int(q * len(self._sorted)), len(self._sorted) - 1)]
