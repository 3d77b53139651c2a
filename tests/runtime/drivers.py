"""One interface for all ways to retry a call, so that one test can run through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import trio

import tarry
from tarry.testing import VirtualClock

Function = Callable[[], Any]
"""A plain function without arguments, or a coroutine function, as the driver needs it."""


# --- what is called -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """How a dependency handles one attempt."""

    gives: object = "done"
    raises: BaseException | type[BaseException] | None = None
    takes: float = 0.0
    """Seconds of virtual time."""

    def end(self) -> object:
        """Return the result or raise the error."""
        if self.raises is not None:
            raise self.raises
        return self.gives


OK = Step()
FAIL = Step(raises=ConnectionError)


class Dependency:
    """Handles each attempt by the next step (the last one repeats) and records its start."""

    def __init__(self, clock: VirtualClock, *steps: Step) -> None:
        self._clock = clock
        self._steps = steps
        self.starts: list[float] = []

    def hit(self) -> object:
        """Handle a call of plain code."""
        step = self._begin()
        if step.takes:
            self._clock.advance(step.takes)
        return step.end()

    async def ahit(self) -> object:
        """Handle a call of a coroutine."""
        step = self._begin()
        if step.takes:
            await pause(step.takes)
        return step.end()

    def _begin(self) -> Step:
        step = self._steps[min(len(self.starts), len(self._steps) - 1)]
        self.starts.append(seconds(self._clock))
        return step


class Answer(Exception):
    """An error that carries the outcome that the `on` of a test returns."""

    def __init__(self, outcome: tarry.Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def outcome_of(error: Exception) -> tarry.Outcome | bool:
    """The predicate that returns the outcome of an `Answer`."""
    return isinstance(error, Answer) and error.outcome


def answers(kind: tarry.Kind, **fields: Any) -> Step:
    """Return a step that fails with this outcome."""
    return Step(raises=Answer(tarry.Outcome(kind, **fields)))


async def pause(length: float) -> None:
    """Sleep on the running event loop."""
    await (trio.sleep if trio.lowlevel.in_trio_task() else asyncio.sleep)(length)


def seconds(clock: VirtualClock) -> float:
    """Return the virtual seconds since the start, rounded."""
    return round(clock.elapsed, 6)


# --- how it is called -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Driver:
    """One way to retry a function, on one kind of event loop."""

    form: str
    loop: str
    retrying: Callable[[Function, dict[str, Any]], Function]

    def __str__(self) -> str:
        return f"{self.loop}-{self.form}"

    @property
    def plain(self) -> bool:
        """Whether the driver runs plain functions."""
        return self.loop == "plain"

    def wrap(self, fn: Function, **options: Any) -> Function:
        """Return the function with retries."""
        return self.retrying(fn, {"on": ConnectionError, "name": "op"} | options)

    def start(self, clock: VirtualClock, fn: Function) -> Any:
        """Run a function on the driver's loop, in virtual time."""
        if self.loop == "asyncio":
            return clock.run(fn)
        if self.loop == "trio":
            return clock.run_trio(fn)
        return fn()

    def run(self, clock: VirtualClock, dependency: Dependency, **options: Any) -> Any:
        """Call the dependency once, with retries."""
        fn = dependency.hit if self.plain else dependency.ahit
        return self.start(clock, self.wrap(fn, **options))


def decorated(fn: Function, options: dict[str, Any]) -> Function:
    """`@tarry.retry` over `def` and `async def`."""
    return tarry.retry(**options)(fn)


def called(fn: Function, options: dict[str, Any]) -> Function:
    """`tarry.call`."""
    return lambda: tarry.call(fn, **options)


def block(fn: Function, options: dict[str, Any]) -> Function:
    """`for attempt in tarry.attempts(...)`."""

    def loop() -> object:
        for attempt in tarry.attempts(**options):
            with attempt:
                return fn()
        raise AssertionError

    return loop


def generator(fn: Function, options: dict[str, Any]) -> Function:
    """`@tarry.retry` over a generator."""

    @tarry.retry(**options)
    def stream() -> Iterator[object]:
        yield fn()

    def only() -> object:
        [item] = stream()
        return item

    return only


def awaited(fn: Function, options: dict[str, Any]) -> Function:
    """`await tarry.acall`."""

    async def call() -> object:
        return await tarry.acall(fn, **options)

    return call


def async_block(fn: Function, options: dict[str, Any]) -> Function:
    """`async for attempt in tarry.attempts(...)`."""

    async def loop() -> object:
        async for attempt in tarry.attempts(**options):
            with attempt:
                return await fn()
        raise AssertionError

    return loop


def async_generator(fn: Function, options: dict[str, Any]) -> Function:
    """`@tarry.retry` over an async generator."""

    @tarry.retry(**options)
    async def stream() -> AsyncIterator[object]:
        yield await fn()

    async def only() -> object:
        [item] = [item async for item in stream()]
        return item

    return only


PLAIN = [
    Driver("decorator", "plain", decorated),
    Driver("call", "plain", called),
    Driver("block", "plain", block),
    Driver("generator", "plain", generator),
]
ASYNC = [
    Driver(form, loop, retrying)
    for loop in ("asyncio", "trio")
    for form, retrying in (
        ("decorator", decorated),
        ("call", awaited),
        ("block", async_block),
        ("generator", async_generator),
    )
]
DRIVERS = [*PLAIN, *ASYNC]
FUNCTION_DRIVERS = [driver for driver in DRIVERS if driver.form in {"decorator", "call"}]
"""Those whose result `until` can look at."""
