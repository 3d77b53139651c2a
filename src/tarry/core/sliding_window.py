"""Counts over a sliding span of time, in a ring of buckets: constant cost, constant memory."""

from __future__ import annotations

from math import inf

_BUCKETS = 10
_LEAST_WIDTH = 1e-9


class SlidingWindow:
    """Some counts over the last `span` seconds, exact to a tenth of the span.

    To count: `if now >= window.ends: window.roll(now)`, then add to `window.current[column]`.
    That is spelled out where it is used, because it runs on every call.
    """

    __slots__ = ("_buckets", "_slot", "_width", "bucket_end", "current", "past")

    def __init__(self, span: float, columns: int) -> None:
        self._width = max(span / _BUCKETS, _LEAST_WIDTH)
        self._buckets = [[0] * columns for _ in range(_BUCKETS)]
        self.past: list[int] = [0] * columns
        """The counts of the other tenths."""
        self._slot: int | None = None
        self.current: list[int] = self._buckets[0]
        """The counts of the present tenth."""
        self.bucket_end: float = -inf
        """When the present tenth is over."""

    def total(self, column: int) -> int:
        """Return the count over the span."""
        return self.past[column] + self.current[column]

    def advance(self, now: float) -> None:
        """Go on to the tenth that `now` lies in and forget what is older than the span."""
        slot = int(now // self._width)
        passed = _BUCKETS if self._slot is None else slot - self._slot
        if passed <= 0:  # a thread that read its clock a little earlier
            return
        past = self.past
        for column, value in enumerate(self.current):
            past[column] += value
        for age in range(min(passed, _BUCKETS)):
            bucket = self._buckets[(slot - age) % _BUCKETS]
            for column, value in enumerate(bucket):
                past[column] -= value
                bucket[column] = 0
        self._slot = slot
        self.current = self._buckets[slot % _BUCKETS]
        self.bucket_end = (slot + 1) * self._width

    def undo(self, column: int) -> None:
        """Undo one count, the oldest: no bucket may fall below zero, or it would count later."""
        if self._slot is not None:
            for age in range(_BUCKETS - 1, -1, -1):
                bucket = self._buckets[(self._slot - age) % _BUCKETS]
                if bucket[column]:
                    bucket[column] -= 1
                    self.past[column] -= age > 0
                    return

    def clear(self) -> None:
        """Forget everything."""
        for counts in (self.past, *self._buckets):
            counts[:] = [0] * len(counts)
