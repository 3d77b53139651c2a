"""Quantiles of the latency of a dependency, over a bounded number of recent calls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SAMPLES = 512
_MAX_UNSORTED = 32
"""Once there are `MAX_SAMPLES` durations, they are sorted again after this many new ones."""


class Latency:
    """The durations of the last 512 calls.

    Durations are sorted when a quantile is read, not when a duration is added, because every call
    adds a duration and few calls read a quantile.
    """

    __slots__ = ("_durations", "_new", "_sorted", "add")

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._new: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._sorted: list[float] = []
        self.add: Callable[[float], None] = self._new.append
        """Add one duration. This is the `append` of a deque itself, because every call uses it."""

    def __len__(self) -> int:
        """Return the number of durations."""
        return min(MAX_SAMPLES, len(self._durations) + len(self._new))

    def quantile(self, q: float) -> float | None:
        """Return the quantile `q` (0 to 1) of the durations, or None when there are none."""
        new = self._new
        if new and (len(new) >= _MAX_UNSORTED or len(self._sorted) < MAX_SAMPLES):
            self._durations.extend(new)
            new.clear()
            self._sorted = sorted(self._durations)
        if not self._sorted:
            return None
        return self._sorted[min(int(q * len(self._sorted)), len(self._sorted) - 1)]
