"""The store's time, as estimated by this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_UNKNOWN_OFFSET = -1e15


class StoreClock:
    """Epoch milliseconds on the store's clock: the local monotonic clock plus an offset.

    The wall clock of this machine is not used: an operator may set it, which must not change how
    long a task waits.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._offset = _UNKNOWN_OFFSET
        """In milliseconds. At first far in the past: nothing is due before `synchronize`."""

    def now_ms(self) -> float:
        """Return the store's time in milliseconds, with its fraction.

        A caller that needs the time in milliseconds and in seconds calls this once and converts.
        """
        return self._monotonic() * 1000 + self._offset

    def now(self) -> int:
        """Return the store's time in milliseconds, rounded down so that no task is early."""
        return int(self.now_ms())

    def seconds(self) -> float:
        """Return the store's time in seconds, the unit of the core."""
        return self.now_ms() / 1000

    def local_ms(self) -> float:
        """Return the local monotonic time in milliseconds, to be passed to `synchronize`."""
        return self._monotonic() * 1000

    def synchronize(self, sent_at: float, store_now: int) -> None:
        """Update the offset from a reply of the store, which contains its time `store_now`.

        `sent_at` is the local time of the request. The store read its clock between then and now,
        which bounds the offset from below and above. The highest lower bound is kept, so that
        the estimate is never ahead of the store, and behind it by at most the time that the fastest
        reply took. An offset
        above the upper bound means that the store's clock was set back.
        """
        # The store rounds its time down, so that up to one millisecond more may have passed.
        lower, upper = store_now - self.local_ms(), store_now + 1 - sent_at
        self._offset = lower if self._offset > upper else max(self._offset, lower)
