"""How tenants and lanes share the slots for attempts in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine.attempt_slots import AttemptSlots, LaneRotation, Slot
from tarry.service.engine.context import EngineLimits
from tarry.service.engine.lanes import Lanes, LaneState, build_downstream
from tests.service.engine.harness import OK, EngineHarness, FakeTarget, run

HUNG = DeliveryResult(fault=Fault.TIMEOUT, error="No response within 30 s", duration_ms=30_000.0)
HANG_S = 30.0


def new_lanes() -> Lanes:
    """Return the lanes of a process."""
    return Lanes(partial(build_downstream, max_in_flight=1000), max_leased=1000)


def fill(rotation: LaneRotation, slots: AttemptSlots, lanes: list[LaneState]) -> list[Slot]:
    """Start attempts of lanes with endless due tasks until none is admitted."""
    for lane in lanes:
        rotation.append(lane)
    held: list[Slot] = []
    while not slots.is_full and (admitted := rotation.pop()) is not None:
        held.append(slots.acquire(admitted, 0))
        rotation.append(admitted)
    return held


def test_slow_lanes_of_one_tenant_leave_slots_for_others() -> None:
    """A tenant with many hanging lanes leaves slots for a slow lane of another tenant."""
    lanes, slots = new_lanes(), AttemptSlots(500)
    rotation = LaneRotation(slots)

    held = fill(rotation, slots, [lanes[f"a/http:host-{number}:80"] for number in range(160)])
    other = fill(rotation, slots, [lanes["b/http:host:80"]])

    assert 240 == len(held)  # four fifths of 300
    assert 1 <= len(other)


def test_fast_lane_of_the_same_tenant_has_slots() -> None:
    """A fast lane starts attempts while the tenant's slow lanes hold all that they may."""
    lanes, slots = new_lanes(), AttemptSlots(500)
    fill(LaneRotation(slots), slots, [lanes[f"a/http:host-{number}:80"] for number in range(160)])
    fast = lanes["a/http:fast:80"]
    fast.record_duration(5.0, timed_out=False)

    held = fill(LaneRotation(slots), slots, [fast])

    assert 400 == slots.running_count  # one tenant holds at most four fifths
    assert 160 == len(held)


def test_tenants_have_equal_turns() -> None:
    """A tenant with one lane has as many turns as a tenant with a hundred."""
    lanes, slots = new_lanes(), AttemptSlots(40)
    names = [*(f"a/http:host-{number}:80" for number in range(100)), "b/http:host:80"]

    held = fill(LaneRotation(slots), slots, [lanes[name] for name in names])

    tenants = [slot.lane.name[0] for slot in held]
    assert ["a", "b"] * 3 == tenants[:6]


def test_attempt_that_takes_longer_than_a_second_is_slow() -> None:
    """An attempt of a fast lane counts as slow after a second, and so does the lane."""
    lanes, slots = new_lanes(), AttemptSlots(10)
    lane = lanes["a/http:host:80"]
    lane.record_duration(5.0, timed_out=False)
    ended, hanging = slots.acquire(lane, 0), slots.acquire(lane, 0)
    slots.release(ended)

    slots.mark_slow_attempts(999)
    assert (False, 0) == (lane.is_slow, lane.slow_count)
    slots.mark_slow_attempts(1000)
    assert (True, 1) == (lane.is_slow, lane.slow_count)

    slots.release(hanging)
    assert (0, 0, 0) == (lane.slow_count, lane.running_count, slots.running_count)


