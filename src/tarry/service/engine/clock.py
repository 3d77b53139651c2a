"""The store's time, as this process knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_UNKNOWN = -1e15


class StoreClock:
    """Epoch milliseconds on the store's clock: a monotonic one, and how far it is behind.

    The machine's own date is not asked: somebody may set it, and a wait goes on as it was meant.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._offset = _UNKNOWN
        """Milliseconds; nothing is due before the store has told its time."""

    def exact(self) -> float:
        """Return the store's time with its fraction, for who needs both of the others at once."""
        return self._monotonic() * 1000 + self._offset

    def now(self) -> int:
        """Return the store's time, rounded down: what is due by it is due."""
        return int(self.exact())

    def seconds(self) -> float:
        """Return the store's time in seconds, for the core."""
        return self.exact() / 1000

    def asks(self) -> float:
        """Return our own time, when the store is asked for its."""
        return self._monotonic() * 1000

    def learn(self, asked: float, now: int) -> None:
        """Take over what the store says, which was asked for at `asked` of our own time.

        It said it between then and now, so the truth lies between two bounds. We keep the highest
        lower bound that was seen: never ahead of the store, and behind it by no more than its
        quickest answer took. A store whose clock was set back shows in the upper bound.
        """
        least, most = now - self.asks(), now + 1 - asked  # its time was rounded down
        self._offset = least if self._offset > most else max(self._offset, least)
