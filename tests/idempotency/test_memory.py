"""The store in memory: the conformance cases on both loops, its bound, and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio

from tarry.errors import ConfigurationError, LimitReached
from tarry.idempotency import MemoryStore, StoredResponse
from tarry.testing import VirtualClock
from tests.idempotency.conformance import CASES, Bench, Case, name_of

OK = StoredResponse(200, (), b"done")

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def on_asyncio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on asyncio."""
    asyncio.run(main())


def on_trio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on trio."""
    trio.run(main)


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_conformance(case: Case, run: Run) -> None:
    """The store does what every store must do."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(clock=lambda: clock.now)
        await case(Bench(store, store, clock.advance))

    run(main)


def test_a_full_store_refuses() -> None:
    """When every record is live the next key is refused, and the error says what to change."""

    async def main() -> None:
        store = MemoryStore(2, clock=lambda: 0.0)
        await store.claim("a", "print", "owner", 30.0)
        await store.claim("b", "print", "owner", 20.0)

        with pytest.raises(LimitReached, match="holds 2 records") as caught:
            await store.claim("c", "print", "owner", 30.0)

        assert 20.0 == caught.value.retry_after
        assert await store.claim("a", "print", "other", 30.0) is not None

    asyncio.run(main())


def test_what_has_expired_makes_room() -> None:
    """A full store forgets a record whose time is up, and only such a one."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(2, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await store.extend("a", "owner", 30.0)
        await store.claim("b", "print", "owner", 5.0)
        await store.finish("b", "owner", OK, 20.0)
        await clock.advance(20.0)

        assert await store.claim("c", "print", "owner", 30.0) is None

        assert await store.claim("a", "print", "other", 30.0) is not None
        with pytest.raises(LimitReached):
            await store.claim("b", "print", "owner", 30.0)

    asyncio.run(main())


def test_a_lapsed_record_can_be_claimed_in_a_full_store() -> None:
    """To take over a key needs no room."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await clock.advance(10.0)

        assert await store.claim("a", "print", "other", 10.0) is None

    asyncio.run(main())


def test_notes_of_old_moments_do_not_pile_up() -> None:
    """A key that is claimed and released for ever costs no more memory than one that is held."""

    async def main() -> None:
        store = MemoryStore(clock=lambda: 0.0)
        for _ in range(5000):
            await store.claim("a", "print", "owner", 30.0)
            await store.release("a", "owner")

        assert len(store._ends) <= 1005

    asyncio.run(main())


def test_time_is_that_of_the_library() -> None:
    """Without a clock of its own the store follows virtual time."""

    async def main() -> None:
        store = MemoryStore()
        await store.claim("a", "print", "owner", 3600.0)
        await asyncio.sleep(3600)

        assert await store.claim("a", "print", "other", 3600.0) is None

    with VirtualClock() as clock:
        clock.run(main)


def test_a_capacity_below_one_is_refused() -> None:
    """A store without room is a mistake."""
    with pytest.raises(ConfigurationError, match="capacity must be at least 1"):
        MemoryStore(0)
