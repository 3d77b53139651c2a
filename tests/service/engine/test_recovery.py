"""Recovery and overload: lanes follow the capacity of targets that refuse calls above it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.engine.lanes import build_breaker
from tests.core.limiter_model import SlidingWindowTarget
from tests.service.engine.harness import OK, EngineHarness, FakeTarget, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery import DeliveryRequest

OUTAGE_S = 20.0
START_TIMES = [1000.0, 1000.037, 1000.111, 1000.222]
"""Of the virtual clock. They differ in the bucket of the limiter's sliding window in which an event
falls, and in rounding to milliseconds, so the limiter lowers the rate at other times."""
CAPACITY = 200
UNREACHABLE = DeliveryResult(fault=Fault.REFUSED, error="connection refused", duration_ms=1.0)
BUSY = DeliveryResult(status=503, duration_ms=20.0)
THROTTLED = DeliveryResult(status=429, headers=[("retry-after", "1")], duration_ms=20.0)


class CapacityTarget:
    """A target that is down until `up_at`, and then accepts `capacity` calls in any second.

    Paths with "poison" are answered with 503, if the call is accepted.
    """

    def __init__(
        self,
        capacity: Callable[[float], float],
        *,
        up_at: float = 0.0,
        refusal: DeliveryResult = BUSY,
        latency: float = 0.02,
    ) -> None:
        self.target = SlidingWindowTarget(lambda now: capacity(now - up_at))
        self.created_at = asyncio.get_running_loop().time()
        self.up_at, self.refusal, self.latency = up_at, refusal, latency
        self.random = Random(1)
        self.starts: list[float] = []
        """Times of the calls since the return of the target."""
        self.refused_count = 0
        self.succeeded_at: dict[str, float] = {}

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Answer a call."""
        now = self.now()
        if now < self.up_at:
            await asyncio.sleep(0.001)
            return UNREACHABLE
        self.starts.append(now)
        is_accepted = self.target.accept(now)
        self.refused_count += not is_accepted
        await asyncio.sleep(self.latency * self.random.uniform(0.8, 1.2))
        if not is_accepted:
            return self.refusal
        if "poison" in request.url:
            return BUSY
        self.succeeded_at[request.url] = self.now()
        return OK

    def now(self) -> float:
        """Return the seconds since the start of the test."""
        return asyncio.get_running_loop().time() - self.created_at

    async def close(self) -> None:
        """Do nothing."""

    @property
    def waste(self) -> float:
        """The share of refused calls."""
        return self.refused_count / len(self.starts)

    def peak(self, after: float = 0.0) -> int:
        """Return the highest number of calls in any second that begins after a time."""
        peak = first = 0
        for index, start in enumerate(self.starts):
            while self.starts[first] <= start - 1:
                first += 1
            if start - 1 >= after:
                peak = max(peak, index - first + 1)
        return peak


