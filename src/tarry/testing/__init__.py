"""Context managers for tests: skip waits, limit attempts, replace time and randomness, get events.

Each of them affects all calls of the process.
"""

from __future__ import annotations

import selectors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from tarry.core.checks import check_count, check_number
from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects
from tarry.runtime.events import bus
from tarry.runtime.process_settings import process_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable
    from types import TracebackType
    from typing import Self

    from trio.testing import MockClock

    from tarry.core.events import Event
    from tarry.runtime.effects import CancelToken

__all__ = ["VirtualClock", "capped_attempts", "captured_events", "no_wait", "scripted_random"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@contextmanager
def no_wait() -> Generator[None]:
    """Make every wait return at once. Decisions, and the delays in events, do not change."""
    previous = effects.blocking_sleep, effects.async_sleep
    effects.blocking_sleep, effects.async_sleep = _no_sleep, _no_async_sleep
    try:
        yield
    finally:
        effects.blocking_sleep, effects.async_sleep = previous


@contextmanager
def capped_attempts(max_attempts: int) -> Generator[None]:
    """Limit every call to `max_attempts` attempts."""
    previous = process_settings.max_attempts
    process_settings.max_attempts = check_count("max_attempts", max_attempts)
    try:
        yield
    finally:
        process_settings.max_attempts = previous


@contextmanager
def scripted_random(numbers: Iterable[float]) -> Generator[None]:
    """Use these numbers in order instead of random numbers; the last one is repeated for ever."""
    script = [float(number) for number in numbers]
    if not script or not all(0 <= number < 1 for number in script):
        raise ConfigurationError("numbers", "must be at least one number from [0, 1)", script)
    script.reverse()

    def draw() -> float:
        return script.pop() if len(script) > 1 else script[0]

    previous = effects.draw_random
    effects.draw_random = draw
    try:
        yield
    finally:
        effects.draw_random = previous


@contextmanager
def captured_events() -> Generator[list[Event]]:
    """Collect every event into a list."""
    events: list[Event] = []
    remove = bus.listen(events.append)
    try:
        yield events
    finally:
        remove()


def _no_sleep(seconds: float, cancel: CancelToken | None) -> None:
    """Return at once."""


async def _no_async_sleep(seconds: float) -> None:
    """Return at once."""


class VirtualClock:
    """A clock that advances only when code waits: `with VirtualClock() as clock:`.

    A wait in synchronous code advances the clock and returns at once. For coroutines,
    `clock.run(main)` and `clock.run_trio(main)` run an event loop that uses the clock: when every
    task waits, the clock jumps to the time at which the first task continues. `start` is the
    initial time, by default the current time.
    """

    def __init__(self, start: float | None = None) -> None:
        self._now = effects.now() if start is None else check_number("start", start)
        self._started = self._now
        self._previous: tuple[Any, ...] = ()
        self._trio: MockClock | None = None
        """The clock of trio inside `run_trio`. Its time 0 is `_now`, which does not change then."""

    @property
    def elapsed(self) -> float:
        """Seconds of virtual time since the clock was created."""
        return self.now() - self._started

    def now(self) -> float:
        """Return the virtual time."""
        return self._now if self._trio is None else self._now + self._trio.current_time()

    def advance(self, seconds: float) -> None:
        """Advance the virtual time by `seconds`."""
        if seconds < 0:
            raise ConfigurationError("seconds", "must be at least 0", seconds)
        if self._trio is None:
            self._now += seconds
        else:
            self._trio.jump(seconds)

    def __enter__(self) -> Self:
        self._previous = effects.now, effects.blocking_sleep
        effects.now, effects.blocking_sleep = self.now, self._sleep
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        effects.now, effects.blocking_sleep = self._previous

    def run(self, main: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run a coroutine function with these arguments on asyncio in virtual time."""
        import asyncio

        async def run_main() -> T:
            return await main(*args)

        with asyncio.Runner(loop_factory=lambda: _create_virtual_loop(self)) as runner:
            return runner.run(run_main())

    def run_trio(self, main: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run a coroutine function with these arguments on trio in virtual time."""
        with require_extra("run_trio needs trio", "trio"):
            import trio
            import trio.testing
        self._trio = clock = trio.testing.MockClock(autojump_threshold=0)
        try:
            return trio.run(main, *args, clock=clock)
        finally:
            self._now, self._trio = self.now(), None

    def _sleep(self, seconds: float, cancel: CancelToken | None) -> None:
        if cancel is None or not cancel.cancelled:
            self.advance(seconds)


def _create_virtual_loop(clock: VirtualClock) -> Any:
    import asyncio

    class Selector(selectors.DefaultSelector):
        """Advances the virtual time to the next timer instead of waiting for it."""

        def select(self, timeout: float | None = None) -> Any:
            ready = super().select(0)
            if ready or timeout == 0:
                return ready
            if timeout is None:  # no timer is set: only another thread can wake the loop
                return super().select(None)
            clock.advance(timeout)
            return ready

    class Loop(asyncio.SelectorEventLoop):
        def __init__(self, selector: selectors.BaseSelector) -> None:
            super().__init__(selector)
            # The default is a nanosecond. After half a year of virtual time, a float cannot
            # represent such a small difference.
            self._clock_resolution = 1e-6

        def time(self) -> float:
            return clock.now()

        async def shutdown_default_executor(
            self,
            timeout: float | None = None,  # noqa: ARG002 - would expire at once in virtual time
        ) -> None:
            await super().shutdown_default_executor()

    return Loop(Selector())
