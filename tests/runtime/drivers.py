"""Drivers: one test can run with every way to make a call with retries.

A driver makes the call with a decorator, `tarry.call`, a `with attempt:` block or a generator,
without an event loop or on asyncio or trio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import trio

import tarry
from tarry.testing import VirtualClock

Function = Callable[[], Any]
"""A plain or coroutine function without arguments, depending on the driver."""


# --- dependencies ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The behaviour of a dependency in one attempt."""

    returns: object = "done"
    raises: BaseException | type[BaseException] | None = None
    duration_s: float = 0.0
    """Duration in virtual time."""

    def finish(self) -> object:
        """Return the result or raise the error."""
        if self.raises is not None:
            raise self.raises
        return self.returns


OK = Step()
FAIL = Step(raises=ConnectionError)


class Dependency:
    """Performs the next step in each attempt and records when the attempt starts.

    The last step is repeated.
    """

    def __init__(self, clock: VirtualClock, *steps: Step) -> None:
        self._clock = clock
        self._steps = steps
        self.starts: list[float] = []

    def call(self) -> object:
        """Perform the next step."""
        step = self._next_step()
        if step.duration_s:
            self._clock.advance(step.duration_s)
        return step.finish()

    async def acall(self) -> object:
        """Perform the next step as a coroutine."""
        step = self._next_step()
        if step.duration_s:
            await async_sleep(step.duration_s)
        return step.finish()

    def _next_step(self) -> Step:
        step = self._steps[min(len(self.starts), len(self._steps) - 1)]
        self.starts.append(elapsed_s(self._clock))
        return step


class ClassifiedError(Exception):
    """An error with the outcome that `classify` returns for it."""

    def __init__(self, outcome: tarry.Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def classify(error: Exception) -> tarry.Outcome | bool:
    """Return the outcome of a `ClassifiedError`, and False for other errors."""
    return isinstance(error, ClassifiedError) and error.outcome


def failing_step(kind: tarry.Kind, **fields: Any) -> Step:
    """Return a step that raises an error with this outcome."""
    return Step(raises=ClassifiedError(tarry.Outcome(kind, **fields)))


async def async_sleep(seconds: float) -> None:
    """Sleep on the running event loop."""
    await (trio.sleep if trio.lowlevel.in_trio_task() else asyncio.sleep)(seconds)


def elapsed_s(clock: VirtualClock) -> float:
    """Return the elapsed virtual time in seconds, rounded to microseconds."""
    return round(clock.elapsed, 6)


# --- drivers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Driver:
    """One way to make a call with retries (`form`), on one kind of event loop or on none."""

    form: str
    """One of "decorator", "call", "block" and "generator"."""
    loop: str
    """One of "sync" (no event loop), "asyncio" and "trio"."""
    add_retries: Callable[[Function, dict[str, Any]], Function]

    def __str__(self) -> str:
        return f"{self.loop}-{self.form}"

    @property
    def is_sync(self) -> bool:
        """Whether the driver runs plain functions."""
        return self.loop == "sync"

    def wrap(self, fn: Function, **options: Any) -> Function:
        """Return the function with retries."""
        return self.add_retries(fn, {"on": ConnectionError, "name": "op"} | options)

    def run_function(self, clock: VirtualClock, fn: Function) -> Any:
        """Run a function on the driver's event loop, if it has one, in virtual time."""
        if self.loop == "asyncio":
            return clock.run(fn)
        if self.loop == "trio":
            return clock.run_trio(fn)
        return fn()

    def run(self, clock: VirtualClock, dependency: Dependency, **options: Any) -> Any:
        """Make one call of the dependency, with retries."""
        fn = dependency.call if self.is_sync else dependency.acall
        return self.run_function(clock, self.wrap(fn, **options))


def retry_with_decorator(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `@tarry.retry` over `def` or `async def`."""
    return tarry.retry(**options)(fn)


def retry_with_call(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `tarry.call`."""
    return lambda: tarry.call(fn, **options)


def retry_with_block(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `for attempt in tarry.attempts(...)`."""

    def loop() -> object:
        result: object = None
        for attempt in tarry.attempts(**options):
            with attempt:
                result = fn()
                attempt.set_result(result)
        return result

    return loop


def retry_with_generator(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `@tarry.retry` over a generator."""

    @tarry.retry(**options)
    def stream() -> Iterator[object]:
        yield fn()

    def first_item() -> object:
        [item] = stream()
        return item

    return first_item


def retry_with_acall(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `await tarry.acall`."""

    async def call() -> object:
        return await tarry.acall(fn, **options)

    return call


def retry_with_async_block(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `async for attempt in tarry.attempts(...)`."""

    async def loop() -> object:
        result: object = None
        async for attempt in tarry.attempts(**options):
            with attempt:
                result = await fn()
                attempt.set_result(result)
        return result

    return loop


def retry_with_async_generator(fn: Function, options: dict[str, Any]) -> Function:
    """Retry with `@tarry.retry` over an async generator."""

    @tarry.retry(**options)
    async def stream() -> AsyncIterator[object]:
        yield await fn()

    async def first_item() -> object:
        [item] = [item async for item in stream()]
        return item

    return first_item


SYNC_DRIVERS = [
    Driver("decorator", "sync", retry_with_decorator),
    Driver("call", "sync", retry_with_call),
    Driver("block", "sync", retry_with_block),
    Driver("generator", "sync", retry_with_generator),
]
ASYNC_DRIVERS = [
    Driver(form, loop, add_retries)
    for loop in ("asyncio", "trio")
    for form, add_retries in (
        ("decorator", retry_with_decorator),
        ("call", retry_with_acall),
        ("block", retry_with_async_block),
        ("generator", retry_with_async_generator),
    )
]
DRIVERS = [*SYNC_DRIVERS, *ASYNC_DRIVERS]
RESULT_DRIVERS = [driver for driver in DRIVERS if driver.form != "generator"]
"""The drivers that support `until`."""
FUNCTION_DRIVERS = [driver for driver in DRIVERS if driver.form in {"decorator", "call"}]
"""The drivers that support `fallback`."""
