"""The memory store: conformance, limits, clock and claims without expiry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio

from tarry.errors import ConfigurationError, LimitReached
from tarry.idempotency import MemoryStore, StoredResponse
from tarry.testing import VirtualClock
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name

RESPONSE = StoredResponse(200, (), b"done")

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class ManualClock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


def run_on_asyncio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function on asyncio."""
    asyncio.run(main())


def run_on_trio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function on trio."""
    trio.run(main)


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_trio])
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, run: Run) -> None:
    """The store passes the conformance cases."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(clock=lambda: clock.now)
        await case(StoreHarness(store, store, clock.advance))

    run(main)


def test_full_store_rejects_claims() -> None:
    """A claim in a full store without expired records raises with the time of the next expiry."""

    async def main() -> None:
        store = MemoryStore(2, clock=lambda: 0.0)
        await store.claim("a", "print", "owner", 30.0)
        await store.claim("b", "print", "owner", 20.0)

        with pytest.raises(LimitReached, match="none of its 2 records has expired") as caught:
            await store.claim("c", "print", "owner", 30.0)

        assert 20.0 == caught.value.retry_after
        assert await store.claim("a", "print", "other", 30.0) is not None

    asyncio.run(main())


def test_full_store_deletes_an_expired_record() -> None:
    """A claim in a full store deletes an expired record, and no other record."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(2, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await store.extend("a", "print", "owner", 30.0)
        await store.claim("b", "print", "owner", 5.0)
        await store.finish("b", "print", "owner", RESPONSE, 20.0)
        await clock.advance(20.0)

        assert await store.claim("c", "print", "owner", 30.0) is None

        assert await store.claim("a", "print", "other", 30.0) is not None
        with pytest.raises(LimitReached):
            await store.claim("b", "print", "owner", 30.0)

    asyncio.run(main())


def test_expired_record_can_be_claimed_in_a_full_store() -> None:
    """A full store accepts a claim of a key whose lease has expired."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await clock.advance(10.0)

        assert await store.claim("a", "print", "other", 10.0) is None

    asyncio.run(main())


def test_outdated_heap_items_do_not_accumulate() -> None:
    """Claiming and releasing a key many times does not grow the expiry heap without limit."""

    async def main() -> None:
        store = MemoryStore(clock=lambda: 0.0)
        for _ in range(5000):
            await store.claim("a", "print", "owner", 30.0)
            await store.release("a", "owner")

        assert len(store._expiry_heap) <= 1005

    asyncio.run(main())


def test_default_clock_follows_virtual_time() -> None:
    """Without a clock argument the store uses the clock of the library, here a virtual one."""

    async def main() -> None:
        store = MemoryStore()
        await store.claim("a", "print", "owner", 3600.0)
        await asyncio.sleep(3600)

        assert await store.claim("a", "print", "other", 3600.0) is None

    with VirtualClock() as clock:
        clock.run(main)


def test_capacity_below_one_raises() -> None:
    """A capacity of 0 raises when the store is created."""
    with pytest.raises(ConfigurationError, match="capacity must be at least 1"):
        MemoryStore(0)


def test_responses_above_max_bytes_have_no_body() -> None:
    """A body that exceeds max_bytes is not stored; expired records free their bytes."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(max_bytes=10, clock=lambda: clock.now)

        async def finish(key: str, body: bytes, retention: float) -> bytes | None:
            await store.claim(key, "print", "owner", 10.0)
            response = StoredResponse(200, ((b"a", b"b"),), body)
            assert await store.finish(key, "print", "owner", response, retention)
            existing = await store.claim(key, "print", "other", 10.0)
            assert existing is not None
            assert existing.record.response is not None
            assert 200 == existing.record.response.status
            return existing.record.response.body

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


def test_late_response_does_not_delete_its_own_record() -> None:
    """Storing a response after the lease has expired does not delete its own record."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(max_bytes=4, clock=lambda: clock.now)
        for key in ("a", "b"):
            await store.claim(key, "print", "owner", 10.0)
        assert await store.finish("a", "print", "owner", RESPONSE, 5.0)
        await clock.advance(10.0)

        assert await store.finish("b", "print", "owner", RESPONSE, 60.0)

        existing = await store.claim("b", "print", "other", 10.0)
        assert existing is not None
        assert RESPONSE == existing.record.response

    asyncio.run(main())


def test_full_store_accepts_responses() -> None:
    """A full store stores a response whose record was deleted, because only claims are limited."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await clock.advance(10.0)
        await store.claim("b", "print", "owner", 10.0)

        assert await store.finish("a", "print", "owner", RESPONSE, 10.0)
        assert await store.claim("a", "print", "other", 10.0) is not None

    asyncio.run(main())


def test_retention_may_be_shorter_than_the_lease() -> None:
    """A response with a short retention expires before the lease would have expired."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 100.0)
        await store.finish("a", "print", "owner", RESPONSE, 10.0)
        await clock.advance(10.0)

        assert await store.claim("b", "print", "owner", 10.0) is None

    asyncio.run(main())


def test_claim_without_expiry_does_not_expire() -> None:
    """A claim with `expires=False` does not expire until `expire_later` is called."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        assert store.claim_now("a", "print", "owner", 10.0, expires=False) is None
        await clock.advance(1e6)

        assert 0 == await store.sweep(10)
        with pytest.raises(LimitReached):
            store.claim_now("b", "print", "owner", 10.0, expires=False)
        existing = store.claim_now("a", "print", "other", 10.0, expires=False)
        assert existing is not None
        assert 10.0 == existing.record.free_at - existing.now

        store.expire_later("a", "owner", 10.0)
        await clock.advance(10.0)
        assert store.claim_now("b", "print", "owner", 10.0, expires=False) is None

    asyncio.run(main())


def test_extended_claim_without_expiry_expires() -> None:
    """A claim with `expires=False` expires after it was extended."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(clock=lambda: clock.now)
        store.claim_now("a", "print", "owner", 10.0, expires=False)

        assert await store.extend("a", "print", "owner", 5.0)
        await clock.advance(5.0)
        assert 1 == await store.sweep(10)

    asyncio.run(main())


def test_expire_later_does_not_wait_for_the_lock() -> None:
    """`expire_later` does not block: the garbage collector may call it under the lock."""
    clock = ManualClock()
    store = MemoryStore(1, clock=lambda: clock.now)
    store.claim_now("a", "print", "owner", 10.0, expires=False)

    with store._lock:
        store.expire_later("a", "owner", 10.0)
    clock.now += 10.0

    assert store.claim_now("b", "print", "owner", 10.0, expires=False) is None


def test_full_store_without_expiry_gives_no_retry_after() -> None:
    """The error of a full store without expiring records has no retry_after."""
    store = MemoryStore(1)
    for number in range(1100):
        store.claim_now(str(number), "print", "owner", 10.0, expires=False)
        store.expire_later(str(number), "owner", 10.0)
        asyncio.run(store.release(str(number), "owner"))
    store.claim_now("a", "print", "owner", 10.0, expires=False)

    with pytest.raises(LimitReached) as caught:
        store.claim_now("b", "print", "owner", 10.0, expires=False)

    assert caught.value.retry_after is None
