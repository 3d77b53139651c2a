"""The clock, the random numbers and the sleep functions of the library.

All code takes them from `environment`, whose functions `tarry.testing` replaces in tests. A
`CancelToken` interrupts a blocking sleep. `async_sleep`, `timeout` and the detection of event loops
work with asyncio and trio, and import neither of them before a coroutine needs it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from tarry.core.checks import check_one_of
from tarry.errors import ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

T = TypeVar("T")


def after_fork(function: Callable[[], None]) -> None:
    """Call `function` in each forked child, for example to replace a lock held at the fork."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=function)


def around_fork(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call `before` and `after` in a process that forks, just before and after the fork."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=before, after_in_parent=after)


class PerProcess(Generic[T]):
    """A value that each forked child creates again, such as a lock that another thread may hold."""

    __slots__ = ("_create", "value")

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._create_value()
        after_fork(self._create_value)

    def _create_value(self) -> None:
        self.value: T = self._create()


# tarry does not use the global generator: if every worker of a program called random.seed(42), the
# delays of all workers would be equal. The generator is seeded again after a fork, because the
# child would otherwise draw the same numbers as its parent.
_random = random.Random()
after_fork(_random.seed)


# Of the clocks that run while the machine is suspended: Linux has the first, macOS the second.
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def read_boot_ms() -> int:
    """Return the milliseconds since the start of the machine, including suspended time."""
    if _BOOT_CLOCK is None:
        return time.monotonic_ns() // 1_000_000
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


system_now: Callable[[], float] = time.monotonic
system_sleep: Callable[[float], None] = time.sleep
"""The monotonic clock and a blocking sleep, for a wait for another process. Unlike the functions of
`environment`, `tarry.testing` does not replace them."""


Blocking: TypeAlias = Literal["allow", "raise"]
"""Whether the waits of a plain function may block a running event loop."""


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


def in_trio() -> bool:
    """Return whether the caller runs inside a trio task."""
    trio = sys.modules.get("trio")
    # Another library may have imported an old version of trio, which lacks this function.
    in_task = None if trio is None else getattr(trio.lowlevel, "in_trio_task", None)
    return in_task is not None and bool(in_task())


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop, which a blocking wait would freeze."""
    asyncio = sys.modules.get("asyncio")
    # The private function returns None outside a loop. The public one would raise, which is slow.
    if asyncio is not None and asyncio._get_running_loop() is not None:  # noqa: SLF001 - see above
        return True
    return "trio" in sys.modules and in_trio()


async def async_sleep(seconds: float) -> None:
    """Suspend the coroutine for some seconds, in asyncio or trio."""
    if in_trio():
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


@contextmanager
def timeout(seconds: float) -> Generator[None]:
    """Cancel the block after `seconds`; the program then continues after the block.

    asyncio's own timeout needs `async with`. This one needs only `with`, because users of
    `tarry.attempts` write `with attempt:` in both `for` and `async for` loops.
    """
    if in_trio():
        import trio

        with trio.CancelScope(deadline=trio.current_time() + seconds):
            yield
        return
    import asyncio

    timeout_context = asyncio.timeout(seconds)
    _run_without_waiting(timeout_context.__aenter__())
    try:
        yield
    except BaseException as error:
        try:
            exit_coroutine = timeout_context.__aexit__(type(error), error, error.__traceback__)
            _run_without_waiting(exit_coroutine)
        except TimeoutError:
            return
        raise
    _run_without_waiting(timeout_context.__aexit__(None, None, None))


def _run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that never suspends, such as `asyncio.timeout`'s enter and exit."""
    try:
        coroutine.send(None)
    except StopIteration:
        return


class Environment:
    """The clock, random source and sleep functions, and the attempt limit of the process.

    Unrelated to `os.environ`. Code on the hot path first assigns a function to a local variable
    (`clock = environment.now`) and then calls the variable. Calling `environment.now()` is three
    times slower: CPython 3.11 optimizes reading a slot, but not a method call on a slot.
    """

    __slots__ = (
        "allows_blocking", "async_sleep", "blocking_sleep", "draw_random", "is_active",
        "max_attempts", "now", "unix_time",
    )  # fmt: skip

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
        self.allows_blocking: bool = False
        """Whether waits may block a running event loop, see `configure`."""
        self.max_attempts: int | None = None
        """An upper limit for the `max_attempts` of every policy; None: no limit."""
        self.is_active: bool = True
        """The last argument of `set_active`, for the reason of calls that are not retried."""


environment: Environment = Environment()


def check_blocking(blocking: object) -> bool:
    """Return whether `blocking` allows waits that block an event loop; reject an unknown value."""
    check_one_of("blocking", blocking, ("allow", "raise"))
    return blocking == "allow"


def configure(*, blocking: Blocking) -> None:
    """Set what happens in the whole process before a wait that would block a running event loop.

    The attempts of a plain function are always made. By default ("raise"), the error of an attempt
    is raised instead of a wait, with a note. With "allow", the wait blocks the loop, as in a
    notebook, where nothing else runs. The argument `blocking` of a call takes precedence.
    """
    environment.allows_blocking = check_blocking(blocking)


def set_active(active: bool, /) -> None:  # noqa: FBT001 - as in stamina
    """Turn the retries of the whole process off or on, for example off in a test suite.

    While retries are off, each call makes one attempt and raises its error. Breakers, limits,
    timeouts and deadlines still apply, and `tarry.hedge` still sends copies.
    """
    if not isinstance(active, bool):  # "no" is true
        raise ConfigurationTypeError("active", "must be True or False", active)
    environment.is_active = active
    environment.max_attempts = None if active else 1
