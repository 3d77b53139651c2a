"""The reference store: conformance, determinism, and bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tarry.runtime.effects import effects
from tarry.service.store import Retention, Store, StoredTaskFilter
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
from tests.service.stores.reference_store import ReferenceState, ReferenceStore
from tests.service.stores.reference_store.state import Queue


def new_harness() -> StoreHarness:
    """Return a harness whose stores share one `ReferenceState`."""
    state = ReferenceState()
    return StoreHarness(lambda clock: ReferenceStore(clock, state))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case) -> None:
    """The reference store passes the conformance suite."""
    asyncio.run(new_harness().run(case))


def test_default_clock_is_the_system_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock argument the store's time is the Unix time in milliseconds."""
    monkeypatch.setattr(effects, "unix_time", lambda: 5.25)

    assert 5250 == asyncio.run(ReferenceStore().ping())


def test_no_method_suspends() -> None:
    """No call suspends, so that a simulation is deterministic."""
    store: Store = ReferenceStore(ManualClock())
    calls: list[Coroutine[Any, Any, object]] = [
        store.open(),
        store.add([]),
        store.claim(LEASE, limit=1, per_lane=1),
        store.finish([]),
        store.list_tasks("acme", StoredTaskFilter()),
        store.close(),
    ]
    for call in calls:
        with pytest.raises(StopIteration):
            call.send(None)


def test_heaps_stay_small() -> None:
    """Heaps stay small although a task changes its state thousands of times."""

    async def main(harness: StoreHarness) -> None:
        leased = await harness.lease_new_task(1)
        for _ in range(2000):
            await harness.store.finish(
                [retry_result(leased, harness.clock.now, renewed_lease=LEASE)]
            )
            leased = await harness.get_task(1)
            await harness.store.finish([retry_result(leased, harness.clock.now + DAY_MS)])
            await harness.store.retry_now("acme", leased.id)
            [leased] = (await harness.claim()).tasks
        await harness.store.finish([success_result(leased)])

        assert isinstance(harness.store, ReferenceStore)
        state = harness.store.state
        queue = state.queues[LANE]
        heaps = (queue.first_attempts, queue.retries, queue.expired_leases, queue.leases)
        assert max(len(heap._heap) for heap in heaps) < 100
        assert (
            max(len(times._heap) for times in (state.due_wake_times, state.expiry_wake_times)) < 100
        )

    asyncio.run(new_harness().run(main))


def test_deleted_tasks_use_no_memory() -> None:
    """After 500 tasks were deleted, only the attempts per minute of the last day are left."""

    async def main(harness: StoreHarness) -> None:
        for number in range(500):
            leased = await harness.lease_new_task(number)
            await harness.store.finish(
                [retry_result(leased, harness.clock.now, renewed_lease=LEASE)]
            )
            await harness.store.cancel("acme", leased.id)
            await harness.store.release([])
            await harness.store.finish([success_result(await harness.get_task(number))])
            harness.clock.advance(5 * MINUTE_MS)
            await harness.store.sweep(Retention(MINUTE_MS, MINUTE_MS), 10)

        assert isinstance(harness.store, ReferenceStore)
        state = harness.store.state
        tenant = state.tenants["acme"]
        assert (0, 0, 0) == (len(state.rows), len(state.ids), len(state.finished[False]))
        assert len(tenant.numbers) < 3
        assert len(tenant.attempts_per_minute) <= DAY_MS // MINUTE_MS // 5 + 1

    asyncio.run(new_harness().run(main))


def test_a_claim_visits_only_lanes_with_claimable_tasks() -> None:
    """A claim visits no lane that is parked, paused or without a due task."""

    async def main(harness: StoreHarness) -> None:
        for number in range(300):
            new = task(number, f"h{number}", next_attempt_at=START_MS + (number % 3 == 0) * DAY_MS)
            await harness.add(new)
            if number % 3 == 1:
                await harness.store.park(new.lane, START_MS + DAY_MS, probes=1, consecutive_opens=1)
            elif number % 3 == 2:
                await harness.store.pause(new.lane)
        await harness.add(task(999))
        assert isinstance(harness.store, ReferenceStore)
        visited: list[str] = []
        state = harness.store.state
        pop_lane = state.pop_lane

        def record_lane() -> Queue | None:
            queue = pop_lane()
            visited.extend([queue.lane.name] if queue else [])
            return queue

        state.pop_lane = record_lane  # type: ignore[method-assign]
        await harness.claim()
        assert [LANE] == visited

    asyncio.run(new_harness().run(main))
