"""The only module that reads a clock, draws random numbers or sleeps.

All other modules call the functions of `system`, which `tarry.testing` can replace. A `CancelToken`
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


# tarry does not use the global generator: if every worker of a program called random.seed(42), the
# delays of all workers would be equal. The generator is seeded again after a fork, because the
# child would otherwise draw the same numbers as its parent.
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
        """End all waits that use this token: current waits now, later waits when they start."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until cancelled; return whether the token is cancelled."""
        return self._event.wait(seconds)


def _sleep(seconds: float, cancel_token: CancelToken | None) -> None:
    seconds = min(seconds, threading.TIMEOUT_MAX)  # 292 years on 64-bit systems
    if cancel_token is None:
        time.sleep(seconds)
    else:
        cancel_token.wait(seconds)


class System:
    """The clock, random source and sleep functions of the process.

    Code on the hot path first assigns the function to a local variable (`clock = system.now`) and
    then calls that variable. `system.now()` is compiled to a method call, whose lookup is three
    times slower if the function is in a slot.
    """

    __slots__ = ("async_sleep", "draw", "max_attempts", "now", "sleep", "unix_time")

    now: Callable[[], float]
    """Returns the time of a monotonic clock in seconds."""
    unix_time: Callable[[], float]
    """Returns the seconds since 1970, which are compared with dates that servers send."""
    draw: Callable[[], float]
    """Returns a random number in [0, 1)."""
    sleep: Callable[[float, CancelToken | None], None]
    """Blocks for some seconds, or until the token is cancelled."""
    async_sleep: Callable[[float], Awaitable[None]]
    max_attempts: int | None
    """An upper limit for the `max_attempts` of every policy, set by tests; None for no limit."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self.unix_time = time.time
        self.draw = _random.random
        self.sleep = _sleep
        self.async_sleep = event_loops.sleep
        self.max_attempts = None


system: System = System()
