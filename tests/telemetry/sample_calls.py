"""Sample calls of every kind, with the metrics that every backend must count for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

import tarry
from tarry.testing import VirtualClock, no_wait
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver, Step

MANY = 20


@dataclass(frozen=True)
class SampleCall:
    """A call: the behaviour of its dependency, and the expected metrics."""

    name: str
    steps: tuple[Step, ...]
    attempts: dict[str, int]
    """By outcome."""
    call: tuple[str, str]
    """The result and the reason."""
    delays: int = 0
    options: Callable[[], dict[str, Any]] = field(default=dict)

    def run(self, driver: Driver, clock: VirtualClock) -> None:
        """Make the call."""
        with suppress(ConnectionError, ValueError, tarry.Rejected):
            driver.run(clock, Dependency(clock, *self.steps), **self.options())


def _broken() -> dict[str, Any]:
    payments = tarry.Downstream("payments", breaker=tarry.Breaker())
    payments.force("open")
    return {"downstream": payments}


def _poor() -> dict[str, Any]:
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
    SampleCall("breaker-open", (OK,), {}, ("failed", "breaker-open"), options=_broken),
    SampleCall(
        "budget-empty", (FAIL,), {"transient": 1}, ("failed", "budget-empty"), options=_poor
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


def broken_breaker(clock: VirtualClock, name: str) -> tarry.Downstream:
    """Return a downstream whose breaker has opened, probed and opened again."""
    options: dict[str, Any] = {"consecutive": 1, "spread": 0, "probes": 1}
    downstream = tarry.Downstream(name, breaker=tarry.Breaker(**options))
    for _ in range(2):
        with suppress(ConnectionError):
            tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, downstream=downstream)
        clock.advance(30)
    return downstream


def hedge_async() -> None:
    """Make a hedged call whose second copy wins, on asyncio."""
    sent: list[int] = []

    async def read() -> None:
        sent.append(1)
        await asyncio.sleep(10 / len(sent))

    with VirtualClock() as clock:
        clock.run(lambda: tarry.hedge(read, after=1, name="read"))


def hedge_sync() -> None:
    """Make a hedged call whose second copy wins, in threads."""
    sent: list[int] = []
    over = threading.Event()

    def read() -> None:
        sent.append(1)
        if len(sent) == 1:
            over.wait()

    tarry.hedge_sync(read, after=0.001, name="read")
    over.set()


both_hedges = pytest.mark.parametrize("hedged", [hedge_async, hedge_sync])


def many_tasks(context_of: Callable[[int], Any]) -> None:
    """Make MANY concurrent calls on asyncio; call `n` has `n % 3` failures.

    `context_of(n)` is a context manager that call `n` runs in.
    """

    async def one(number: int) -> None:
        left = iter(range(number % 3))

        async def work() -> None:
            await asyncio.sleep(0.01)
            if next(left, None) is not None:
                raise ConnectionError

        with context_of(number):
            await tarry.acall(work, on=ConnectionError, name=f"op{number}")

    async def everyone() -> None:
        await asyncio.gather(*(one(number) for number in range(MANY)))

    with VirtualClock() as clock:
        clock.run(everyone)


def many_threads(context_of: Callable[[int], Any]) -> None:
    """Make the calls of `many_tasks` in concurrent threads."""
    together = threading.Barrier(MANY)

    def one(number: int) -> None:
        left = iter(range(number % 3))

        def work() -> None:
            if next(left, None) is not None:
                raise ConnectionError

        with context_of(number):
            together.wait()
            tarry.call(work, on=ConnectionError, name=f"op{number}")

    with no_wait(), ThreadPoolExecutor(MANY) as pool:
        list(pool.map(one, range(MANY)))


side_by_side = pytest.mark.parametrize("many", [many_tasks, many_threads])
