"""The last known counters of the store, which the metrics page shows without a wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.engine import store_values
from tarry.service.engine.store_values import StoreValuesCache
from tarry.service.model import Status
from tarry.service.store import Counters, Store


class FakeStore:
    """A store whose counters the test sets, and that hangs while `responds` is not set."""

    def __init__(self) -> None:
        self.pending = 1
        self.is_leader = True
        self.error: Exception | None = None
        self.responds = asyncio.Event()
        self.responds.set()
        self.read_tenants: list[str | None] = []
        """The tenants of the calls of `counters`."""

    async def try_lead(self) -> bool:
        """Return whether this process reports the tasks."""
        await self.responds.wait()
        if self.error is not None:
            raise self.error
        return self.is_leader

    async def counters(self, tenant: str | None = None) -> Counters:
        """Return the number of pending tasks."""
        self.read_tenants.append(tenant)
        return Counters({Status.PENDING: self.pending})


class Harness:
    """A cache with a clock that the test advances."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.now = 1_000.0
        self.cache = StoreValuesCache(cast("Store", self.store), lambda: self.now)

    async def get(self, tenant: str | None = None) -> tuple[int | None, float]:
        """Return the pending tasks and the age of the values."""
        counters, age_s = await self.cache.get(tenant)
        return None if counters is None else counters.task_counts[Status.PENDING], age_s


@asynccontextmanager
async def open_harness() -> AsyncIterator[Harness]:
    """Return a harness, and close its cache."""
    harness = Harness()
    try:
        yield harness
    finally:
        await harness.cache.close()


async def settle() -> None:
    """Wait until reads of the store that do not block have ended."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_request_waits_for_the_values() -> None:
    """The first page has values; a later page has those that were read for the one before it."""
    async with open_harness() as harness:
        assert (1, 0.0) == await harness.get()
        harness.store.pending = 2
        harness.now += 15.0
        assert (1, 15.0) == await harness.get()
        await settle()
        assert (2, 0.0) == await harness.get()
        assert 2 == len(harness.store.read_tenants)


async def test_a_store_that_hangs_leaves_the_last_values() -> None:
    """While the store does not respond, each request gets the last values and their age."""
    async with open_harness() as harness:
        await harness.get()
        harness.store.responds.clear()
        for age_s in (30.0, 60.0, 90.0):
            harness.now += 30.0
            assert (1, age_s) == await harness.get()
        harness.store.responds.set()
        await settle()
        assert 1 == (await harness.get())[0]
        assert 2 == len(harness.store.read_tenants)


async def test_the_wait_for_the_first_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store hangs from the start, the first request gets no values after the timeout."""
    monkeypatch.setattr(store_values, "_MAX_FIRST_WAIT_S", 0.0)

    async with open_harness() as harness:
        harness.store.responds.clear()
        assert (None, float("inf")) == await harness.get()


@pytest.mark.parametrize("error", [StoreUnavailable("disk full"), ValueError("unexpected")])
async def test_an_error_of_the_store_leaves_the_last_values(error: Exception) -> None:
    """A read that fails changes nothing."""
    async with open_harness() as harness:
        await harness.get()
        harness.store.error = error
        for _ in range(2):
            harness.now += 10.0
            await harness.get()
            await settle()
        assert (1, 20.0) == await harness.get()


async def test_only_the_leader_has_values() -> None:
    """A process that is not the leader any more reports no values."""
    async with open_harness() as harness:
        await harness.get()
        harness.store.is_leader = False
        harness.now += 10.0
        await harness.get()
        await settle()
        assert None is (await harness.get())[0]


async def test_values_in_use_are_read_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reads the values of tenants that were requested in the last two minutes."""
    monkeypatch.setattr(store_values, "_INTERVAL_S", 0.0)

    async with open_harness() as harness:
        await harness.get("ann")
        await harness.get("bob")
        loop = asyncio.create_task(harness.cache.run())
        harness.now += 100.0
        await harness.get("bob")
        harness.now += 50.0  # ann asked 150 s ago
        harness.store.read_tenants.clear()
        for _ in range(3):
            await settle()
        assert {"bob"} == set(harness.store.read_tenants)
        loop.cancel()


async def test_the_number_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the tenants that asked last are kept."""
    monkeypatch.setattr(store_values, "_MAX_TENANTS", 2)

    async with open_harness() as harness:
        for tenant in ("ann", "bob", "ann", "eve"):
            await harness.get(tenant)
        assert ["ann", "eve"] == list(harness.cache._entries)
