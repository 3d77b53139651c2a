"""Sample calls, with the metrics that every telemetry listener must count for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

import tarry
from tarry.testing import VirtualClock, no_wait
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver, Step

CALL_COUNT = 20


@dataclass(frozen=True)
class SampleCall:
    """A call, and the metrics that it must produce."""

    name: str
    steps: tuple[Step, ...]
    attempts: dict[str, int]
    """The expected number of attempts by outcome."""
    result_and_reason: tuple[str, str]
    """The expected result, and the reason of a failure."""
    delays: int = 0
    """The expected number of delays."""
    options: Callable[[], dict[str, Any]] = field(default=dict)

    def run(self, driver: Driver, clock: VirtualClock) -> None:
        """Make the call."""
        with suppress(ConnectionError, ValueError, tarry.Rejected):
            driver.run(clock, Dependency(clock, *self.steps), **self.options())


def _with_open_breaker() -> dict[str, Any]:
    payments = tarry.Downstream("payments", breaker=tarry.Breaker())
    payments.force("open")
    return {"downstream": payments}


def _with_empty_budget() -> dict[str, Any]:
    budget = tarry.TokenBudget(capacity=1)
    return {"downstream": tarry.Downstream("payments", budget=budget)}


SAMPLE_CALLS = [
    SampleCall("first-try", (OK,), {"success": 1}, ("first-try", "")),
    SampleCall(
        "after-retries",
        (FAIL, FAIL, OK),
        {"transient": 2, "success": 1},
        ("after-retries", ""),
        delays=2,
    ),
    SampleCall("failed", (FAIL,), {"transient": 4}, ("failed", "attempts"), delays=3),
    SampleCall(
        "permanent", (Step(raises=ValueError()),), {"permanent": 1}, ("failed", "permanent")
    ),
    SampleCall("breaker-open", (OK,), {}, ("failed", "breaker-open"), options=_with_open_breaker),
    SampleCall(
        "budget-empty",
        (FAIL,),
        {"transient": 1},
        ("failed", "budget-empty"),
        options=_with_empty_budget,
    ),
]

every_sample_call = pytest.mark.parametrize("sample", SAMPLE_CALLS, ids=lambda sample: sample.name)
every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


@contextmanager
def listening(listener: Callable[[tarry.Event], None]) -> Iterator[None]:
    """Add the listener during the block."""
    remove = tarry.listen(listener)
    try:
        yield
    finally:
        remove()


def reopen_breaker(clock: VirtualClock, name: str) -> tarry.Downstream:
    """Return a downstream whose breaker has opened, admitted a probe and opened again."""
    options: dict[str, Any] = {"consecutive": 1, "spread": 0, "probes": 1}
    downstream = tarry.Downstream(name, breaker=tarry.Breaker(**options))
    for _ in range(2):
        with suppress(ConnectionError):
            tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, downstream=downstream)
        clock.advance(30)
    return downstream


def hedge_async() -> None:
    """Make a hedged call whose hedge wins, on asyncio."""
    sent: list[int] = []

    async def read() -> None:
        sent.append(1)
        await asyncio.sleep(10 / len(sent))

    with VirtualClock() as clock:
        clock.run(lambda: tarry.hedge(read, after=1, name="read"))


def hedge_sync() -> None:
    """Make a hedged call whose hedge wins, in threads."""
    sent: list[int] = []
    release = threading.Event()

    def read() -> None:
        sent.append(1)
        if len(sent) == 1:
            release.wait()

    tarry.hedge_sync(read, after=0.001, name="read")
    release.set()


sync_and_async_hedged_call = pytest.mark.parametrize("make_hedged_call", [hedge_async, hedge_sync])


class ConcurrentCaller(Protocol):
    """Makes CALL_COUNT concurrent calls, call `n` inside the context manager `context_of(n)`."""

    def __call__(self, *, context_of: Callable[[int], Any]) -> None:
        """Make the calls."""


def call_in_tasks(*, context_of: Callable[[int], Any]) -> None:
    """Make CALL_COUNT concurrent calls on asyncio; call `n` has `n % 3` failures.

    Call `n` runs inside the context manager `context_of(n)`.
    """

    async def make_call(number: int) -> None:
        failures = iter(range(number % 3))

        async def work() -> None:
            await asyncio.sleep(0.01)
            if next(failures, None) is not None:
                raise ConnectionError

        with context_of(number):
            await tarry.acall(work, on=ConnectionError, name=f"op{number}")

    async def make_all_calls() -> None:
        await asyncio.gather(*(make_call(number) for number in range(CALL_COUNT)))

    with VirtualClock() as clock:
        clock.run(make_all_calls)


def call_in_threads(*, context_of: Callable[[int], Any]) -> None:
    """Make the calls of `call_in_tasks` in concurrent threads."""
    barrier = threading.Barrier(CALL_COUNT)

    def make_call(number: int) -> None:
        failures = iter(range(number % 3))

        def work() -> None:
            if next(failures, None) is not None:
                raise ConnectionError

        with context_of(number):
            barrier.wait()
            tarry.call(work, on=ConnectionError, name=f"op{number}")

    with no_wait(), ThreadPoolExecutor(CALL_COUNT) as pool:
        list(pool.map(make_call, range(CALL_COUNT)))


in_tasks_and_threads = pytest.mark.parametrize("make_calls", [call_in_tasks, call_in_threads])
