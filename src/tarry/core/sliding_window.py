"""Event counts over a sliding time window: constant memory, and constant time for each event."""

from __future__ import annotations

from math import inf

_BUCKET_COUNT = 10
_MIN_BUCKET_WIDTH_S = 1e-9


class SlidingWindow:
    """Counts over the last `span` seconds, with a resolution of a tenth of the span.

    The span is divided into ten buckets. Each has one counter for each kind of event (a column). To
    count an event: `if now >= window.bucket_end: window.advance(now)`, then add 1 to
    `window.current[column]`. Callers write these two lines inline, because they run on every call.
    """

    __slots__ = ("_buckets", "_newest_number", "_width", "bucket_end", "current", "past")

    def __init__(self, span: float, column_count: int) -> None:
        self._width = max(span / _BUCKET_COUNT, _MIN_BUCKET_WIDTH_S)
        self._buckets: list[list[int] | None] = [None] * _BUCKET_COUNT
        """A bucket is None until it is used: a service has thousands of windows with few events."""
        self.past: list[int] = [0] * column_count
        """The counts of the nine older buckets, summed for each column."""
        self._newest_number: int | None = None  # bucket n starts at the time n * _width
        self.current: list[int] = [0] * column_count
        """The counts of the newest bucket."""
        self._buckets[0] = self.current
        self.bucket_end: float = -inf
        """The time at which the newest bucket ends."""

    def total(self, column: int) -> int:
        """Return the count of a column over the whole window."""
        return self.past[column] + self.current[column]

    def advance(self, now: float) -> None:
        """Make the bucket of `now` the newest bucket, and clear buckets that left the window."""
        number = int(now // self._width)
        step = _BUCKET_COUNT if self._newest_number is None else number - self._newest_number
        if step <= 0:  # another thread has advanced the window since `now` was read
            return
        past = self.past
        for column, count in enumerate(self.current):
            past[column] += count
        for age in range(min(step, _BUCKET_COUNT)):
            bucket = self._buckets[(number - age) % _BUCKET_COUNT]
            if bucket is not None:
                for column, count in enumerate(bucket):
                    past[column] -= count
                    bucket[column] = 0
        self._newest_number = number
        current = self._buckets[number % _BUCKET_COUNT]
        if current is None:
            current = self._buckets[number % _BUCKET_COUNT] = [0] * len(past)
        self.current = current
        self.bucket_end = (number + 1) * self._width

    def undo(self, column: int) -> None:
        """Remove one event of `column` from the oldest bucket that has one.

        The bucket that counted the event is not known. If it was a newer one, the counts are too
        high for a while. If the event has already left the window, the counts are too low by one.
        """
        if self._newest_number is not None:
            for age in range(_BUCKET_COUNT - 1, -1, -1):
                bucket = self._buckets[(self._newest_number - age) % _BUCKET_COUNT]
                if bucket is not None and bucket[column]:
                    bucket[column] -= 1
                    self.past[column] -= age > 0  # `past` excludes the newest bucket (age 0)
                    return

    def clear(self) -> None:
        """Reset all counts to zero."""
        for counts in (self.past, *self._buckets):
            if counts is not None:
                counts[:] = [0] * len(counts)
