"""An empty store under test: what the conformance cases and the files that run them share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tarry.idempotency.store import ExistingRecord, IdempotencyStore, Record, StoredResponse
from tarry.runtime import event_loops

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """An empty store, and a hand on its time."""

    store: IdempotencyStore
    twin: IdempotencyStore
    """The same records through another connection, or the store itself where there is none."""
    advance: Callable[[float], Awaitable[None]]
    """Let so many seconds pass on the store's clock."""
    tick: float = 1.0
    """The cases count in ticks: a second on a clock that jumps, less on one that is waited for."""
    forgets: bool = False
    """The engine removes what has expired by itself, so that a sweep finds nothing."""

    @property
    def lease(self) -> float:
        """Ten ticks, in seconds."""
        return 10 * self.tick


Case = Callable[[Bench], Awaitable[None]]


def name_of(case: Case) -> str:
    """The name of a case."""
    return getattr(case, "__name__", repr(case))


CROWD = 50
OK = StoredResponse(200, ((b"content-type", b"text/plain"),), b"done")

CASES: list[Case] = []


def conforms(case: Case) -> Case:
    """Add a case to the list."""
    CASES.append(case)
    return case


async def together(functions: list[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all at the same time, on whichever loop runs, and return their results in order."""
    if not event_loops.in_trio():
        import asyncio

        return list(await asyncio.gather(*(function() for function in functions)))
    import trio

    results: dict[int, T] = {}

    async def run(index: int, function: Callable[[], Awaitable[T]]) -> None:
        results[index] = await function()

    async with trio.open_nursery() as nursery:
        for index, function in enumerate(functions):
            nursery.start_soon(run, index, function)
    return [results[index] for index in range(len(functions))]


async def record_of(store: IdempotencyStore, key: str) -> Record:
    """The record of a key that is taken."""
    return (await taken(store, key)).record


async def taken(store: IdempotencyStore, key: str) -> ExistingRecord:
    """What a claim says about a key that is taken."""
    found = await store.claim(key, "probe", "probe", 1.0)
    assert found is not None
    return found


async def crowd(bench: Bench) -> list[ExistingRecord | None]:
    """Claim one key many times at the same moment, half of it through the other connection."""
    return await together(
        [
            partial(store.claim, "k", f"print {number}", f"owner {number}", 100 * bench.tick)
            for number, store in enumerate([bench.store, bench.twin] * (CROWD // 2))
        ]
    )
