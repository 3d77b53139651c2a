"""How tenants and lanes share the slots for attempts in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine.attempt_slots import Admission, AttemptSlots, LaneRotation, Slot
from tarry.service.engine.context import EngineLimits
from tarry.service.engine.lanes import Lanes, LocalLane, SlotShares, TenantState, build_downstream
from tarry.service.engine.leased_tasks import LeasedTasks
from tarry.service.model import Task
from tests.service.engine.harness import OK, EngineHarness, FakeTarget

TIMED_OUT = DeliveryResult(
    fault=Fault.TIMEOUT, error="No response within 30 s", duration_ms=30_000.0
)
HANG_S = 30.0


def new_lanes() -> Lanes:
    """Return the `Lanes` of a new process, which has no lane yet."""
    return Lanes(partial(build_downstream, max_in_flight=1000), max_leased=1000)


def fill(rotation: LaneRotation, slots: AttemptSlots, lanes: list[LocalLane]) -> list[Slot]:
    """Start attempts until no lane is admitted, as if each lane always had due tasks."""
    for lane in lanes:
        rotation.append(lane)
    held: list[Slot] = []
    while slots.free_count and (admitted := rotation.pop()) is not None:
        held.append(slots.acquire(admitted, 0))
        rotation.append(admitted)
    return held


def test_slow_lanes_of_one_tenant_leave_slots_for_others() -> None:
    """A tenant with many hanging lanes leaves slots for a slow lane of another tenant."""
    lanes, slots = new_lanes(), AttemptSlots(500)
    rotation = LaneRotation(slots)

    held = fill(rotation, slots, [lanes[f"a/http:host-{number}:80"] for number in range(160)])
    other = fill(rotation, slots, [lanes["b/http:host:80"]])

    assert 226 == len(held)  # four fifths of 300 - 18
    assert 1 <= len(other)


@pytest.mark.parametrize("is_fast", [False, True])
def test_tenants_whose_targets_hang_leave_slots_for_a_new_tenant(is_fast: bool) -> None:
    """A new tenant can start attempts although the targets of 15 other tenants began to hang."""
    lanes, slots = new_lanes(), AttemptSlots(512)
    for tenant in range(15):
        hanging = [lanes[f"t{tenant}/http:host-{number}:80"] for number in range(150)]
        for lane in hanging if is_fast else ():
            lane.record_result(5.0, timed_out=False)
        assert fill(LaneRotation(slots), slots, hanging)

    assert Admission.ADMITTED is slots.check(lanes["new/http:host:80"])
    assert Admission.ADMITTED is slots.check(new_fast_lane(lanes, "new/http:fast:80"))


def test_fast_lane_of_the_same_tenant_has_slots() -> None:
    """A fast lane starts attempts while the tenant's slow lanes hold all slots that they may."""
    lanes, slots = new_lanes(), AttemptSlots(500)
    fill(LaneRotation(slots), slots, [lanes[f"a/http:host-{number}:80"] for number in range(160)])
    fast = lanes["a/http:fast:80"]
    fast.record_result(5.0, timed_out=False)

    held = fill(LaneRotation(slots), slots, [fast])

    assert 125 == len(held)  # a sixth of 4 x (274 - 31) - 226: the rest is left for other lanes


def test_tenants_have_equal_turns() -> None:
    """A tenant with one lane has as many turns as a tenant with a hundred."""
    lanes, slots = new_lanes(), AttemptSlots(40)
    names = [*(f"a/http:host-{number}:80" for number in range(100)), "b/http:host:80"]

    held = fill(LaneRotation(slots), slots, [lanes[name] for name in names])

    tenants = [slot.lane.name[0] for slot in held]
    assert ["a", "b"] * 3 == tenants[:6]


