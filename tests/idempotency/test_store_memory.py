"""The memory store: the conformance cases, its limits, and its clock."""

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

OK = StoredResponse(200, (), b"done")

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class ManualClock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


def on_asyncio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function on asyncio."""
    asyncio.run(main())


def on_trio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function on trio."""
    trio.run(main)


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, run: Run) -> None:
    """The store passes the conformance cases."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(clock=lambda: clock.now)
        await case(StoreHarness(store, store, clock.advance))

    run(main)


def test_full_store_rejects_claims() -> None:
    """If no record has expired, a claim raises an error that suggests what to change."""

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
    """A full store deletes a record that has expired, and only such a record."""

    async def main() -> None:
        clock = ManualClock()
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


def test_expired_record_can_be_claimed_in_a_full_store() -> None:
    """Claiming an expired key needs no additional capacity."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await clock.advance(10.0)

        assert await store.claim("a", "print", "other", 10.0) is None

    asyncio.run(main())


def test_outdated_heap_items_do_not_accumulate() -> None:
    """A key that is claimed and released many times does not use more memory."""

    async def main() -> None:
        store = MemoryStore(clock=lambda: 0.0)
        for _ in range(5000):
            await store.claim("a", "print", "owner", 30.0)
            await store.release("a", "owner")

        assert len(store._expiry_heap) <= 1005

    asyncio.run(main())


def test_default_clock_is_that_of_the_library() -> None:
    """Without its own clock the store follows virtual time."""

    async def main() -> None:
        store = MemoryStore()
        await store.claim("a", "print", "owner", 3600.0)
        await asyncio.sleep(3600)

        assert await store.claim("a", "print", "other", 3600.0) is None

    with VirtualClock() as clock:
        clock.run(main)


def test_capacity_below_one_raises() -> None:
    """A capacity of 0 is a mistake."""
    with pytest.raises(ConfigurationError, match="capacity must be at least 1"):
        MemoryStore(0)


def test_max_bytes() -> None:
    """A response that does not fit is not stored; expired and deleted records free their bytes."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(max_bytes=10, clock=lambda: clock.now)

        async def finish(key: str, body: bytes, keep: float) -> bytes | None:
            await store.claim(key, "print", "owner", 10.0)
            response = StoredResponse(200, ((b"a", b"b"),), body)
            assert await store.finish(key, "print", "owner", response, keep)
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
    """Storing a late response in a full store does not delete its own expired record."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(max_bytes=4, clock=lambda: clock.now)
        for key in ("a", "b"):
            await store.claim(key, "print", "owner", 10.0)
        assert await store.finish("a", "print", "owner", OK, 5.0)
        await clock.advance(10.0)

        assert await store.finish("b", "print", "owner", OK, 60.0)

        existing = await store.claim("b", "print", "other", 10.0)
        assert existing is not None
        assert OK == existing.record.response

    asyncio.run(main())


def test_full_store_accepts_responses() -> None:
    """Only claims need capacity: a response whose record was deleted is stored."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 10.0)
        await clock.advance(10.0)
        await store.claim("b", "print", "owner", 10.0)

        assert await store.finish("a", "print", "owner", OK, 10.0)
        assert await store.claim("a", "print", "other", 10.0) is not None

    asyncio.run(main())


def test_retention_may_be_shorter_than_the_lease() -> None:
    """A response with a short retention expires before its lease would have."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(1, clock=lambda: clock.now)
        await store.claim("a", "print", "owner", 100.0)
        await store.finish("a", "print", "owner", OK, 10.0)
        await clock.advance(10.0)

        assert await store.claim("b", "print", "owner", 10.0) is None

    asyncio.run(main())


def test_claim_without_expiry_does_not_expire() -> None:
    """Neither time nor a full store frees such a key, until `expire_later` is called."""

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


def test_claim_without_expiry_can_be_extended() -> None:
    """Extending gives such a claim a lease."""

    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(clock=lambda: clock.now)
        store.claim_now("a", "print", "owner", 10.0, expires=False)

        assert await store.extend("a", "print", "owner", 5.0)
        await clock.advance(5.0)
        assert 1 == await store.sweep(10)

    asyncio.run(main())


def test_expire_later_does_not_wait_for_the_lock() -> None:
    """The garbage collector may close a request while its thread holds the lock."""
    clock = ManualClock()
    store = MemoryStore(1, clock=lambda: clock.now)
    store.claim_now("a", "print", "owner", 10.0, expires=False)

    with store._lock:
        store.expire_later("a", "owner", 10.0)
    clock.now += 10.0

    assert store.claim_now("b", "print", "owner", 10.0, expires=False) is None


def test_full_store_without_expiry_gives_no_retry_after() -> None:
    """The error has no time, also after the heap was rebuilt."""
    store = MemoryStore(1)
    for number in range(1100):
        store.claim_now(str(number), "print", "owner", 10.0, expires=False)
        store.expire_later(str(number), "owner", 10.0)
        asyncio.run(store.release(str(number), "owner"))
    store.claim_now("a", "print", "owner", 10.0, expires=False)

    with pytest.raises(LimitReached) as refused:
        store.claim_now("b", "print", "owner", 10.0, expires=False)

    assert refused.value.retry_after is None