def test_tenant_that_had_its_share_is_readmitted() -> None:
    """A tenant that had its share of the slots starts an attempt after another one has ended."""
    lanes, slots = new_lanes(), AttemptSlots(5)
    rotation = LaneRotation(slots)
    held = fill(rotation, slots, [lanes["a/http:x:80"], lanes["a/http:y:80"]])
    assert rotation.pop() is None

    slots.release(held[0])
    rotation.append(held[0].lane)
    rotation.readmit_tenant()

    assert rotation.pop() is not None


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=120),
)
def test_limits_are_never_exceeded(limit: int, steps: list[tuple[str, int, bool]]) -> None:
    """No sequence of starts and ends exceeds a limit, and a tenant without attempts can start."""
    lanes, slots = new_lanes(), AttemptSlots(limit)
    held: list[Slot] = []
    for tenant, number, ends in steps:
        if ends and held:
            slots.release(held.pop(number % len(held)))
            continue
        rotation = LaneRotation(slots)
        lane = lanes[f"{tenant}/http:host-{number}:80"]
        rotation.append(lane)
        if not slots.is_full and rotation.pop() is not None:
            held.append(slots.acquire(lane, 0))
        elif not slots.is_full and lane.tenant.running_count == 0:
            assert sum(slot.is_slow for slot in held) >= limit - 2 * (limit // 5)
    assert slots.running_count == len(held) <= limit
    for name in "abc":
        running = sum(slot.lane.name[0] == name for slot in held)
        assert running <= limit - limit // 5


def test_hanging_lanes_of_a_tenant_do_not_delay_another_tenant() -> None:
    """A task of another tenant is attempted at once next to 160 hosts that do not answer."""

    async def main() -> None:
        target = FakeTarget(hang_except("b.example"))
        harness = EngineHarness(target, limits=EngineLimits(max_running_attempts=100))
        hanging = [
            harness.new_task(f"http://a{number}.example:80/", tenant="a") for number in range(160)
        ]
        await harness.add(*hanging)
        await asyncio.sleep(0.1)

        started_at = asyncio.get_running_loop().time()
        await harness.add(harness.new_task("http://b.example:80/", tenant="b"))
        await asyncio.sleep(1.0)

        assert started_at == time_of_first_request(target, "b.example")

    run(main)


def test_hanging_lanes_do_not_delay_a_fast_lane_of_the_tenant() -> None:
    """A host that has answered quickly is not delayed by hosts of its tenant that hang."""

    async def main() -> None:
        target = FakeTarget(hang_except("fast.example"))
        harness = EngineHarness(target, limits=EngineLimits(max_running_attempts=100))
        await harness.add(harness.new_task("http://fast.example:80/"))
        await asyncio.sleep(0.1)
        target.requests.clear()
        target.times.clear()
        hanging = [harness.new_task(f"http://a{number}.example:80/") for number in range(600)]
        await harness.add(*hanging)
        await asyncio.sleep(0.1)

        started_at = asyncio.get_running_loop().time()
        await harness.add(harness.new_task("http://fast.example:80/"))
        await asyncio.sleep(1.0)

        assert started_at == time_of_first_request(target, "fast.example")

    run(main)


@pytest.mark.parametrize("host_count", [8, 400])
def test_tasks_for_hanging_targets_leave_leases_for_other_tenants(host_count: int) -> None:
    """A tenant whose waiting tasks could take all leases does not delay another tenant."""

    async def main() -> None:
        target = FakeTarget(hang_except("b.example"))
        limits = EngineLimits(max_running_attempts=50, max_leased=200)
        harness = EngineHarness(target, limits=limits)
        await harness.engine.start()
        hosts = [f"a{number % host_count}.example:80" for number in range(400)]
        await harness.add(*(harness.new_task(f"http://{host}/", tenant="a") for host in hosts))
        await asyncio.sleep(2.0)

        started_at = asyncio.get_running_loop().time()
        await harness.add(harness.new_task("http://b.example:80/", tenant="b"))
        await asyncio.sleep(1.0)

        assert started_at == time_of_first_request(target, "b.example")
        await harness.engine.stop(0.0)

    run(main)


@pytest.mark.parametrize("tenant_count", [1, 3])
def test_tenants_with_many_hanging_hosts_leave_leases_for_others(tenant_count: int) -> None:
    """A new tenant gets a lease next to tenants with more hanging hosts than there are leases."""

    async def main() -> None:
        target = FakeTarget(hang_except("fast.example"))
        limits = EngineLimits(max_running_attempts=200, max_leased=200)
        harness = EngineHarness(target, limits=limits)
        await harness.engine.start()
        for number in range(1000):
            tenant = f"t{number % tenant_count}"
            new_task = harness.new_task(f"http://a{number}.example:80/", tenant=tenant)
            if number % 2:
                await harness.add(new_task)
            else:
                await harness.store.add([new_task])
        await asyncio.sleep(5)

        added_at = asyncio.get_running_loop().time()
        await harness.store.add([harness.new_task("http://fast.example:80/", tenant="new")])
        await asyncio.sleep(2)

        started_at = time_of_first_request(target, "fast.example")
        assert started_at is not None
        assert started_at <= added_at + 1
        await harness.engine.stop(60)

    run(main)


def hang_except(host: str) -> Callable[[DeliveryRequest], Awaitable[DeliveryResult]]:
    """Return a responder whose targets time out, except one host."""

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        if host in request.url:
            return OK
        await asyncio.sleep(HANG_S)
        return HUNG

    return respond


def time_of_first_request(target: FakeTarget, host: str) -> float | None:
    """Return when the first request to a host was sent; None if there is none."""
    requests = zip(target.requests, target.times, strict=True)
    return next((time for request, time in requests if host in request.url), None)