def test_lane_is_slow_after_an_attempt_of_a_second() -> None:
    """A fast lane becomes slow when one of its attempts has been in flight for a second."""
    lanes, slots = new_lanes(), AttemptSlots(10)
    lane = lanes["a/http:host:80"]
    lane.record_result(5.0, timed_out=False)
    ended, hanging = slots.acquire(lane, 0), slots.acquire(lane, 0)
    slots.release(ended)

    slots.mark_slow_lanes(999)
    assert not lane.is_slow
    slots.mark_slow_lanes(1000)
    assert lane.is_slow

    slots.release(hanging)
    assert (0, 0) == (lane.running_count, slots.running_count)


def test_slots_of_ended_attempts_are_not_kept() -> None:
    """`mark_slow_lanes` need not be called when no attempt of a fast lane is in flight."""
    lanes, slots = new_lanes(), AttemptSlots(10)
    lane = lanes["a/http:host:80"]
    lane.record_result(5.0, timed_out=False)
    ended, hanging = slots.acquire(lane, 0), slots.acquire(lane, 0)
    assert slots.has_fast_slots
    slots.release(ended)

    assert [lane] == slots.mark_slow_lanes(1000)
    assert not slots.has_fast_slots
    slots.release(hanging)
    lane.record_result(5.0, timed_out=False)
    slots.release(slots.acquire(lane, 2000))
    assert not slots.has_fast_slots


def test_tenant_that_had_its_share_is_readmitted() -> None:
    """A tenant at its limit of slots can start an attempt after one of its attempts has ended."""
    lanes, slots = new_lanes(), AttemptSlots(5)
    rotation = LaneRotation(slots)
    held = fill(rotation, slots, [lanes["a/http:x:80"], lanes["a/http:y:80"]])
    assert rotation.pop() is None

    slots.release(held[0])
    rotation.append(held[0].lane)
    rotation.readmit(held[0].lane.tenant)

    assert rotation.pop() is not None


def test_readmitted_tenant_without_attempts_does_not_block_others() -> None:
    """A readmitted tenant that starts no attempt does not keep other tenants waiting."""
    lanes, slots = new_lanes(), AttemptSlots(50)
    rotation = LaneRotation(slots)
    tenants = "abcdefgh"
    names = [f"{tenant}/http:host-{number}:80" for tenant in tenants for number in range(20)]
    held = fill(rotation, slots, [lanes[name] for name in names])
    assert rotation.pop() is None

    for slot in held:
        slots.release(slot)
    rotation.readmit(held[0].lane.tenant)
    popped = set[str]()
    while (lane := rotation.pop()) is not None:  # no lane starts an attempt
        popped.add(lane.name[0])

    assert set(tenants) == popped


def test_a_few_waiting_tenants_are_readmitted_at_a_time() -> None:
    """An attempt that ends readmits its tenant, and eight others, so all tenants have a turn."""
    lanes, slots = new_lanes(), AttemptSlots(512)
    rotation = LaneRotation(slots)
    names = [f"{tenant}/http:{host}:80" for tenant in range(100) for host in "xyz"]
    held = fill(rotation, slots, [lanes[name] for name in names])
    assert len(rotation.waiting_tenants) == 100
    own_tenant = held[0].lane.tenant

    readmitted = set[TenantState]()
    for _ in range(13):
        rotation.readmit(own_tenant)
        assert own_tenant in rotation.tenant_queue
        assert len(rotation.tenant_queue) == 9
        readmitted.update(rotation.tenant_queue)
        assert rotation.pop() is None  # all are still at their limit, and wait again

    assert len(readmitted) == 100


def test_lane_that_had_its_share_is_readmitted() -> None:
    """A lane at its limit of slots can start an attempt after attempts of another lane ended."""
    lanes, slots = new_lanes(), AttemptSlots(11)
    rotation = LaneRotation(slots)
    first, second = (new_fast_lane(lanes, f"a/http:{name}:80") for name in "xy")
    for _ in range(4):
        slots.acquire(first, 0)
    others = [slots.acquire(second, 0) for _ in range(4)]
    rotation.append(first)
    assert rotation.pop() is None
    for slot in others:
        slots.release(slot)

    assert rotation.readmit(second.tenant) is first
    rotation.append(first)
    assert rotation.pop() is first


