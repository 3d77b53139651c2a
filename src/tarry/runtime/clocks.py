"""The only module that reads a clock, draws random numbers or sleeps.

Everything else calls `system`, whose functions `tarry.testing` replaces. A `CancelToken`
interrupts a sleep.
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


# A generator of its own, because a program that calls random.seed(42) in every worker would
# synchronise the retries of its workers. It is seeded again after a fork, because the child would
# otherwise draw the same numbers as its parent.
_random = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


class CancelToken:
    """Interrupts the waits of plain functions, for example at shutdown.

    Pass it to `retry(on=OSError, cancel=token)` and call `token.cancel()`. Coroutines need no
    token: cancel their task.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """End all waits that use this token, the current and all later ones."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until cancelled; return whether the token is cancelled."""
        return self._event.wait(seconds)


def _sleep(seconds: float, cancel: CancelToken | None) -> None:
    seconds = min(seconds, threading.TIMEOUT_MAX)  # 292 years on 64-bit systems
    if cancel is None:
        time.sleep(seconds)
    else:
        cancel.wait(seconds)


class System:
    """The clock, random source and sleep functions of the process.

    Code on the path of every call reads the function into a local variable first and calls that
    (`clock = system.now`): `system.now()` would look up a method, which is three times slower for
    a function in a slot.
    """

    __slots__ = ("async_sleep", "draw", "max_attempts", "now", "sleep", "unix_time")

    now: Callable[[], float]
    """Seconds of a monotonic clock."""
    unix_time: Callable[[], float]
    """Seconds since 1970, to compare with dates from servers."""
    draw: Callable[[], float]
    """A random number from [0, 1)."""
    sleep: Callable[[float, CancelToken | None], None]
    async_sleep: Callable[[float], Awaitable[None]]
    max_attempts: int | None
    """Caps the attempts of every policy, for tests."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self.unix_time = time.time
        self.draw = _random.random
        self.sleep = _sleep
        self.async_sleep = event_loops.sleep
        self.max_attempts = None


system: System = System()
