"""The replaceable side effects of tarry: its clocks, its random numbers and its sleep functions.

All code takes them from `effects`, whose functions `tarry.testing` replaces in tests. A
`CancelToken` interrupts a blocking sleep.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

from tarry.runtime.event_loops import async_sleep
from tarry.runtime.forks import after_fork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# tarry does not use the global generator: if every worker of a program called random.seed(42), the
# delays of all workers would be equal. The generator is seeded again after a fork, because the
# child would otherwise draw the same numbers as its parent.
_random = random.Random()
after_fork(_random.seed)

# Of the clocks that run while the machine is suspended: Linux has the first, macOS the second.
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class CancelToken:
    """Interrupts the waits of functions that are not coroutines, for example at shutdown.

    Pass it to `retry(on=OSError, cancel=token)` and call `token.cancel()`. Coroutines need no
    token: cancel their asyncio task or trio scope.
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


def _blocking_sleep(seconds: float, cancel_token: CancelToken | None) -> None:
    seconds = min(seconds, threading.TIMEOUT_MAX)  # 292 years on 64-bit systems
    if cancel_token is None:
        time.sleep(seconds)
    else:
        cancel_token.wait(seconds)


class Effects:
    """The functions that read the clock, draw random numbers and sleep.

    Code on the hot path first assigns a function to a local variable (`clock = effects.now`) and
    then calls the variable. Calling `effects.now()` is three times slower: CPython 3.11 optimizes
    reading a slot, but not a method call on a slot.
    """

    __slots__ = ("async_sleep", "blocking_sleep", "draw_random", "now", "unix_time")

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        """Returns the seconds of the monotonic clock, which measures durations and deadlines."""
        self.unix_time: Callable[[], float] = time.time
        """Returns the seconds since 1970, for example to compare them with a server's date."""
        self.draw_random: Callable[[], float] = _random.random
        """Returns a random number in [0, 1)."""
        self.blocking_sleep: Callable[[float, CancelToken | None], None] = _blocking_sleep
        """Blocks for some seconds, or until the token is cancelled."""
        self.async_sleep: Callable[[float], Awaitable[None]] = async_sleep
        """Suspends a coroutine for some seconds, in asyncio or trio."""


effects: Effects = Effects()


system_now: Callable[[], float] = time.monotonic
system_sleep: Callable[[float], None] = time.sleep
"""The monotonic clock and a blocking sleep, for a wait for another process. Unlike the functions of
`effects`, `tarry.testing` does not replace them."""


def read_boot_ms() -> int:
    """Return the milliseconds since the start of the machine, including suspended time."""
    if _BOOT_CLOCK is None:
        return time.monotonic_ns() // 1_000_000
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000
