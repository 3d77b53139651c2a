"""Renewals: leases that share a timer, on one loop or several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from tarry.idempotency import MemoryStore
from tarry.idempotency.lease import KeyLease, LeaseContext, LeaseRenewer
from tarry.testing import VirtualClock
from tests.idempotency.asking import scope_of

LEASE = 30.0
INTERVAL = LEASE / 3
ROUNDING = 1e-6  # the clock begins at the machine's own time, whose last digits differ


class Watched(MemoryStore):
    """A store that notes when which key was extended."""

    def __init__(self, takes: float = 0.0, slow: str = "") -> None:
        super().__init__()
        self.takes, self.slow = takes, slow
        self.begun: list[tuple[str, float]] = []
        self.ended: list[str] = []

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Note it, and take some time for the slow key."""
        self.begun.append((key, asyncio.get_running_loop().time()))
        if key == self.slow:
            await asyncio.sleep(self.takes)
        held = await super().extend(key, fingerprint, owner, lease)
        self.ended.append(key)
        return held

    def times(self, key: str, start: float) -> list[float]:
        """When a key was extended, counted from a moment."""
        return [moment - start for name, moment in self.begun if name == key]


def lease_of(store: MemoryStore, key: str) -> KeyLease:
    """A lease that a middleware would make."""
    terms = LeaseContext(
        store, lease=LEASE, retention=60.0, max_response_bytes=0, store_errors=False
    )
    return KeyLease(terms, key, "print", scope_of())


async def request(renewals: LeaseRenewer, store: MemoryStore, key: str, seconds: float) -> float:
    """Hold a key for so long, and return when that began."""
    begun = asyncio.get_running_loop().time()
    lease = lease_of(store, key)
    await lease.claim()
    renewed = renewals.add(lease)
    await asyncio.sleep(seconds)
    del renewed[lease]
    return begun


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run without waiting."""
    with VirtualClock() as clock:
        clock.run(main)


def test_short_requests_are_never_renewed_and_leave_no_timer() -> None:
    """What ends before its first renewal asks nothing of the store, and the timer stops."""

    async def main() -> None:
        store, renewals = Watched(), LeaseRenewer(LEASE)
        for number in range(20):
            await request(renewals, store, str(number), 0.9 * INTERVAL)
        await asyncio.sleep(INTERVAL)

        assert [] == store.begun
        assert renewals._loop_leases is not None
        assert (False, {}) == (renewals._loop_leases.is_timer_running, renewals._loop_leases.due)

    in_virtual_time(main)


@pytest.mark.parametrize("later", [0.0, 0.1, 4.9, 5.0, 7.0, 12.5])
def test_each_lease_is_renewed_in_time_whenever_it_began(later: float) -> None:
    """Two chances before the lease ends: the first within half of it, each next likewise."""

    async def main() -> None:
        store, renewals = Watched(), LeaseRenewer(LEASE)
        first = asyncio.create_task(request(renewals, store, "first", 100))
        await asyncio.sleep(later)
        second = asyncio.create_task(request(renewals, store, "second", 100))

        for key, task in (("first", first), ("second", second)):
            moments = [0.0, *store.times(key, await task), 100.0]
            gaps = [after - before for before, after in pairwise(moments)]
            assert INTERVAL - ROUNDING <= min(gaps[:-1])
            assert max(gaps) <= LEASE / 2 + ROUNDING

    in_virtual_time(main)


def test_a_slow_renewal_holds_up_no_other_and_is_not_doubled() -> None:
    """While the store takes long over one lease, the others are renewed; that one is not again."""

    async def main() -> None:
        store, renewals = Watched(takes=4.5, slow="slow"), LeaseRenewer(LEASE)
        slow, other = await asyncio.gather(
            request(renewals, store, "slow", 34), request(renewals, store, "other", 34)
        )

        assert [10, 20, 30] == pytest.approx(store.times("other", other))
        assert [10, 20, 30] == pytest.approx(store.times("slow", slow))

    in_virtual_time(main)


def test_what_the_store_cannot_do_is_tried_again_soon() -> None:
    """A renewal that does not end in a sixth of the lease is cut off, and tried after a second."""

    async def main() -> None:
        store, renewals = Watched(takes=100, slow="slow"), LeaseRenewer(LEASE)
        begun = await request(renewals, store, "slow", 25)

        assert [10, 16, 22] == pytest.approx(store.times("slow", begun))

    in_virtual_time(main)


@pytest.mark.parametrize("takes", [4, 100])
def test_a_renewal_ends_with_its_request(takes: float) -> None:
    """When its request has ended, a lease is not renewed again, whatever the store said."""

    async def main() -> None:
        store, renewals = Watched(takes=takes, slow="slow"), LeaseRenewer(LEASE)
        await request(renewals, store, "slow", 12)
        await request(renewals, store, "other", 16)
        await asyncio.sleep(100)

        assert ["slow", "other"] == [key for key, _ in store.begun]

    in_virtual_time(main)


def test_a_lost_lease_is_not_renewed_again() -> None:
    """Once the store says that the key is another's, it is not asked any more."""

    async def main() -> None:
        store, renewals = Watched(), LeaseRenewer(LEASE)
        await store.claim("k", "print", "another", 1000)
        lease = lease_of(store, "k")  # it does not claim
        renewals.add(lease)
        await asyncio.sleep(100)

        assert ["k"] == store.ended

    in_virtual_time(main)


def test_a_timer_that_was_cancelled_is_started_again() -> None:
    """Whoever cancels all tasks of a loop does not end the renewals of later requests."""

    async def main() -> None:
        store, renewals = Watched(), LeaseRenewer(LEASE)
        await request(renewals, store, "first", 1)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        begun = await request(renewals, store, "second", 11)

        assert [10] == pytest.approx(store.times("second", begun))

    in_virtual_time(main)


def test_one_loop_after_another_is_served() -> None:
    """A middleware that outlives its loop renews on the next one."""
    store, renewals = Watched(), LeaseRenewer(LEASE)

    async def main() -> None:
        store.begun.clear()
        begun = await request(renewals, store, "k", 11)
        assert [10] == pytest.approx(store.times("k", begun))
        await asyncio.sleep(LEASE)

    in_virtual_time(main)
    in_virtual_time(main)
