"""The scheduling lag: how late attempts start because the process is overloaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine.context import EngineLimits
from tarry.wire.tasks import DownstreamLimits
from tests.service.engine.harness import OK, EngineHarness, FakeTarget

if TYPE_CHECKING:
    from collections.abc import Callable

LANE = "default/http:a.example:80"
DOWN = DeliveryResult(fault=Fault.REFUSED, error="Connection refused")


def respond_after(
    delay: float, choose: Callable[[DeliveryRequest], DeliveryResult] = lambda _: OK
) -> FakeTarget:
    """Return a target that responds after a delay."""

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(delay)
        return choose(request)

    return FakeTarget(respond)


def max_lag_s(harness: EngineHarness) -> float:
    """Return the bound of the highest bucket of the histogram of lags that is not empty."""
    buckets = [
        (float(name.removeprefix("lag.")), count)
        for name, count in harness.metrics.read_totals().items()
        if name.startswith("lag.")
    ]
    return max(bound for bound, count in buckets if count) / 1000


async def test_tasks_that_wait_for_a_target_that_is_down_do_not_count_as_late() -> None:
    """The wait for a breaker is no lag, neither of the probes nor of the tasks after them."""
    loop = asyncio.get_running_loop()
    returns_at = loop.time() + 90
    target = respond_after(0.01, lambda _: OK if loop.time() > returns_at else DOWN)
    harness = EngineHarness(target)
    await harness.engine.start()
    for _ in range(100):
        await harness.add(*[harness.new_task() for _ in range(3)])
        await asyncio.sleep(0.3)
    await asyncio.sleep(300)

    assert 300 == harness.metrics.read_totals()["attempts.success"]
    assert max_lag_s(harness) <= 0.1
    await harness.engine.stop(1)


async def test_tasks_of_a_paused_lane_do_not_count_as_late() -> None:
    """The time for which an operator has paused a lane is no lag."""
    harness = EngineHarness(respond_after(0.01))
    await harness.engine.start()
    await harness.add(harness.new_task())
    await asyncio.sleep(1)
    await harness.engine.pause(LANE)
    await harness.add(*[harness.new_task() for _ in range(20)])
    await asyncio.sleep(60)
    await harness.engine.resume(LANE)
    await asyncio.sleep(10)

    assert 21 == harness.metrics.read_totals()["attempts.success"]
    assert max_lag_s(harness) <= 0.1
    await harness.engine.stop(1)


async def test_tasks_that_wait_for_the_rate_of_their_lane_do_not_count_as_late() -> None:
    """With one attempt per second, the last of 30 tasks waits for half a minute, without lag."""
    harness = EngineHarness(respond_after(0.01))
    await harness.engine.start()
    await harness.engine.set_limits(LANE, DownstreamLimits(rate_per_second=1))
    await harness.add(*[harness.new_task() for _ in range(30)])
    await asyncio.sleep(60)

    assert 30 == harness.metrics.read_totals()["attempts.success"]
    assert max_lag_s(harness) <= 0.1
    await harness.engine.stop(1)


async def test_tasks_that_wait_for_the_concurrency_of_their_lane_do_not_count_as_late() -> None:
    """With one attempt at a time, the wait for the attempts before is no lag."""
    harness = EngineHarness(respond_after(2))
    await harness.engine.start()
    await harness.engine.set_limits(LANE, DownstreamLimits(concurrency=1))
    await harness.add(*[harness.new_task() for _ in range(10)])
    await asyncio.sleep(60)

    assert 10 == harness.metrics.read_totals()["attempts.success"]
    assert max_lag_s(harness) <= 0.1
    await harness.engine.stop(1)


async def test_tasks_that_wait_for_a_slot_of_the_process_count_as_late() -> None:
    """A process whose slots are taken by the attempts of other lanes is overloaded."""
    limits = EngineLimits(max_running_attempts=1)
    harness = EngineHarness(respond_after(2), limits=limits)
    await harness.engine.start()
    await harness.add(*[harness.new_task(f"http://{number}.example:80/") for number in range(5)])
    await asyncio.sleep(60)

    assert 5 == harness.metrics.read_totals()["attempts.success"]
    assert max_lag_s(harness) >= 5
    await harness.engine.stop(1)
