"""The retry budget of a lane: its balance, and how processes share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import e
from pathlib import Path
from typing import TypeVar

import pytest

from tarry.core.outcome import SUCCESS, TRANSIENT
from tarry.service.engine.retry_budget import SharedBudget
from tarry.service.store import LeaseTerms
from tarry.service.stores.sqlite.transaction import ReadTransaction, WriteTransaction
from tarry.service.stores.sqlite.worker_locks import WorkerLock
from tarry.wire.tasks import BreakerSettings, BudgetSettings, DownstreamLimits
from tests.service.engine.harness import BUSY, EPOCH_S, OK, EngineHarness, FakeTarget
from tests.service.stores.synchronous_store import SynchronousSqliteStore

T = TypeVar("T")
LANE = "default/http:a.example:80"
NOW_S = 1000.0


def test_a_new_budget_admits_the_retries_of_one_second() -> None:
    """More retries are admitted when the value in the store is known: the budget may be empty."""
    budget = SharedBudget(0.3, 10)
    assert 10 == budget.balance(NOW_S)
    assert [True] * 10 + [False] == [budget.withdraw(1.0, NOW_S) for _ in range(11)]
    assert budget.is_outdated
    assert -10 == budget.take_change(NOW_S)
    assert not budget.is_outdated
    budget.adopt(-10.0, process_count=1)
    assert 90 == budget.balance(NOW_S)


def test_calls_fill_the_budget_and_retries_are_charged() -> None:
    """Each call adds its ratio, a retry that never started is refunded, and the value decays."""
    budget = SharedBudget(0.5, 0)
    for _ in range(8):
        budget.record(SUCCESS, 0.0, NOW_S)
    assert not budget.is_outdated
    assert 4 == budget.balance(NOW_S)
    assert budget.withdraw(1.0, NOW_S)
    budget.deposit(1.0, NOW_S)
    budget.record(TRANSIENT, 1.0, NOW_S)
    assert 4 == budget.balance(NOW_S)
    assert pytest.approx(4 / e) == budget.balance(NOW_S + 10)
    assert pytest.approx(4 / e) == budget.take_change(NOW_S + 10)


def test_a_retry_that_succeeds_is_refunded() -> None:
    """A retry that succeeds does not count towards the limit; one that fails does."""
    budget = SharedBudget(0.5, 1)
    budget.adopt(0.0, process_count=1)
    for outcome in (SUCCESS, TRANSIENT):
        assert budget.withdraw(1.0, NOW_S)
        budget.record(outcome, 1.0, NOW_S)
    assert 9 == budget.balance(NOW_S)
    assert -1 == budget.take_change(NOW_S)


def test_calls_that_fail_need_an_exchange() -> None:
    """A failed call makes the budget outdated, so that its value is read before the retry."""
    budget = SharedBudget(0.5, 0)
    budget.record(TRANSIENT, 0.0, NOW_S)
    assert budget.is_outdated


def test_changes_during_an_exchange_are_kept() -> None:
    """A retry that starts while the store adds the changes is charged to the adopted value."""
    budget = SharedBudget(0.5, 1)
    budget.take_change(NOW_S)
    assert budget.withdraw(1.0, NOW_S)
    budget.adopt(3.0, process_count=1)
    assert 12 == budget.balance(NOW_S)
    assert -1 == budget.take_change(NOW_S)


def test_each_process_has_an_equal_share_of_the_balance() -> None:
    """Together, the processes cannot spend more than the balance before the next exchange."""
    budget = SharedBudget(0.3, 10)
    budget.adopt(-40.0, process_count=3)
    assert 20 == budget.balance(NOW_S)
    budget.adopt(-110.0, process_count=3)
    assert 0 == budget.balance(NOW_S)


class KillableStore(SynchronousSqliteStore):
    """A store whose process can be killed: further calls have no effect and never return."""

    def __init__(self, path: Path, clock: Callable[[], int]) -> None:
        super().__init__(path, clock)
        self._is_killed = False

    async def kill(self) -> None:
        """End the process as SIGKILL does: it stores nothing, and the system frees its locks."""
        self._is_killed = True
        await self.close()

    async def write(
        self, operation: Callable[[WriteTransaction], T], weight: int = 1, *, urgent: bool = True
    ) -> T:
        """Run an operation, unless the process was killed."""
        if self._is_killed:
            await asyncio.Event().wait()
        return await super().write(operation, weight, urgent=urgent)

    async def read(self, query: Callable[[ReadTransaction], T]) -> T:
        """Run a query, unless the process was killed."""
        if self._is_killed:
            await asyncio.Event().wait()
        return await super().read(query)


async def start_process(path: Path, number: int) -> EngineHarness:
    """Start a process on the file; its lane exists."""
    loop = asyncio.get_running_loop()
    store = KillableStore(path, lambda: int((EPOCH_S + loop.time()) * 1000))
    store.database.worker_lock = WorkerLock(path)  # shows how many processes there are
    await store.open()
    lease = LeaseTerms(f"process {number}", 70_000, 1_000)
    harness = EngineHarness(FakeTarget(OK), store=store, seed=number, lease=lease)
    await harness.engine.start()
    await harness.add(harness.new_task())
    return harness


async def stop_process(harness: EngineHarness) -> None:
    """Stop a process as SIGTERM does."""
    await harness.engine.stop(1)
    await harness.store.close()


async def spend(harness: EngineHarness, seconds: int) -> int:
    """Withdraw retries as soon as the budget admits them; return their number."""
    count = 0
    for _ in range(seconds * 10):
        budget = harness.lanes[LANE].downstream.budget
        assert budget is not None
        while budget.withdraw(1.0, harness.context.clock.now_s()):
            count += 1
        await asyncio.sleep(0.1)
    return count


async def test_processes_share_the_budget_of_a_lane(tmp_path: Path) -> None:
    """Two processes on one file admit as many retries as one: 100, and then 10 per second."""
    processes = [await start_process(tmp_path / "tasks.db", number) for number in (1, 2)]
    await asyncio.sleep(2)
    counts = await asyncio.gather(*(spend(process, 60) for process in processes))
    assert 600 <= sum(counts) <= 720
    for process in processes:
        await stop_process(process)


async def test_restart_does_not_fill_the_budget(tmp_path: Path) -> None:
    """A process continues with the budget of the process before it, which was empty."""
    first = await start_process(tmp_path / "tasks.db", 1)
    await spend(first, 30)
    await stop_process(first)

    second = await start_process(tmp_path / "tasks.db", 2)
    assert await spend(second, 10) <= 120
    await stop_process(second)


async def test_kill_does_not_fill_the_budget(tmp_path: Path) -> None:
    """Only the retries of the last second are not charged if a process is killed."""
    first = await start_process(tmp_path / "tasks.db", 1)
    await spend(first, 30)
    assert isinstance(first.store, KillableStore)
    await first.store.kill()

    second = await start_process(tmp_path / "tasks.db", 2)
    [value] = (await second.store.add_to_budgets({LANE: 0.0})).values()
    assert -100 <= value <= -80
    assert await spend(second, 10) <= 120
    await stop_process(second)


async def test_reset_fills_the_budget(tmp_path: Path) -> None:
    """An operator can allow the retries that an empty budget defers."""
    process = await start_process(tmp_path / "tasks.db", 1)
    await spend(process, 30)
    await process.engine.reset(LANE)
    assert await spend(process, 10) >= 180
    await stop_process(process)


async def test_stop_stores_the_last_changes(tmp_path: Path) -> None:
    """The retries since the last exchange are charged, too."""
    process = await start_process(tmp_path / "tasks.db", 1)
    budget = process.lanes[LANE].downstream.budget
    assert budget is not None
    for _ in range(5):
        assert budget.withdraw(1.0, process.context.clock.now_s())
    await process.engine.stop(1)
    values = await process.store.add_to_budgets({LANE: 0.0})
    assert {LANE: pytest.approx(-5.0, abs=0.5)} == values
    await process.store.close()


async def test_deferred_tasks_are_late_since_they_were_first_due() -> None:
    """While the budget is empty, the age of the oldest due task grows, with the reason."""
    loop = asyncio.get_running_loop()
    harness = EngineHarness(FakeTarget(BUSY))
    await harness.engine.start()
    limits = DownstreamLimits(
        breaker=BreakerSettings(enabled=False), budget=BudgetSettings(ratio=0.01, min_per_second=0)
    )
    await harness.engine.set_limits(LANE, limits)
    added = await harness.add(*(harness.new_task() for _ in range(20)))
    started = loop.time()
    ages: list[float] = []
    for _ in range(30):
        await asyncio.sleep(10)
        backlog = await harness.engine.series.read_backlog()
        if backlog.waiting_for == "retry-budget":
            ages.append(backlog.oldest_due_age_ms / 1000)
            record = await harness.store.get_lane(LANE)
            assert record is not None
            assert "retry-budget" == harness.engine.waiting_for(record)
    assert max(ages) > 200
    assert max(ages) <= loop.time() - started
    tasks = [await harness.get_task(task) for task in added]
    assert min(task.next_attempt_at for task in tasks) < (EPOCH_S + started + 60) * 1000
    await harness.engine.stop(1)