def test_lanes_that_begin_to_hang_leave_slots_for_others() -> None:
    """Fast lanes that begin to hang leave slots for new and fast lanes of each tenant."""
    lanes, slots = new_lanes(), AttemptSlots(100)
    busy = [new_fast_lane(lanes, f"a/http:host-{number}:80") for number in range(4)]
    held = fill(LaneRotation(slots), slots, busy)
    slots.mark_slow_lanes(1000)

    assert 70 <= len(held) < 80
    assert [] == fill(LaneRotation(slots), slots, busy)
    for tenant in "ab":
        assert Admission.ADMITTED is slots.check(lanes[f"{tenant}/http:new:80"])
        assert Admission.ADMITTED is slots.check(new_fast_lane(lanes, f"{tenant}/http:fast:80"))


def new_leased_tasks(lanes: Lanes, slots: AttemptSlots) -> LeasedTasks:
    """Return leased tasks without a task."""
    return LeasedTasks(lanes, slots, lambda: 1000, max_leased=1000, lease_ms=0, on_due=lambda: None)


def new_fast_lane(lanes: Lanes, name: str) -> LocalLane:
    """Return a lane whose attempts were short until now."""
    lane = lanes[name]
    lane.record_result(5.0, timed_out=False)
    return lane


@given(
    st.integers(1, 60),
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 3),
            st.sampled_from(["start", "start", "start", "end", "become fast", "become slow"]),
        ),
        max_size=120,
    ),
)
def test_limits_are_never_exceeded(limit: int, steps: list[tuple[str, int, str]]) -> None:
    """No sequence of events exceeds a limit, and a tenant without attempts can start one.

    Exception: a slow lane cannot start one while slow lanes hold all slots that they may.
    """
    lanes, slots = new_lanes(), AttemptSlots(limit)
    max_slow = limit - 2 * (limit // 5)
    held: list[Slot] = []
    for tenant, number, event in steps:
        lane = lanes[f"{tenant}/http:host-{number}:80"]
        if event == "become fast":
            lane.record_result(5.0, timed_out=False)
        elif event == "become slow":
            slots.mark_slow_lanes(1000)
        elif event == "end" and held:
            slots.release(held.pop(number % len(held)))
        elif slots.free_count:
            slow_count = sum(slot.is_slow for slot in held)
            if slots.check(lane) is Admission.ADMITTED:
                held.append(slots.acquire(lane, 0))
            elif lane.tenant.running_count == 0:
                assert lane.is_slow
                assert slow_count == max_slow
    assert slots.running_count == len(held) <= limit
    assert sum(slot.is_slow for slot in held) <= max_slow
    for name in "abc":
        running = sum(slot.lane.name[0] == name for slot in held)
        assert running <= limit - limit // 5


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 600)), max_size=4),
    st.booleans(),
)
def test_check_follows_from_the_shares(
    limit: int, running: list[tuple[int, int]], is_slow: bool
) -> None:
    """A lane is admitted if it holds no slot or fewer than its tenant can still acquire."""
    lanes, slots = new_lanes(), AttemptSlots(limit)
    all_lanes = [lanes[f"t{number // 2}/{number}"] for number in range(3)]
    for lane in all_lanes:
        lane.is_slow = is_slow
    for number, count in running:
        for _ in range(min(count, slots.free_count)):
            slots.acquire(all_lanes[number], 0)
    max_slow = limit - 2 * (limit // 5)

    for lane in all_lanes:
        held = lane.tenant.running_count
        left = SlotShares(limit).remaining(limit - slots.running_count, held)
        if is_slow:
            free_slow = max_slow - slots.running_count
            left = min(left, SlotShares(max_slow).remaining(free_slow, held))
            left = min(left, free_slow)
        is_admitted = left > 0 and (not lane.running_count or lane.running_count < left)
        if slots.free_count:
            assert is_admitted is (slots.check(lane) is Admission.ADMITTED)


async def test_hanging_lanes_of_a_tenant_do_not_delay_another_tenant() -> None:
    """A task of another tenant is attempted at once although 160 hosts do not respond."""
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


async def test_hanging_lanes_do_not_delay_a_fast_lane_of_the_tenant() -> None:
    """A host that has answered quickly is not delayed by hosts of its tenant that hang."""
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


@pytest.mark.parametrize("hanging_hosts", [5, 20, 600])
@pytest.mark.parametrize("is_backlog", [False, True])
async def test_hanging_lanes_do_not_delay_a_new_lane_of_the_tenant(
    hanging_hosts: int, is_backlog: bool
) -> None:
    """At the default limits, a host without earlier attempts does not wait for hosts that hang."""
    target = FakeTarget(hang_except("fast.example"))
    harness = EngineHarness(target)
    hosts = [f"a{number % hanging_hosts}.example" for number in range(4 * hanging_hosts)]
    hosts += ["fast.example"] * 500
    tasks = [harness.new_task(f"http://{host}:80/") for host in hosts]
    if is_backlog:
        await harness.store.add(tasks)
        await harness.engine.start()
    else:
        await harness.engine.start()
        await harness.add(*tasks)
    await asyncio.sleep(2.0)

    fast_requests = [request for request in target.requests if "fast" in request.url]
    assert 500 == len(fast_requests)
    await harness.engine.stop(0.0)


@pytest.mark.parametrize("host_count", [8, 400])
async def test_tasks_for_hanging_targets_leave_leases_for_other_tenants(host_count: int) -> None:
    """A tenant whose waiting tasks could take all leases does not delay another tenant."""
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


@pytest.mark.parametrize("tenant_count", [1, 3, 8])
async def test_tenants_with_many_hanging_hosts_leave_leases_for_others(tenant_count: int) -> None:
    """A new tenant gets a lease although other tenants have more hanging hosts than leases."""
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


async def test_retries_for_hanging_targets_leave_leases_for_other_tenants() -> None:
    """A task of a tenant without a lease is attempted when attempts of other tenants time out."""
    target = FakeTarget(hang_except("fast.example"))
    limits = EngineLimits(max_running_attempts=10, max_leased=20)
    harness = EngineHarness(target, limits=limits)
    await harness.engine.start()
    await harness.add(harness.new_task("http://fast.example:80/", tenant="fast"))
    overrides = {"maxAttempts": 100, "initialDelayMs": 100, "maxDelayMs": 100}
    for tenant in ("a", "b", "c"):
        hosts = [f"{tenant}{number}.example:80" for number in range(30)]
        await harness.add(
            *(
                harness.new_task(f"http://{host}/", tenant=tenant, overrides=overrides)
                for host in hosts
            )
        )
        await asyncio.sleep(0.1)
    assert 0 == harness.engine.worker.leased_tasks.free_leases
    target.requests.clear()
    target.times.clear()

    added_at = asyncio.get_running_loop().time()
    await harness.add(harness.new_task("http://fast.example:80/", tenant="fast"))
    await asyncio.sleep(2 * HANG_S)

    started_at = time_of_first_request(target, "fast.example")
    assert started_at is not None
    assert started_at <= added_at + HANG_S
    await harness.engine.stop(0.0)


@pytest.mark.parametrize("tenant_count", [20, 60, 200])
async def test_leases_are_released_for_other_tenants(tenant_count: int) -> None:
    """A fast lane gets leases although the tenants with hanging hosts need more than all leases.

    Each of these tenants may have a lease, so together they could have all leases.
    """
    target = FakeTarget(hang_except("fast.example"))
    limits = EngineLimits(max_running_attempts=200, max_leased=200)
    harness = EngineHarness(target, limits=limits)
    await harness.engine.start()
    await harness.add(harness.new_task("http://fast.example:80/", tenant="fast"))
    for number in range(1000):
        tenant = f"t{number * tenant_count // 1000}"
        await harness.add(harness.new_task("http://a.example:80/", tenant=tenant))
    await asyncio.sleep(5)
    target.requests.clear()
    target.times.clear()

    added_at = asyncio.get_running_loop().time()
    await harness.add(harness.new_task("http://fast.example:80/", tenant="fast"))
    await asyncio.sleep(5)

    started_at = time_of_first_request(target, "fast.example")
    assert started_at is not None
    assert started_at <= added_at + 2
    await harness.engine.stop(60)


@pytest.mark.parametrize(
    ("host_count", "is_posted"), [(20, True), (20, False), (1000, True)], ids=str
)
async def test_waiting_tasks_leave_leases_for_a_fast_lane_of_the_tenant(
    host_count: int, is_posted: bool
) -> None:
    """A fast lane is not delayed, although its tenant has more tasks for hanging hosts than leases.

    A task that is not leased when it is added waits until the scheduler has released other tasks.
    """
    target = FakeTarget(hang_except("fast.example"))
    limits = EngineLimits(max_running_attempts=100, max_leased=400)
    harness = EngineHarness(target, limits=limits)
    await harness.engine.start()
    await harness.add(harness.new_task("http://fast.example:80/"))
    for number in range(1000):
        url = f"http://a{number % host_count}.example:80/"
        await harness.store.add([harness.new_task(url)])
    await asyncio.sleep(10)
    target.requests.clear()
    target.times.clear()

    added_at = asyncio.get_running_loop().time()
    new_task = harness.new_task("http://fast.example:80/")
    await (harness.add(new_task) if is_posted else harness.store.add([new_task]))
    await asyncio.sleep(5)

    started_at = time_of_first_request(target, "fast.example")
    assert started_at is not None
    assert started_at <= added_at + (0 if is_posted else 1)
    await harness.engine.stop(60)


def test_lane_that_becomes_slow_in_the_rotation_does_not_delay_fast_lanes() -> None:
    """A fast lane has its turn although a lane before it in the rotation has become slow."""
    lanes, slots = new_lanes(), AttemptSlots(100)
    leased = LeasedTasks(
        lanes, slots, lambda: 1000, max_leased=1000, lease_ms=0, on_due=lambda: None
    )
    fill(LaneRotation(slots), slots, [lanes[f"a/http:host-{number}:80"] for number in range(100)])
    hanging, fast = (new_fast_lane(lanes, f"a/http:{name}:80") for name in ("hanging", "fast"))
    slots.acquire(hanging, 0)
    leased.add([new_task(lane.name) for lane in (hanging, fast)])

    for lane in slots.mark_slow_lanes(1000):
        leased.add_to_rotation(lane)

    due = leased.pop_next_due()
    assert due is not None
    assert due.lane is fast
    assert leased.pop_next_due() is None


def new_task(lane: str) -> Task:
    """Return a task that is due."""
    return Task(id=lane, tenant="a", lane=lane, key="", fingerprint=b"", packed_content=b"")


def hang_except(host: str) -> Callable[[DeliveryRequest], Awaitable[DeliveryResult]]:
    """Return a responder that times out for all hosts except one."""

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        if host in request.url:
            return OK
        await asyncio.sleep(HANG_S)
        return TIMED_OUT

    return respond


def time_of_first_request(target: FakeTarget, host: str) -> float | None:
    """Return when the first request to a host was sent; None if there is none."""
    requests = zip(target.requests, target.times, strict=True)
    return next((time for request, time in requests if host in request.url), None)


def test_lane_with_a_leased_task_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of lanes, the tasks of one batch do not remove the lanes of each other."""
    monkeypatch.setattr("tarry.service.engine.lanes.MAX_LANES", 4)
    lanes, slots = new_lanes(), AttemptSlots(10)
    leased_tasks = LeasedTasks(
        lanes, slots, lambda: 1000, max_leased=1000, lease_ms=0, on_due=lambda: None
    )
    for number in range(3):
        assert not lanes[f"a/http:idle{number}:80"].leased_count
    leased_tasks.add([new_task(f"a/http:host{number}:80") for number in range(6)])
    assert all(lanes.get(task.lane.name) is task.lane for task in leased_tasks.values())