class TargetsByHost:
    """Sends each request to the target of its host."""

    def __init__(self, targets: dict[str, CapacityTarget]) -> None:
        self.targets = targets

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Send a request to the target of its host."""
        return await self.targets[request.url.split("/")[2]].send(request)

    async def close(self) -> None:
        """Do nothing."""


async def wait_until_all_succeed(targets: list[CapacityTarget], count: int) -> float:
    """Wait until each target has answered `count` tasks with success; return the last time."""
    async with asyncio.timeout(600):  # of virtual time
        for target in targets:
            while len(target.succeeded_at) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
    return max(max(target.succeeded_at.values()) for target in targets)


def url(number: int, host: str = "a.example:80") -> str:
    """Return the URL of a task."""
    return f"http://{host}/{number}"


@pytest.mark.long_run
@pytest.mark.parametrize(
    ("capacity", "latency", "start"),
    [
        (200, 0.002, START_TIMES[0]),
        (200, 0.1, START_TIMES[1]),
        *zip([20] * 4, [0.002, 0.02] * 2, START_TIMES, strict=True),
    ],
)
def test_a_backlog_is_drained_at_the_capacity(capacity: int, latency: float, start: float) -> None:
    """After an outage of 20 s, a backlog of 25 s is drained near the capacity of the target."""

    async def main() -> None:
        count = 25 * capacity
        target = CapacityTarget(lambda _: capacity, up_at=OUTAGE_S, latency=latency)
        harness = EngineHarness(target, build_breaker=build_breaker)
        await harness.engine.start()
        await harness.add(*(harness.new_task(url(number)) for number in range(count)))

        ended = await wait_until_all_succeed([target], count)

        assert ended - OUTAGE_S <= 1.3 * 25
        assert target.peak() <= 1.2 * capacity
        assert target.waste < 0.1
        await harness.engine.stop(1)

    run(main, start=start)


@pytest.mark.long_run
@pytest.mark.parametrize("start", [START_TIMES[0], START_TIMES[-1]])
def test_the_capacity_drops_during_the_drain(start: float) -> None:
    """When the capacity drops from 200 to 50 per second after 10 s, the ideal drain takes 70 s.

    The rate follows within 2 s, also when the capacity drops during a test of a lowered rate, as at
    the last start time.
    """

    async def main() -> None:
        target = CapacityTarget(lambda since: 200 if since < 10 else 50, up_at=OUTAGE_S)
        harness = EngineHarness(target, build_breaker=build_breaker)
        await harness.engine.start()
        await harness.add(*(harness.new_task(url(number)) for number in range(5000)))

        ended = await wait_until_all_succeed([target], 5000)

        assert ended - OUTAGE_S <= 1.3 * 70
        assert target.peak() <= 1.2 * CAPACITY
        assert target.peak(after=OUTAGE_S + 10 + 2) <= 1.2 * 50
        assert target.waste < 0.1
        await harness.engine.stop(1)

    run(main, start=start)


@pytest.mark.long_run
async def test_four_lanes_recover_at_once() -> None:
    """Each of four lanes follows the capacity of its own target."""
    hosts = [f"h{number}.example:80" for number in range(4)]
    targets = {host: CapacityTarget(lambda _: 100, up_at=OUTAGE_S) for host in hosts}
    harness = EngineHarness(TargetsByHost(targets), build_breaker=build_breaker)
    await harness.engine.start()
    await harness.add(
        *(harness.new_task(url(number, host)) for number in range(2000) for host in hosts)
    )

    ended = await wait_until_all_succeed(list(targets.values()), 2000)

    assert ended - OUTAGE_S <= 1.3 * 2000 / 100
    for target in targets.values():
        assert target.peak() <= 1.2 * 100
        assert target.waste < 0.1
    await harness.engine.stop(1)


async def test_tasks_of_a_recovered_lane_are_claimed_at_once() -> None:
    """The first attempts after the probes follow at the start rate of 10 per second."""
    target = CapacityTarget(lambda _: CAPACITY, up_at=OUTAGE_S)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    await harness.add(*(harness.new_task(url(number)) for number in range(200)))

    await wait_until_all_succeed([target], 200)

    assert max(later - start for start, later in pairwise(target.starts)) < 0.15
    await harness.engine.stop(1)


async def offer(harness: EngineHarness, per_second: int, seconds: int, path: str = "") -> None:
    """Add tasks at a constant rate."""
    number = 0
    for _ in range(seconds * 10):
        tasks = [harness.new_task(url(number + each) + path) for each in range(per_second // 10)]
        number += len(tasks)
        await harness.add(*tasks)
        await asyncio.sleep(0.1)


@pytest.mark.long_run
@pytest.mark.parametrize("per_second", [240, 450])
async def test_more_is_offered_than_the_target_accepts(per_second: int) -> None:
    """A target that throttles above 200 per second gets nearly 200 per second that succeed."""
    target = CapacityTarget(lambda _: CAPACITY, refusal=THROTTLED)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()

    await offer(harness, per_second, 20)

    assert len(target.succeeded_at) >= 0.85 * 20 * CAPACITY
    assert target.waste < 0.1
    await harness.engine.stop(1)


async def test_tasks_that_always_fail_do_not_hold_up_others() -> None:
    """With 40 % of tasks that always fail, the other tasks succeed within a few seconds."""
    target = CapacityTarget(lambda _: 10_000)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    added_at: dict[str, float] = {}
    random = Random(1)
    for number in range(600):
        address = f"{url(number)}{'-poison' if random.random() < 0.4 else ''}"
        added_at[address] = target.now()
        await harness.add(harness.new_task(address))
        await asyncio.sleep(0.2)
    await asyncio.sleep(10)

    good = {address: at for address, at in added_at.items() if "poison" not in address}
    assert good.keys() == target.succeeded_at.keys()
    delays = [target.succeeded_at[address] - at for address, at in good.items()]
    assert max(delays) < 10
    await harness.engine.stop(1)


async def test_a_backlog_with_tasks_that_always_fail() -> None:
    """Of a backlog with 25 % of tasks that always fail, all other tasks succeed."""
    target = CapacityTarget(lambda _: 10_000)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    await harness.add(
        *(harness.new_task(url(n) + ("-poison" if n % 4 == 0 else "")) for n in range(3000))
    )

    ended = await wait_until_all_succeed([target], 2250)

    assert ended < 10
    await harness.engine.stop(1)


async def test_retries_do_not_keep_all_leases_of_a_lane() -> None:
    """At a rate of 1 per second, tasks that fail every 100 ms do not keep new tasks waiting."""
    target = CapacityTarget(lambda _: 10_000)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    limiter = harness.lanes["default/http:a.example:80"].downstream.limiter
    limiter.configure(max_rate=1.0, max_in_flight=8)
    overrides = {"maxAttempts": 1000, "initialDelayMs": 100, "maxDelayMs": 100}
    poison = [harness.new_task(f"{url(n)}-poison", overrides=overrides) for n in range(5)]
    await harness.add(*poison)
    await asyncio.sleep(10)
    await harness.add(*(harness.new_task(url(number)) for number in range(5)))
    await asyncio.sleep(1.5 * 6)

    assert 5 == len(target.succeeded_at)
    await harness.engine.stop(1)


async def test_leases_are_released_when_the_rate_drops() -> None:
    """Tasks that were leased at a high rate do not keep new tasks waiting at a low rate."""
    target = CapacityTarget(lambda _: 10_000)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    lane = harness.lanes["default/http:a.example:80"]
    limiter = lane.downstream.limiter
    limiter.configure(max_rate=20.0, max_in_flight=8)
    overrides = {"maxAttempts": 1000, "initialDelayMs": 100, "maxDelayMs": 100}
    for number in range(60):
        poison = harness.new_task(f"{url(number)}-poison", overrides=overrides)
        await harness.add(poison, harness.new_task(url(number)))
    await wait_until_all_succeed([target], 60)
    assert lane.leased_count > 30
    limiter.configure(max_rate=1.0, max_in_flight=8)
    await harness.add(harness.new_task(url(60)))
    await asyncio.sleep(12.5)

    assert 61 == len(target.succeeded_at)
    for _ in range(100):
        await asyncio.sleep(0.1)
        assert lane.leased_count <= 3  # released tasks are leased again when they can start
    await harness.engine.stop(1)


async def test_slow_attempts_do_not_take_the_leases_of_a_low_rate() -> None:
    """At a rate of 1 per second, an attempt starts each second, although each takes 20 s."""
    target = CapacityTarget(lambda _: 10_000, latency=20.0)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    limiter = harness.lanes["default/http:a.example:80"].downstream.limiter
    limiter.configure(max_rate=1.0, max_in_flight=8)
    await harness.add(*(harness.new_task(url(number)) for number in range(40)))
    await asyncio.sleep(10)

    assert 8 == len(target.starts)
    await harness.engine.stop(1)


async def test_a_task_is_not_probed_twice_in_a_row() -> None:
    """A lane that is parked for a second is probed with other tasks each time."""
    target = FakeTarget(BUSY)
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    overrides = {"maxAttempts": 1000, "initialDelayMs": 1100, "maxDelayMs": 1100}
    await harness.add(*(harness.new_task(url(n), overrides=overrides) for n in range(40)))
    await asyncio.sleep(60)

    urls = [request.url for request in target.requests]
    assert len(urls) > 100
    assert all(len(set(urls[start : start + 6])) == 6 for start in range(20, len(urls) - 6))
    await harness.engine.stop(1)


async def test_a_restart_continues_at_the_stored_rate() -> None:
    """The rate of a lane is stored, and the next process starts with it."""
    target = CapacityTarget(lambda _: 50, refusal=THROTTLED)
    first = EngineHarness(target, build_breaker=build_breaker)
    await first.engine.start()
    await offer(first, 100, 20)
    await first.engine.stop(1)
    (stored,) = await first.store.list_lane_limits(10)
    second = EngineHarness(target, store=first.store, build_breaker=build_breaker)
    await second.engine.start()

    assert stored.rate is not None
    assert 30 < stored.rate < 60
    info = second.engine.local_stats(stored.lane)
    assert info is None  # no task of the lane is leased yet
    await asyncio.sleep(0.1)  # later the rate may be lowered: it is close to the capacity
    info = second.engine.local_stats(stored.lane)
    assert info is not None
    assert info.rate_per_second == pytest.approx(stored.rate, rel=0.2)
    await second.engine.stop(1)
