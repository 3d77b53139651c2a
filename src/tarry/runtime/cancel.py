"""A token that ends the waits of plain functions, such as at shutdown."""

from __future__ import annotations

import threading


class CancelToken:
    """Ends every wait that it was given to: `retry(on=OSError, cancel=token)`, `token.cancel()`.

    Coroutines need none: cancel their task.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """End all waits, now and from now on."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait that long or until cancelled; say whether it was cancelled."""
        return self._event.wait(seconds)
