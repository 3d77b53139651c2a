"""Renewal of leases that share a timer, on one event loop or several."""

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

LEASE = 30.0
INTERVAL = LEASE / 3
ROUNDING = 1e-6  # the clock begins at the machine's own time, whose last digits differ


class RecordingStore(MemoryStore):
    """A store that records when each key was extended."""

    def __init__(self, delay: float = 0.0, slow: str = "") -> None:
        super().__init__()
        self.delay, self.slow = delay, slow
        self.started: list[tuple[str, float]] = []
        self.finished: list[str] = []

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Record the call, and take some time for the slow key."""
        self.started.append((key, asyncio.get_running_loop().time()))
        if key == self.slow:
            await asyncio.sleep(self.delay)
        extended = await super().extend(key, fingerprint, owner, lease)
        self.finished.append(key)
        return extended

    def times(self, key: str, start: float) -> list[float]:
        """Return when a key was extended, in seconds since `start`."""
        return [moment - start for name, moment in self.started if name == key]


def new_lease(store: MemoryStore, key: str) -> KeyLease:
    """Return a lease as the middleware creates it."""
    context = LeaseContext(
        store, lease_s=LEASE, retention_s=60.0, max_response_bytes=0, stores_error_responses=False
    )
    return KeyLease(context, key, "print", make_scope())


async def hold_lease(renewer: LeaseRenewer, store: MemoryStore, key: str, seconds: float) -> float:
    """Hold the lease of a key for some seconds; return when that began."""
    started = asyncio.get_running_loop().time()
    lease = new_lease(store, key)
    await lease.claim()
    renewed = renewer.add(lease)
    await asyncio.sleep(seconds)
    del renewed[lease]
    return started


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function in virtual time."""
    with VirtualClock() as clock:
        clock.run(main)


def test_short_requests_are_not_renewed() -> None:
    """A request that ends before its first renewal causes no store call, and the timer stops."""

    async def main() -> None:
        store, renewer = RecordingStore(), LeaseRenewer(LEASE)
        for number in range(20):
            await hold_lease(renewer, store, str(number), 0.9 * INTERVAL)
        await asyncio.sleep(INTERVAL)

        assert [] == store.started
        assert renewer._loop_leases is not None
        assert (False, {}) == (
            renewer._loop_leases.is_timer_running,
            renewer._loop_leases.next_renewals,
        )

    in_virtual_time(main)


@pytest.mark.parametrize("later", [0.0, 0.1, 4.9, 5.0, 7.0, 12.5])
def test_each_lease_is_renewed_in_time(later: float) -> None:
    """Whenever a lease began, each renewal comes before half of it has passed."""

    async def main() -> None:
        store, renewer = RecordingStore(), LeaseRenewer(LEASE)
        first = asyncio.create_task(hold_lease(renewer, store, "first", 100))
        await asyncio.sleep(later)
        second = asyncio.create_task(hold_lease(renewer, store, "second", 100))

        for key, task in (("first", first), ("second", second)):
            moments = [0.0, *store.times(key, await task), 100.0]
            gaps = [after - before for before, after in pairwise(moments)]
            assert INTERVAL - ROUNDING <= min(gaps[:-1])
            assert max(gaps) <= LEASE / 2 + ROUNDING

    in_virtual_time(main)


def test_slow_renewal_does_not_delay_others() -> None:
    """While one renewal is slow, others are made, and the slow one is not started twice."""

    async def main() -> None:
        store, renewer = RecordingStore(delay=4.5, slow="slow"), LeaseRenewer(LEASE)
        slow, other = await asyncio.gather(
            hold_lease(renewer, store, "slow", 34), hold_lease(renewer, store, "other", 34)
        )

        assert [10, 20, 30] == pytest.approx(store.times("other", other))
        assert [10, 20, 30] == pytest.approx(store.times("slow", slow))

    in_virtual_time(main)


def test_failed_renewal_is_retried() -> None:
    """A renewal that takes more than a sixth of the lease is cancelled and retried after 1 s."""

    async def main() -> None:
        store, renewer = RecordingStore(delay=100, slow="slow"), LeaseRenewer(LEASE)
        started = await hold_lease(renewer, store, "slow", 25)

        assert [10, 16, 22] == pytest.approx(store.times("slow", started))

    in_virtual_time(main)


@pytest.mark.parametrize("delay", [4, 100])
def test_renewals_end_with_the_request(delay: float) -> None:
    """After its request has ended, a lease is not renewed again, whatever the store returned."""

    async def main() -> None:
        store, renewer = RecordingStore(delay=delay, slow="slow"), LeaseRenewer(LEASE)
        await hold_lease(renewer, store, "slow", 12)
        await hold_lease(renewer, store, "other", 16)
        await asyncio.sleep(100)

        assert ["slow", "other"] == [key for key, _ in store.started]

    in_virtual_time(main)


def test_lost_lease_is_not_renewed_again() -> None:
    """Once the key has another owner, the lease is not renewed any more."""

    async def main() -> None:
        store, renewer = RecordingStore(), LeaseRenewer(LEASE)
        await store.claim("k", "print", "another", 1000)
        lease = new_lease(store, "k")  # it does not claim
        renewer.add(lease)
        await asyncio.sleep(100)

        assert ["k"] == store.finished

    in_virtual_time(main)


def test_cancelled_timer_is_started_again() -> None:
    """Cancelling all tasks of a loop does not stop the renewals of later requests."""

    async def main() -> None:
        store, renewer = RecordingStore(), LeaseRenewer(LEASE)
        await hold_lease(renewer, store, "first", 1)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        started = await hold_lease(renewer, store, "second", 11)

        assert [10] == pytest.approx(store.times("second", started))

    in_virtual_time(main)


def test_renewer_works_on_a_second_loop() -> None:
    """A middleware that outlives its event loop renews leases on the next one."""
    store, renewer = RecordingStore(), LeaseRenewer(LEASE)

    async def main() -> None:
        store.started.clear()
        started = await hold_lease(renewer, store, "k", 11)
        assert [10] == pytest.approx(store.times("k", started))
        await asyncio.sleep(LEASE)

    in_virtual_time(main)
    in_virtual_time(main)
