"""The store in memory: the conformance cases, and that its heaps and lines stay small."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tarry.runtime.clocks import system
from tarry.service.store import Retention, Store, TaskFilter
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import (
    DAY_MS,
    LANE,
    LEASE,
    MINUTE_MS,
    START_MS,
    ManualClock,
    retry_result,
    success_result,
    task,
)
from tests.service.stores.model_store import Data, ModelStore
from tests.service.stores.model_store.rows import Queue


def harness() -> StoreHarness:
    """A bench whose stores share one `Data`."""
    data = Data()
    return StoreHarness(lambda clock: ModelStore(clock, data))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case) -> None:
    """The store does what every store must do."""
    asyncio.run(harness().run(case))


def test_time_is_the_wall_clock_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock of its own the store has milliseconds since 1970."""
    monkeypatch.setattr(system, "unix_time", lambda: 5.25)

    assert 5250 == asyncio.run(ModelStore().ping())


def test_nothing_in_it_waits() -> None:
    """Each call ends at its first step, so that a simulation stays deterministic."""
    store: Store = ModelStore(ManualClock())
    calls: list[Coroutine[Any, Any, object]] = [
        store.open(),
        store.add([]),
        store.claim(LEASE, limit=1, per_lane=1),
        store.finish([]),
        store.list_tasks("acme", TaskFilter()),
        store.close(),
    ]
    for call in calls:
        with pytest.raises(StopIteration):
            call.send(None)


def test_notes_do_not_pile_up() -> None:
    """A task that is leased, kept and made to wait for ever costs no more memory than one."""

    async def main(harness: StoreHarness) -> None:
        held = await harness.leased(1)
        for _ in range(2000):
            await harness.store.finish([retry_result(held, harness.clock.now, keep=LEASE)])
            held = await harness.get(1)
            await harness.store.finish([retry_result(held, harness.clock.now + DAY_MS)])
            await harness.store.retry_now("acme", held.id)
            [held] = (await harness.claim()).tasks
        await harness.store.finish([success_result(held)])

        assert isinstance(harness.store, ModelStore)
        data = harness.store.data
        queue = data.queues[LANE]
        assert max(len(notes._heap) for notes in (queue.waiting, queue.leases)) < 100
        assert max(len(alarms._heap) for alarms in (data.soon, data.late)) < 100

    asyncio.run(harness().run(main))


def test_what_was_removed_leaves_nothing() -> None:
    """Tasks that come and go leave no list behind them that grows, nor an endless series."""

    async def main(harness: StoreHarness) -> None:
        for number in range(500):
            held = await harness.leased(number)
            await harness.store.finish([retry_result(held, harness.clock.now, keep=LEASE)])
            await harness.store.cancel("acme", held.id)
            await harness.store.release([])
            await harness.store.finish([success_result(await harness.get(number))])
            harness.clock.advance(5 * MINUTE_MS)
            await harness.store.sweep(Retention(MINUTE_MS, MINUTE_MS), 10)

        assert isinstance(harness.store, ModelStore)
        data = harness.store.data
        tenant = data.tenants["acme"]
        assert (0, 0, 0) == (len(data.rows), len(data.ids), len(data.ended[False]))
        assert len(tenant.numbers) < 3
        assert len(tenant.series) <= DAY_MS // MINUTE_MS // 5 + 1

    asyncio.run(harness().run(main))


def test_a_claim_looks_only_at_lanes_with_something_to_give() -> None:
    """Lanes that are parked, paused or due later are not even looked at."""

    async def main(harness: StoreHarness) -> None:
        for number in range(300):
            given = task(
                number, f"h{number}", next_attempt_at=START_MS + (number % 3 == 0) * DAY_MS
            )
            await harness.add(given)
            if number % 3 == 1:
                await harness.store.park(given.lane, START_MS + DAY_MS, probes=1, opened=1)
            elif number % 3 == 2:
                await harness.store.pause(given.lane)
        await harness.add(task(999))
        assert isinstance(harness.store, ModelStore)
        looked: list[str] = []
        data = harness.store.data
        call = data.call

        def spy() -> Queue | None:
            queue = call()
            looked.extend([queue.lane.name] if queue else [])
            return queue

        data.call = spy  # type: ignore[method-assign]
        await harness.claim()
        assert [LANE] == looked

    asyncio.run(harness().run(main))
