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

        with pytest.raises(LimitReached, match="none of its 2 records has expired") as caught:
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
        await store.extend("a", "print", "owner", 30.0)
        await store.claim("b", "print", "owner", 5.0)
        await store.finish("b", "print", "owner", OK, 20.0)
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

        assert len(store._expiry_heap) <= 1005

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


def test_bodies_are_bounded_in_bytes() -> None:
    """What does not fit is done and not kept; what has expired makes room; what goes gives back."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(max_bytes=10, clock=lambda: clock.now)

        async def finish(key: str, body: bytes, keep: float) -> bytes | None:
            await store.claim(key, "print", "owner", 10.0)
            response = StoredResponse(200, ((b"a", b"b"),), body)
            assert await store.finish(key, "print", "owner", response, keep)
            found = await store.claim(key, "print", "other", 10.0)
            assert found is not None
            assert found.record.response is not None
            assert 200 == found.record.response.status
            return found.record.response.body

        assert b"123456" == await finish("a", b"123456", 20.0)
        assert b"" == await finish("b", b"", 60.0)
        assert await finish("c", b"1", 60.0) is None
        await clock.advance(20.0)
        assert b"1234" == await finish("d", b"1234", 20.0)
        assert await finish("e", b"", 60.0) == b""
        assert await finish("f", b"", 60.0) is None
        await clock.advance(20.0)
        await store.sweep(10)
        assert b"1234" == await finish("g", b"1234", 20.0)

    asyncio.run(main())


def test_a_response_that_is_written_late_makes_room_for_itself_elsewhere() -> None:
    """To write what was late into a full store does not push out that very record."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(max_bytes=4, clock=lambda: clock.now)
        for key in ("a", "b"):
            await store.claim(key, "print", "owner", 10.0)
        assert await store.finish("a", "print", "owner", OK, 5.0)
        await clock.advance(10.0)

        assert await store.finish("b", "print", "owner", OK, 60.0)

        found = await store.claim("b", "print", "other", 10.0)
        assert found is not None
        assert OK == found.record.response

    asyncio.run(main())


def test_a_full_store_takes_the_answer_of_who_holds_a_key() -> None:
    """Only claims need room: an answer whose record was forgotten is kept."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await clock.advance(10.0)
        await store.claim("b", "print", "owner", 10.0)

        assert await store.finish("a", "print", "owner", OK, 10.0)
        assert await store.claim("a", "print", "other", 10.0) is not None

    asyncio.run(main())


def test_a_record_may_end_before_its_lease_would_have() -> None:
    """A response that is kept for a shorter time than a lease is forgotten in its own time."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 100.0)
        await store.finish("a", "print", "owner", OK, 10.0)
        await clock.advance(10.0)

        assert await store.claim("b", "print", "owner", 10.0) is None

    asyncio.run(main())


def test_a_key_that_is_held_is_never_forgotten() -> None:
    """Neither time nor a full store frees a key that is held; from then on, its lease does."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(1, clock=lambda: clock.now)
        assert store.claim_without_expiry("a", "print", "owner", 10.0) is None
        await clock.advance(1e6)

        assert 0 == await store.sweep(10)
        with pytest.raises(LimitReached):
            store.claim_without_expiry("b", "print", "owner", 10.0)
        taken = store.claim_without_expiry("a", "print", "other", 10.0)
        assert taken is not None
        assert 10.0 == taken.record.free_at - taken.now

        store.expire_later("a", "owner", 10.0)
        await clock.advance(10.0)
        assert store.claim_without_expiry("b", "print", "owner", 10.0) is None

    asyncio.run(main())


def test_a_key_that_is_held_can_be_extended() -> None:
    """A lease may take the place of a hold."""

    async def main() -> None:
        clock = Clock()
        store = MemoryStore(clock=lambda: clock.now)
        store.claim_without_expiry("a", "print", "owner", 10.0)

        assert await store.extend("a", "print", "owner", 5.0)
        await clock.advance(5.0)
        assert 1 == await store.sweep(10)

    asyncio.run(main())


def test_a_finalizer_may_let_a_key_run_out_while_the_lock_is_held() -> None:
    """The collector closes lost requests wherever it runs, also within a call of the store."""
    clock = Clock()
    store = MemoryStore(1, clock=lambda: clock.now)
    store.claim_without_expiry("a", "print", "owner", 10.0)

    with store._lock:
        store.expire_later("a", "owner", 10.0)
    clock.now += 10.0

    assert store.claim_without_expiry("b", "print", "owner", 10.0) is None


def test_a_store_full_of_held_keys_does_not_know_when_there_is_room() -> None:
    """It refuses without a time, also after its heap was made anew."""
    store = MemoryStore(1)
    for number in range(1100):
        store.claim_without_expiry(str(number), "print", "owner", 10.0)
        store.expire_later(str(number), "owner", 10.0)
        asyncio.run(store.release(str(number), "owner"))
    store.claim_without_expiry("a", "print", "owner", 10.0)

    with pytest.raises(LimitReached) as refused:
        store.claim_without_expiry("b", "print", "owner", 10.0)

    assert refused.value.retry_after is None
