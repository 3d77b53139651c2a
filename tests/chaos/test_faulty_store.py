"""Each fault that `FaultyStore` injects, with a simulated process that does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import NewTask
from tarry.testing import VirtualClock
from tests.chaos.environment import Environment, SimulatedProcess, run_unless_suspended
from tests.chaos.faulty_store import FaultyStore
from tests.chaos.simulated_stores import ReferenceStores
from tests.service.stores.harness import LEASE, task


class StoreHarness:
    """Two processes, each with a faulty store over the same data; no fault happens at first."""

    def __init__(self) -> None:
        self.environment = Environment(1, ReferenceStores())
        self.environment.faults.stop()
        self.environment.world.tenants = ["acme"]
        self.processes = [SimulatedProcess(self.environment, name, 0.0) for name in ("p1", "p2")]
        self.stores = [
            FaultyStore(process, self.environment.open_store()) for process in self.processes
        ]

    async def count_pending(self) -> int:
        """Return the number of pending tasks, read without faults."""
        return (await self.environment.store.counters()).task_counts[Status.PENDING]


@pytest.fixture(autouse=True)
def run_async() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run coroutine functions in virtual time, in which processes can be suspended."""
    run_handle = asyncio.Handle._run

    def run(main: Callable[[], Awaitable[None]]) -> None:
        with (
            patch.object(
                asyncio.Handle, "_run", lambda handle: run_unless_suspended(handle, run_handle)
            ),
            VirtualClock(start=1000.0) as clock,
        ):
            clock.run(main)

    return run


async def test_a_rejected_call_has_no_effect() -> None:
    """A rejected call raises `StoreUnavailable`, and nothing is stored."""
    harness = StoreHarness()
    harness.environment.faults.store_rejection = 1.0
    with pytest.raises(StoreUnavailable, match="add: the call was rejected"):
        await harness.stores[0].add([NewTask(task(1))])
    assert 0 == await harness.count_pending()


async def test_a_call_whose_reply_is_lost_has_an_effect() -> None:
    """A call whose reply is lost raises `StoreUnavailable`, and the task is stored."""
    harness = StoreHarness()
    harness.environment.faults.store_reply_loss = 1.0
    with pytest.raises(StoreUnavailable, match="add: the reply was lost"):
        await harness.stores[0].add([NewTask(task(1))])
    assert 1 == await harness.count_pending()


async def test_a_call_that_times_out_has_a_late_effect() -> None:
    """A call that times out has its effect later, also if the process has crashed."""
    harness = StoreHarness()
    harness.environment.faults.store_late_effect = 1.0
    with pytest.raises(StoreUnavailable, match="add: the call timed out"):
        await harness.stores[0].add([NewTask(task(1))])
    harness.processes[0].kill()
    assert 0 == await harness.count_pending()
    await asyncio.sleep(20)
    assert 1 == await harness.count_pending()


async def test_a_late_release_of_unknown_leases_keeps_newer_leases() -> None:
    """Only leases that were unknown when the call was made are released late."""
    harness = StoreHarness()
    store, faults = harness.stores[0], harness.environment.faults
    await store.add([NewTask(task(1))])
    faults.store_late_effect = 1.0
    with pytest.raises(StoreUnavailable):
        await store.release_unknown_leases(LEASE, [])
    faults.store_late_effect = 0.0
    assert 1 == len((await store.claim(LEASE, limit=1, per_lane=1)).tasks)
    await asyncio.sleep(20)
    assert 0 == await harness.count_pending()


async def test_a_suspended_process_runs_no_code() -> None:
    """The timers and tasks of a suspended process continue when the suspension has ended."""
    harness = StoreHarness()
    process, loop = harness.processes[0], asyncio.get_running_loop()
    times: list[float] = []

    async def tick() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            times.append(loop.time() - started_at)

    started_at = loop.time()
    loop.call_later(1.5, process.suspend, 30.0)
    await process.run(tick())
    assert pytest.approx([1.0, 31.5, 32.5]) == times


async def test_wakeups_reach_other_live_processes() -> None:
    """A process wakes the others, sometimes late, repeatedly or not at all, but not itself."""
    harness = StoreHarness()
    wakeups = [0, 0]

    def count_wakeups(index: int) -> Callable[[], None]:
        def count() -> None:
            wakeups[index] += 1

        return count

    for index, store in enumerate(harness.stores):
        store.listen(count_wakeups(index))
    for number in range(20):
        await harness.stores[0].add([NewTask(task(number))])
    immediate = wakeups[1]
    await asyncio.sleep(20)
    assert 0 == wakeups[0]
    assert immediate < wakeups[1]
    harness.processes[1].kill()
    before = wakeups[1]
    await harness.stores[0].add([NewTask(task(50))])
    await asyncio.sleep(20)
    assert before == wakeups[1]
