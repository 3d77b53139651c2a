"""Counts of events over a sliding time window: constant time and memory for each event."""

from __future__ import annotations

from math import inf

_BUCKETS = 10
_MIN_BUCKET_WIDTH_S = 1e-9


class SlidingWindow:
    """Counts over the last `span` seconds, with a resolution of a tenth of the span.

    The span is divided into ten buckets, each with one counter per column. To count an event:
    `if now >= window.bucket_end: window.advance(now)`, then add to `window.current[column]`.
    Callers write these two lines inline because they run on every call.
    """

    __slots__ = ("_buckets", "_slot", "_width", "bucket_end", "current", "past")

    def __init__(self, span: float, columns: int) -> None:
        self._width = max(span / _BUCKETS, _MIN_BUCKET_WIDTH_S)
        self._buckets = [[0] * columns for _ in range(_BUCKETS)]
        self.past: list[int] = [0] * columns
        """The counts of the nine older buckets, one sum per column."""
        self._slot: int | None = None  # number of the newest bucket, counted from time 0
        self.current: list[int] = self._buckets[0]
        """The counts of the newest bucket."""
        self.bucket_end: float = -inf
        """The time at which the newest bucket ends."""

    def total(self, column: int) -> int:
        """Return the count of a column over the whole window."""
        return self.past[column] + self.current[column]

    def advance(self, now: float) -> None:
        """Make the bucket of `now` the newest bucket, and clear buckets that left the window."""
        slot = int(now // self._width)
        passed = _BUCKETS if self._slot is None else slot - self._slot
        if passed <= 0:  # another thread has read its clock later and has already advanced
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
        """Remove one event from the oldest bucket that has an event.

        A bucket must not fall below zero: its negative count would distort later totals.
        """
        if self._slot is not None:
            for age in range(_BUCKETS - 1, -1, -1):
                bucket = self._buckets[(self._slot - age) % _BUCKETS]
                if bucket[column]:
                    bucket[column] -= 1
                    self.past[column] -= age > 0
                    return

    def clear(self) -> None:
        """Reset all counts to zero."""
        for counts in (self.past, *self._buckets):
            counts[:] = [0] * len(counts)
