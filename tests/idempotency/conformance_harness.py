"""The harness of the conformance cases for stores: an empty store and helper functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tarry.idempotency.store import ExistingRecord, IdempotencyStore, Record, StoredResponse
from tarry.runtime import event_loops

T = TypeVar("T")


@dataclass(frozen=True)
class StoreHarness:
    """An empty store, and control over its clock."""

    store: IdempotencyStore
    second_connection: IdempotencyStore
    """A store with a second connection to the same records, or the store itself."""
    advance: Callable[[float], Awaitable[None]]
    """Advances the store's clock by this many seconds."""
    tick: float = 1.0
    """The unit of time of the cases in seconds: 1 on a virtual clock, less on a real one."""
    expires_records: bool = False
    """Whether the database itself deletes expired records, so that a sweep finds none."""

    @property
    def lease(self) -> float:
        """The lease of the cases in seconds: ten ticks."""
        return 10 * self.tick


Case = Callable[[StoreHarness], Awaitable[None]]


def case_name(case: Case) -> str:
    """Return the name of a case."""
    return getattr(case, "__name__", repr(case))


CONCURRENT_CLAIMS = 50
RESPONSE = StoredResponse(200, ((b"content-type", b"text/plain"),), b"done")

CASES: list[Case] = []


def conformance_case(case: Case) -> Case:
    """Add a case to `CASES`."""
    CASES.append(case)
    return case


async def run_concurrently(functions: list[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all functions concurrently, on asyncio or trio; return the results in order."""
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
    """Return the record of a key that is claimed or finished."""
    return (await existing_record(store, key)).record


async def existing_record(store: IdempotencyStore, key: str) -> ExistingRecord:
    """Claim a key that is claimed or finished already, and return the result."""
    existing = await store.claim(key, "probe", "probe", 1.0)
    assert existing is not None
    return existing


async def claim_concurrently(harness: StoreHarness) -> list[ExistingRecord | None]:
    """Claim one key many times concurrently, with half of the claims on the second connection."""
    return await run_concurrently(
        [
            partial(store.claim, "k", f"print {number}", f"owner {number}", 100 * harness.tick)
            for number, store in enumerate(
                [harness.store, harness.second_connection] * (CONCURRENT_CLAIMS // 2)
            )
        ]
    )
