"""Configured limits of downstreams: rate, concurrency, breaker and budget of running lanes."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tarry.core.breaker import BreakerState
from tarry.core.outcome import TRANSIENT
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.endpoint_caps import EndpointCap
from tarry.service.engine.lanes import build_breaker, build_budget
from tarry.service.engine.limits import LimitPattern, LimitTable
from tarry.service.model import LOST, Status
from tarry.service.store import ConfiguredLimits
from tarry.wire.tasks import BreakerSettings, BudgetSettings, DownstreamLimits
from tests.service.engine.harness import EPOCH_S, OK, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceStore

LANE = "default/http:a.example:80"


def new_table(
    *patterns: LimitPattern, stored: dict[str, DownstreamLimits] | None = None, processes: int = 1
) -> LimitTable:
    """Return a table with patterns and stored limits."""
    table = LimitTable(patterns, max_in_flight=16)
    table.stored = ConfiguredLimits(1, processes, stored or {})
    return table


def test_stored_limits_have_priority_over_patterns() -> None:
    """The first pattern that matches tenant and lane applies to lanes without stored limits."""
    limits = [DownstreamLimits(concurrency=number) for number in range(1, 5)]
    table = new_table(
        LimitPattern("acme", "https:*.example:443", limits[3]),
        LimitPattern("*", "https:[::1]:443", limits[1]),
        LimitPattern("*", "https:*", limits[2]),
        stored={"acme/https:b.example:443": limits[0]},
    )
    expected = {
        "acme/https:a.example:443": (limits[3], "SETTINGS"),
        "acme/https:b.example:443": (limits[0], "API"),
        "beta/https:a.example:443": (limits[2], "SETTINGS"),
        "beta/https:[::1]:443": (limits[1], "SETTINGS"),
        "beta/http:a.example:80": (DownstreamLimits(), "DEFAULT"),
    }
    assert expected == {lane: table.find(lane) for lane in expected}


@pytest.mark.parametrize(
    ("stored", "pattern", "expected"),
    [
        ((9.0, 9), (5.0, 4), (5.0, 4)),
        ((3.0, 3), (5.0, 4), (3.0, 3)),
        ((None, None), (5.0, 4), (5.0, 4)),
        ((9.0, 100), (None, None), (9.0, 16)),
        ((None, 100), (None, 64), (None, 64)),
    ],
)
def test_stored_limits_do_not_exceed_the_settings(
    stored: tuple[float | None, int | None],
    pattern: tuple[float | None, int | None],
    expected: tuple[float | None, int],
) -> None:
    """Rate and concurrency of a pattern, or `lane_in_flight`, are bounds of limits of the API."""
    table = new_table(
        LimitPattern("*", "*", DownstreamLimits(*pattern)), stored={LANE: DownstreamLimits(*stored)}
    )
    limiter = table.build_downstream(LANE).limiter
    assert expected == (limiter.rate, limiter._max_in_flight)


def test_processes_share_rate_and_concurrency() -> None:
    """Each process gets an equal share, and at least one attempt at a time."""
    limits = DownstreamLimits(rate_per_second=9, concurrency=7)
    shares = []
    for processes in (1, 3, 9):
        limiter = (
            new_table(stored={LANE: limits}, processes=processes).build_downstream(LANE).limiter
        )
        shares.append((limiter.rate, limiter._max_in_flight))
    assert [(9.0, 7), (3.0, 2), (1.0, 1)] == shares


def test_a_new_breaker_keeps_a_lane_half_open() -> None:
    """A lane that is parked when its breaker changes is still probed before it is used."""
    table = new_table()
    downstream = table.build_downstream(LANE)
    assert downstream.breaker is not None
    downstream.breaker.half_open(4)
    table.stored = ConfiguredLimits(
        2, 1, {LANE: DownstreamLimits(breaker=BreakerSettings(probes=7))}
    )
    table.configure(downstream)

    breaker = downstream.breaker
    assert (BreakerState.HALF_OPEN, 4, 7) == (
        breaker.state,
        breaker.consecutive_opens,
        breaker.probes,
    )
    table.configure(downstream)
    assert breaker is downstream.breaker  # unchanged settings change nothing


@pytest.mark.parametrize(
    ("settings", "failures"),
    [
        (BreakerSettings(min_calls=5), 5),
        (BreakerSettings(consecutive_failures=2), 2),
        (BreakerSettings(open_for_ms=900_000), 20),
        (BreakerSettings(enabled=False, consecutive_failures=2), None),
    ],
)
def test_breaker_settings(settings: BreakerSettings, failures: int | None) -> None:
    """A breaker opens by its settings, or never if it is not enabled."""
    breaker = build_breaker(settings)
    count = 0
    while breaker.state is BreakerState.CLOSED and count < 100:
        permit = breaker.admit(0.0)
        assert permit is not None
        count += 1
        breaker.record(permit, True, 0.1, 0.0, 0.0, timed_out=count % 2 == 0)
    assert (failures or 100) == count


async def test_rate_and_lease_of_a_slow_lane() -> None:
    """At most five attempts a second start, and no lease of a waiting task is lost."""
    limits = DownstreamLimits(rate_per_second=5)
    target = FakeTarget(OK)
    harness = EngineHarness(target, patterns=[LimitPattern("*", "*", limits)])
    await harness.engine.start()
    tasks = await harness.add(*(harness.new_task() for _ in range(100)))
    await asyncio.sleep(10)
    assert 45 <= len(target.times) <= 52
    for start in target.times:
        assert sum(start <= time < start + 1 for time in target.times) <= 7
    await asyncio.sleep(15)
    for task in tasks:
        assert Status.SUCCEEDED is (await harness.get_task(task)).status
        assert all(attempt.outcome != LOST for attempt in await harness.list_attempts(task))
    await harness.engine.stop(1)


async def test_limits_of_a_running_lane_can_be_changed() -> None:
    """A lower concurrency applies at once, a removed rate ends the wait for it."""
    running: list[DeliveryRequest] = []
    peaks: list[int] = []

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        running.append(request)
        peaks.append(len(running))
        await asyncio.sleep(1)
        running.remove(request)
        return OK

    target = FakeTarget(respond)
    harness = EngineHarness(target)
    engine = harness.engine
    await engine.start()
    await harness.add(*(harness.new_task() for _ in range(40)))
    await asyncio.sleep(0.5)
    assert 8 == len(running)
    lane = harness.lanes.tripped_and_busiest(1)[0].name

    await engine.set_limits(lane, DownstreamLimits(concurrency=2))
    peaks.clear()
    await asyncio.sleep(2)
    assert {1, 2} >= set(peaks)
    assert peaks

    await engine.set_limits(lane, DownstreamLimits(rate_per_second=0.001))
    await asyncio.sleep(2)
    sent = len(peaks)
    await asyncio.sleep(20)
    assert sent + 1 >= len(peaks)

    await engine.set_limits(lane, None)
    await asyncio.sleep(30)
    assert not running
    assert 40 == len(target.requests)
    await engine.stop(1)


async def test_limits_of_another_process_are_adopted() -> None:
    """A process applies limits that were set through another one within two seconds."""
    loop = asyncio.get_running_loop()
    store = ReferenceStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    first = EngineHarness(FakeTarget(OK), store=store)
    second = EngineHarness(FakeTarget(OK), store=store, seed=2)
    await first.engine.start()
    await second.engine.start()
    downstream = second.lanes[LANE].downstream
    limits = DownstreamLimits(rate_per_second=3, budget=BudgetSettings(enabled=False))
    await first.engine.set_limits(LANE, limits)
    await asyncio.sleep(2)
    assert (3.0, None) == (downstream.limiter.rate, downstream.budget)
    assert (limits, "API") == second.engine.configured_limits(LANE)

    restarted = EngineHarness(FakeTarget(OK), store=store, seed=3)
    await restarted.engine.start()
    assert 3.0 == restarted.lanes[LANE].downstream.limiter.rate
    for harness in (first, second, restarted):
        await harness.engine.stop(1)


def test_budget_settings() -> None:
    """A budget of one retry a second admits about that many."""
    settings = BudgetSettings(ratio=0.01, min_per_second=1)
    budget = build_budget(settings)
    assert budget is not None
    retries = sum(budget.withdraw(1.0, 1000 + second / 10) for second in range(600))
    assert 50 <= retries <= 75
    assert build_budget(BudgetSettings(enabled=False)) is None


@pytest.mark.parametrize("lane", ["http:a.example:80", "http:a.*", "*"])
async def test_lane_keys_share_the_rate_of_the_settings(lane: str) -> None:
    """Tasks of many lane keys start at the rate of one endpoint, in a fair order."""
    limits = DownstreamLimits(rate_per_second=2)
    target = FakeTarget(OK)
    harness = EngineHarness(target, patterns=[LimitPattern("*", lane, limits)])
    await harness.engine.start()
    keys = [None, *(f"k{number}" for number in range(99))]
    tasks = await harness.add(*(harness.new_task(lane_key=key) for key in keys))
    await asyncio.sleep(10)
    assert 19 <= len(target.times) <= 21
    await asyncio.sleep(45)
    states = [(await harness.get_task(task)).status for task in tasks]
    assert [Status.SUCCEEDED] * 100 == states
    await harness.engine.stop(1)


async def test_lane_keys_share_the_concurrency_of_the_settings() -> None:
    """At most three attempts of an endpoint run at a time; each lane gets its turn."""
    running: list[str] = []
    peaks: list[int] = []
    served: list[str] = []

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        running.append(request.url)
        peaks.append(len(running))
        served.append(request.url)
        await asyncio.sleep(0.5)
        running.remove(request.url)
        return OK

    patterns = [LimitPattern("*", "http:a.example:80", DownstreamLimits(concurrency=3))]
    harness = EngineHarness(FakeTarget(respond), patterns=patterns)
    await harness.engine.start()
    new_tasks = [harness.new_task("http://a.example:80/many") for _ in range(60)]
    new_tasks += [
        harness.new_task(f"http://a.example:80/{number}", lane_key=f"k{number}")
        for number in range(30)
    ]
    tasks = await harness.add(*new_tasks)
    await asyncio.sleep(10.1)
    assert 3 == max(peaks)
    assert {f"http://a.example:80/{number}" for number in range(30)} <= set(served)
    await asyncio.sleep(10)
    states = [(await harness.get_task(task)).status for task in tasks]
    assert [Status.SUCCEEDED] * 90 == states
    assert 3 == max(peaks)
    await harness.engine.stop(1)


async def test_lanes_that_wait_for_a_cap_continue_after_cancelled_tasks() -> None:
    """A lane whose tasks were cancelled while it waited does not keep the others waiting."""
    limits = DownstreamLimits(rate_per_second=2, concurrency=1)
    target = FakeTarget(OK)
    harness = EngineHarness(target, patterns=[LimitPattern("*", "*", limits)])
    await harness.engine.start()
    tasks = await harness.add(*(harness.new_task(lane_key=f"k{n}") for n in range(20)))
    for task in tasks[1:10]:
        await harness.engine.cancel(task.tenant, task.id)
    await asyncio.sleep(8)
    assert 11 == len(target.requests)
    await harness.engine.stop(1)


async def test_lanes_that_wait_for_a_cap_are_tried_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While requests arrive, which delay starts, an attempt that ends continues one lane."""
    acquire, results = EndpointCap.acquire, Counter[bool]()

    def count_and_acquire(cap: EndpointCap, now: float) -> float | None:
        delay = acquire(cap, now)
        results[delay is not None] += 1
        return delay

    async def respond(_: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(0.01)
        return OK

    monkeypatch.setattr(EndpointCap, "acquire", count_and_acquire)
    patterns = [LimitPattern("*", "*", DownstreamLimits(concurrency=1))]
    harness = EngineHarness(FakeTarget(respond), patterns=patterns)
    await harness.engine.start()
    tasks = await harness.add(*(harness.new_task(lane_key=f"k{n}") for n in range(97)))
    for _ in range(300):
        await asyncio.sleep(0.005)
        harness.engine.worker.delay_starts()
    states = [(await harness.get_task(task)).status for task in tasks]
    assert [Status.SUCCEEDED] * 97 == states
    await harness.engine.stop(1)
    assert 97 == results[True]
    assert results[False] < 4 * 97


def test_pattern_with_a_lane_key_limits_that_lane() -> None:
    """Other lanes of the endpoint have the limits of the pattern without a key."""
    table = new_table(
        LimitPattern("*", "http:a.example:80@k1", DownstreamLimits(concurrency=1)),
        LimitPattern("*", "http:a.example:80", DownstreamLimits(concurrency=2)),
    )
    lanes = [f"{LANE}@k1", f"{LANE}@k2", LANE]
    first, second, third = downstreams = [table.build_downstream(lane) for lane in lanes]
    assert [1, 2, 2] == [each.limits.concurrency for each in downstreams]
    assert first.cap is not second.cap
    assert second.cap is third.cap


def test_endpoint_cap_admits_no_more_than_its_rate() -> None:
    """Rounding errors and small corrections of the clock do not add attempts."""
    cap = EndpointCap()
    cap.configure(max_rate=100.0, max_in_flight=None)
    start = 1_800_000_000.0
    admitted = 0
    for step in range(100_000):
        now = start + step * 0.0001 + (0.003 if step % 7 == 0 else 0.0)
        while cap.acquire(now) is not None:
            admitted += 1
    assert 1000 <= admitted <= 1003


def test_endpoint_cap_refunds_attempts_that_were_not_sent() -> None:
    """An attempt that was not sent gives its turn back; a clock that is set back delays nothing."""
    cap = EndpointCap()
    cap.configure(max_rate=1.0, max_in_flight=2)
    assert 0.0 == cap.acquire(100.0)
    assert None is cap.acquire(100.0)
    assert 1.0 == cap.delay(100.0)
    cap.release(None, 0.0, 100.0)
    assert 0.0 == cap.acquire(100.0)
    assert None is cap.acquire(100.5)
    assert 0.0 == cap.acquire(101.0)
    assert cap.is_full
    assert None is cap.acquire(105.0)
    cap.release(TRANSIENT, 0.5, 105.0)
    assert 0.0 == cap.acquire(50.0)
