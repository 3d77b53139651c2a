"""The memory store: conformance, limits, clock and claims without expiry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
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


@pytest.mark.parametrize("run_async", [run_on_asyncio, run_on_trio])
@pytest.mark.parametrize("case", CASES, ids=case_name)
async def test_conformance(run_async: Run, case: Case) -> None:
    """The store passes the conformance cases."""
    clock = ManualClock()
    store = MemoryStore(clock=lambda: clock.now)
    await case(StoreHarness(store, store, clock.advance))


async def test_full_store_rejects_claims() -> None:
    """A claim in a full store without expired records raises with the time of the next expiry."""
    store = MemoryStore(2, clock=lambda: 0.0)
    await store.claim("a", "print", "owner", 30.0)
    await store.claim("b", "print", "owner", 20.0)

    with pytest.raises(LimitReached, match="none of its 2 records has expired") as caught:
        await store.claim("c", "print", "owner", 30.0)

    assert 20.0 == caught.value.retry_after
    assert await store.claim("a", "print", "other", 30.0) is not None


async def test_full_store_deletes_an_expired_record() -> None:
    """A claim in a full store deletes an expired record, and no other record."""
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


async def test_expired_record_can_be_claimed_in_a_full_store() -> None:
    """A full store accepts a claim of a key whose lease has expired."""
    clock = ManualClock()
    store = MemoryStore(1, clock=lambda: clock.now)
    await store.claim("a", "print", "owner", 10.0)
    await clock.advance(10.0)

    assert await store.claim("a", "print", "other", 10.0) is None


async def test_outdated_heap_items_do_not_accumulate() -> None:
    """Claiming and releasing a key many times does not grow the expiry heap without limit."""
    store = MemoryStore(clock=lambda: 0.0)
    for _ in range(5000):
        await store.claim("a", "print", "owner", 30.0)
        await store.release("a", "owner")

    assert len(store._expiry_heap) <= 1005


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


async def test_responses_above_max_bytes_have_no_body() -> None:
    """A body that exceeds max_bytes is not stored; expired records free their bytes."""
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


async def test_late_response_does_not_delete_its_own_record() -> None:
    """Storing a response after the lease has expired does not delete its own record."""
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


async def test_full_store_accepts_responses() -> None:
    """A full store stores a response whose record was deleted, because only claims are limited."""
    clock = ManualClock()
    store = MemoryStore(1, clock=lambda: clock.now)
    await store.claim("a", "print", "owner", 10.0)
    await clock.advance(10.0)
    await store.claim("b", "print", "owner", 10.0)

    assert await store.finish("a", "print", "owner", RESPONSE, 10.0)
    assert await store.claim("a", "print", "other", 10.0) is not None


async def test_retention_may_be_shorter_than_the_lease() -> None:
    """A response with a short retention expires before the lease would have expired."""
    clock = ManualClock()
    store = MemoryStore(1, clock=lambda: clock.now)
    await store.claim("a", "print", "owner", 100.0)
    await store.finish("a", "print", "owner", RESPONSE, 10.0)
    await clock.advance(10.0)

    assert await store.claim("b", "print", "owner", 10.0) is None


async def test_claim_without_expiry_does_not_expire() -> None:
    """A claim with `expires=False` does not expire until `expire_later` is called."""
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


async def test_extended_claim_without_expiry_expires() -> None:
    """A claim with `expires=False` expires after it was extended."""
    clock = ManualClock()
    store = MemoryStore(clock=lambda: clock.now)
    store.claim_now("a", "print", "owner", 10.0, expires=False)

    assert await store.extend("a", "print", "owner", 5.0)
    await clock.advance(5.0)
    assert 1 == await store.sweep(10)


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
    store = MemoryStore(1)
    for number in range(1100):
        store.claim_now(str(number), "print", "owner", 10.0, expires=False)
        store.expire_later(str(number), "owner", 10.0)
        asyncio.run(store.release(str(number), "owner"))
    store.claim_now("a", "print", "owner", 10.0, expires=False)

    with pytest.raises(LimitReached) as caught:
        store.claim_now("b", "print", "owner", 10.0, expires=False)

    assert caught.value.retry_after is None


# --- shares of callers ---------------------------------------------------------------------------


def claim_until_rejected(store: MemoryStore, caller: int) -> int:
    """Claim new keys for a caller until one is rejected; return the number of claimed keys."""
    for number in range(1000):
        try:
            key = f"{caller} {number} {len(store._entries)}"
            store.claim_now(key, "print", "owner", 10.0, expires=False, caller=caller)
        except LimitReached:
            return number
    return 1000


def test_caller_gets_half_of_the_capacity() -> None:
    """A caller gets half of the capacity, the next one half of the rest, and so on."""
    store = MemoryStore(120)

    assert [60, 30, 15, 8, 4] == [claim_until_rejected(store, caller) for caller in range(5)]
    assert 117 == len(store._entries)


def test_error_names_the_records_of_the_caller() -> None:
    """The error says how many records the caller has, and when the next record expires."""
    store = MemoryStore(4, clock=lambda: 0.0)
    for key in ("a", "b"):
        store.claim_now(key, "print", "owner", 10.0, caller=1)

    with pytest.raises(LimitReached, match="its caller has 2 of 2 records, and only 2") as caught:
        store.claim_now("c", "print", "owner", 10.0, caller=1)

    assert 10.0 == caught.value.retry_after


async def test_released_and_expired_records_free_the_share() -> None:
    """A caller gets new keys when its records are released or have expired."""
    clock = ManualClock()
    store = MemoryStore(4, clock=lambda: clock.now)
    for key in ("a", "b"):
        store.claim_now(key, "print", "owner", 10.0, caller=1)
    await store.release("a", "owner")
    assert store.claim_now("c", "print", "owner", 10.0, caller=1) is None
    with pytest.raises(LimitReached):
        store.claim_now("d", "print", "owner", 10.0, caller=1)
    await clock.advance(10.0)
    for key in ("d", "e"):
        assert store.claim_now(key, "print", "owner", 10.0, caller=1) is None
    await clock.advance(10.0)
    assert 2 == await store.sweep(10)

    assert {} == store._usage_by_caller


def test_share_that_expires_during_a_claim() -> None:
    """A claim that deletes all records of its caller counts its own record."""
    clock = ManualClock()
    store = MemoryStore(2, clock=lambda: clock.now)
    store.claim_now("a", "print", "owner", 10.0, caller=1)
    clock.now += 10.0

    assert store.claim_now("b", "print", "owner", 10.0, caller=1) is None
    assert [1] == [usage.records for usage in store._usage_by_caller.values()]
    with pytest.raises(LimitReached):
        store.claim_now("c", "print", "owner", 10.0, caller=1)


def test_caller_gets_half_of_the_bytes() -> None:
    """One caller gets at most half of max_bytes, so that responses of others are still stored."""
    store = MemoryStore(max_bytes=100)

    def store_body(key: str, caller: int) -> bool:
        store.claim_now(key, "print", "owner", 10.0, caller=caller)
        assert store.finish_now(key, "print", "owner", StoredResponse(200, (), b"1" * 10), 60.0)
        existing = store.claim_now(key, "print", "other", 10.0, caller=caller)
        assert existing is not None
        assert existing.record.response is not None
        return existing.record.response.body is not None

    assert [True] * 5 + [False] == [store_body(f"a{number}", 1) for number in range(6)]
    assert store_body("b", 2)


# --- refused requests ----------------------------------------------------------------------------


async def test_refused_requests_make_room() -> None:
    """A full store deletes the records of refused requests, the oldest first, and no others."""
    store = MemoryStore(3, clock=lambda: 0.0)
    for key, status in (("a", 200), ("b", 422), ("c", 400)):
        await store.claim(key, "print", "owner", 10.0)
        await store.finish(key, "print", "owner", StoredResponse(status, (), b""), 60.0)

    assert await store.claim("d", "print", "owner", 10.0) is None
    assert ["a", "c", "d"] == list(store._entries)
    assert await store.claim("e", "print", "owner", 10.0) is None
    with pytest.raises(LimitReached):
        await store.claim("f", "print", "owner", 10.0)
    assert ["a", "d", "e"] == list(store._entries)


async def test_refused_requests_free_their_bytes() -> None:
    """When max_bytes is reached, responses to refused requests are deleted for another response."""
    store = MemoryStore(max_bytes=10, clock=lambda: 0.0)
    for key, status in (("a", 422), ("b", 201)):
        await store.claim(key, "print", "owner", 10.0)
        await store.finish(key, "print", "owner", StoredResponse(status, (), b"12345678"), 60.0)

    assert ["b"] == list(store._entries)
    assert await store.claim("a", "print", "other", 10.0) is None


# --- log -----------------------------------------------------------------------------------------


def test_log_has_one_line_per_change(caplog: pytest.LogCaptureFixture) -> None:
    """A store logs when it begins to reject keys, and when a tenth of its records has expired."""
    caplog.set_level("INFO", logger="tarry.idempotency")
    clock = ManualClock()
    store = MemoryStore(40, clock=lambda: clock.now)

    def claim(key: str, lease: float) -> None:
        with suppress(LimitReached):
            store.claim_now(key, "print", "owner", lease, caller=1)

    claim("first", 10.0)
    for number in range(100):
        claim(f"a{number}", 20.0)
    clock.now += 10.0
    for number in range(100):  # one record has expired
        claim(f"b{number}", 20.0)
    assert ["WARNING"] == [line.levelname for line in caplog.records]
    assert "rejects a key: its caller has 20 of 20 records" in caplog.messages[0]

    clock.now += 10.0
    for number in range(100):  # all other records have expired
        asyncio.run(store.sweep(100))
        claim(f"c{number}", 20.0)
    assert ["WARNING", "INFO", "WARNING"] == [line.levelname for line in caplog.records]
    assert "memory store accepts new keys again, records=1" == caplog.messages[1]
