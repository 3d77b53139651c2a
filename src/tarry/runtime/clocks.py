"""The one place that reads a clock, rolls dice or sleeps.

Everything else asks `world`, whose parts `tarry.testing` replaces.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING

from tarry.runtime import event_loops

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


_dice = random.Random()
# Our own dice: a program that calls random.seed(42) in every worker must not bring their retries
# together. A forked child would otherwise go on with its parent's numbers.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_dice.seed)


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


def _sleep(seconds: float, cancel: CancelToken | None) -> None:
    seconds = min(seconds, threading.TIMEOUT_MAX)  # some hundred years
    if cancel is None:
        time.sleep(seconds)
    else:
        cancel.wait(seconds)


class System:
    """Time and chance as the drivers see them.

    Code that runs on every call takes a part first and calls it then (`clock = world.now`):
    Python finds a function in a slot three times faster that way.
    """

    __slots__ = ("async_sleep", "draw", "max_attempts", "now", "sleep", "unix_time")

    now: Callable[[], float]
    """Seconds on a monotonic base."""
    unix_time: Callable[[], float]
    """Seconds since 1970, for dates that come from outside."""
    draw: Callable[[], float]
    """One number from [0, 1)."""
    sleep: Callable[[float, CancelToken | None], None]
    async_sleep: Callable[[float], Awaitable[None]]
    max_attempts: int | None
    """A cap on every policy, for tests."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self.unix_time = time.time
        self.draw = _dice.random
        self.sleep = _sleep
        self.async_sleep = event_loops.sleep
        self.max_attempts = None


system: System = System()
