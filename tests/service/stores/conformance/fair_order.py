"""What every store must do: lanes and tenants that take turns."""

from __future__ import annotations

from tarry.service.model import Status, Task
from tests.service.stores.harness import (
    HORIZON_MS,
    HOUR_MS,
    LANE,
    START_MS,
    StoreHarness,
    conformance_case,
    success_result,
    task,
    task_numbers,
)

BETA = "beta/https:a.example:443"


async def serve(
    harness: StoreHarness, times: int, limit: int, per_lane: int = 1000
) -> list[list[Task]]:
    """Claim so many times, a millisecond apart, and end what was claimed."""
    rounds = []
    for _ in range(times):
        harness.clock.advance(1)
        tasks = (await harness.claim(limit=limit, per_lane=per_lane)).tasks
        await harness.store.finish([success_result(held) for held in tasks])
        rounds.append(tasks)
    return rounds


@conformance_case
async def lanes_take_turns(harness: StoreHarness) -> None:
    """The least recently served lane comes first, however long the backlog of another is."""
    await harness.add(*(task(number) for number in range(50)))
    harness.clock.advance(1)
    await harness.add(task(101, "b"), task(102, "b"), task(103, "c"), task(104, "c"))

    rounds = await serve(harness, 6, limit=1)

    lanes = [held.lane for [held] in rounds]
    assert [2, 2, 2] == [lanes.count(f"acme/https:{host}.example:443") for host in "abc"]
    assert 3 == len(set(lanes[:3])) == len(set(lanes[3:]))


@conformance_case
async def a_lane_served_later_waits_behind(harness: StoreHarness) -> None:
    """A lane that was served moves behind one that was not, also across a crash."""
    await harness.add(*(task(number, "ab"[number % 2]) for number in range(8)))
    [[first]] = await serve(harness, 1, limit=1)
    await harness.reopen()

    [[second]] = await serve(harness, 1, limit=1)

    assert first.lane != second.lane


@conformance_case
async def tenants_take_turns(harness: StoreHarness) -> None:
    """A tenant with a thousand lanes does not starve another with one."""
    await harness.add(*(task(number, f"h{number}") for number in range(1000)))
    harness.clock.advance(1)
    await harness.add(*(task(2000 + number, tenant="beta") for number in range(3)))

    rounds = await serve(harness, 6, limit=1)

    assert 3 == sum(held.tenant == "beta" for [held] in rounds)


@conformance_case
async def tenants_share_a_claim(harness: StoreHarness) -> None:
    """When a claim has room for several lanes, every tenant has a part in it."""
    await harness.add(*(task(number, f"h{number % 40}") for number in range(400)))
    await harness.add(*(task(1000 + number, tenant="beta") for number in range(10)))
    await harness.add(*(task(2000 + number, tenant="gamma") for number in range(10)))

    [tasks] = await serve(harness, 1, limit=12, per_lane=2)

    counts = {name: sum(held.tenant == name for held in tasks) for name in ("beta", "gamma")}
    assert (12, {"beta": 2, "gamma": 2}) == (len(tasks), counts)


@conformance_case
async def a_large_backlog_shuts_nobody_out(harness: StoreHarness) -> None:
    """A claim smaller than one lane's share still comes around to every lane."""
    await harness.add(*(task(number) for number in range(300)))
    await harness.add(*(task(1000 + number, "b") for number in range(3)))

    rounds = await serve(harness, 2, limit=5, per_lane=50)

    assert 3 == sum(held.lane != LANE for tasks in rounds for held in tasks)


@conformance_case
async def a_lane_with_nothing_due_costs_no_turn(harness: StoreHarness) -> None:
    """Lanes whose tasks are due later, parked or paused do not take the place of others."""
    later = START_MS + HORIZON_MS + HOUR_MS
    await harness.add(*(task(number, f"h{number}", next_attempt_at=later) for number in range(30)))
    for number in range(30, 60):
        given = task(number, f"h{number}")
        await harness.add(given)
        if number % 2:
            await harness.store.park(given.lane, later, probes=1, opened=1)
        else:
            await harness.store.pause(given.lane)
    await harness.add(task(100), task(101, "b"))

    tasks = (await harness.claim(limit=2)).tasks

    assert [100, 101] == sorted(task_numbers(tasks))
    assert {Status.PENDING: 60, Status.IN_FLIGHT: 2} == await harness.counts()
