"""`LeaseRenewer`: the renewal of leases by a timer for each event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from tarry.idempotency import MemoryStore
from tarry.idempotency.lease import KeyLease, LeaseContext, LeaseRenewer
from tarry.testing import VirtualClock
from tests.idempotency.asgi_client import make_scope

LEASE_S = 30.0
RENEWAL_INTERVAL_S = LEASE_S / 3
TOLERANCE_S = 1e-6  # for rounding errors, as the clock starts at the time of the machine


class RecordingStore(MemoryStore):
    """A memory store that records when each key was extended; `slow_key` takes `delay_s`."""

    def __init__(self, delay_s: float = 0.0, slow_key: str = "") -> None:
        super().__init__()
        self.delay_s, self.slow_key = delay_s, slow_key
        self.started: list[tuple[str, float]] = []
        self.finished: list[str] = []

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend a lease, and record the start and the end of the call."""
        self.started.append((key, asyncio.get_running_loop().time()))
        if key == self.slow_key:
            await asyncio.sleep(self.delay_s)
        extended = await super().extend(key, fingerprint, owner, lease)
        self.finished.append(key)
        return extended

    def extension_times(self, key: str, start: float) -> list[float]:
        """Return the times at which a key was extended, in seconds since `start`."""
        return [time - start for name, time in self.started if name == key]


def make_lease(store: MemoryStore, key: str) -> KeyLease:
    """Return a lease as the middleware creates it."""
    context = LeaseContext(
        store, lease_s=LEASE_S, retention_s=60.0, max_response_bytes=0, stores_error_responses=False
    )
    return KeyLease(context, key, "print", make_scope())


async def hold_lease(renewer: LeaseRenewer, store: MemoryStore, key: str, seconds: float) -> float:
    """Hold the lease of a key for some seconds, and return the time at which it started."""
    started = asyncio.get_running_loop().time()
    lease = make_lease(store, key)
    await lease.claim()
    renewed_leases = renewer.add(lease)
    await asyncio.sleep(seconds)
    del renewed_leases[lease]
    return started


@pytest.fixture(autouse=True)
def run_async() -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run coroutine functions in virtual time."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with VirtualClock() as clock:
            clock.run(main)

    return run


async def test_short_leases_are_not_renewed() -> None:
    """A lease that ends before its first renewal is not extended, and the timer stops."""
    store, renewer = RecordingStore(), LeaseRenewer(LEASE_S)
    for number in range(20):
        await hold_lease(renewer, store, str(number), 0.9 * RENEWAL_INTERVAL_S)
    await asyncio.sleep(RENEWAL_INTERVAL_S)

    assert [] == store.started
    assert renewer._loop_leases is not None
    assert (False, {}) == (
        renewer._loop_leases.is_timer_running,
        renewer._loop_leases.next_renewals,
    )


@pytest.mark.parametrize("offset_s", [0.0, 0.1, 4.9, 5.0, 7.0, 12.5])
async def test_each_lease_is_renewed_in_time(offset_s: float) -> None:
    """Each lease is renewed before half of its length has passed, whenever it started."""
    store, renewer = RecordingStore(), LeaseRenewer(LEASE_S)
    first = asyncio.create_task(hold_lease(renewer, store, "first", 100))
    await asyncio.sleep(offset_s)
    second = asyncio.create_task(hold_lease(renewer, store, "second", 100))

    for key, task in (("first", first), ("second", second)):
        times = [0.0, *store.extension_times(key, await task), 100.0]
        gaps = [after - before for before, after in pairwise(times)]
        assert RENEWAL_INTERVAL_S - TOLERANCE_S <= min(gaps[:-1])
        assert max(gaps) <= LEASE_S / 2 + TOLERANCE_S


async def test_slow_renewal_does_not_delay_others() -> None:
    """A slow renewal does not delay those of other leases, and is not started twice."""
    store, renewer = RecordingStore(delay_s=4.5, slow_key="slow"), LeaseRenewer(LEASE_S)
    slow, other = await asyncio.gather(
        hold_lease(renewer, store, "slow", 34), hold_lease(renewer, store, "other", 34)
    )

    assert [10, 20, 30] == pytest.approx(store.extension_times("other", other))
    assert [10, 20, 30] == pytest.approx(store.extension_times("slow", slow))


async def test_failed_renewal_is_retried() -> None:
    """A renewal that takes more than a sixth of the lease is cancelled and retried after 1 s."""
    store, renewer = RecordingStore(delay_s=100, slow_key="slow"), LeaseRenewer(LEASE_S)
    started = await hold_lease(renewer, store, "slow", 25)

    assert [10, 16, 22] == pytest.approx(store.extension_times("slow", started))


@pytest.mark.parametrize("delay_s", [4, 100])
async def test_renewals_end_with_the_lease(delay_s: float) -> None:
    """A lease that ends during a renewal is not renewed again."""
    store, renewer = RecordingStore(delay_s=delay_s, slow_key="slow"), LeaseRenewer(LEASE_S)
    await hold_lease(renewer, store, "slow", 12)
    await hold_lease(renewer, store, "other", 16)
    await asyncio.sleep(100)

    assert ["slow", "other"] == [key for key, _ in store.started]


async def test_lost_lease_is_not_renewed_again() -> None:
    """A lease whose key has another owner is not renewed again."""
    store, renewer = RecordingStore(), LeaseRenewer(LEASE_S)
    await store.claim("k", "print", "another", 1000)
    lease = make_lease(store, "k")  # without a claim
    renewer.add(lease)
    await asyncio.sleep(100)

    assert ["k"] == store.finished


async def test_cancelled_timer_is_restarted() -> None:
    """Leases are renewed even if all tasks of the event loop were cancelled before."""
    store, renewer = RecordingStore(), LeaseRenewer(LEASE_S)
    await hold_lease(renewer, store, "first", 1)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    started = await hold_lease(renewer, store, "second", 11)

    assert [10] == pytest.approx(store.extension_times("second", started))


def test_renewer_works_on_a_second_loop(
    run_async: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
) -> None:
    """A renewer that was used on one event loop renews leases on the next one."""
    store, renewer = RecordingStore(), LeaseRenewer(LEASE_S)

    async def main() -> None:
        store.started.clear()
        started = await hold_lease(renewer, store, "k", 11)
        assert [10] == pytest.approx(store.extension_times("k", started))
        await asyncio.sleep(LEASE_S)

    run_async(main)
    run_async(main)
