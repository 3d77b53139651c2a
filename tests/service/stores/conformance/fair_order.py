"""Conformance: fair order of lanes and tenants."""

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


async def claim_repeatedly(
    harness: StoreHarness, times: int, limit: int, per_lane: int = 1000
) -> list[list[Task]]:
    """Claim `times` times, a millisecond apart, and finish the claimed tasks."""
    rounds = []
    for _ in range(times):
        harness.clock.advance(1)
        tasks = (await harness.claim(limit=limit, per_lane=per_lane)).tasks
        await harness.store.finish([success_result(leased) for leased in tasks])
        rounds.append(tasks)
    return rounds


@conformance_case
async def lanes_take_turns(harness: StoreHarness) -> None:
    """The least recently served lane is served next, however long other queues are."""
    await harness.add(*(task(number) for number in range(50)))
    harness.clock.advance(1)
    await harness.add(task(101, "b"), task(102, "b"), task(103, "c"), task(104, "c"))

    rounds = await claim_repeatedly(harness, 6, limit=1)

    lanes = [leased.lane for [leased] in rounds]
    assert [2, 2, 2] == [lanes.count(f"acme/https:{host}.example:443") for host in "abc"]
    assert 3 == len(set(lanes[:3])) == len(set(lanes[3:]))


@conformance_case
async def a_served_lane_is_last_in_the_order(harness: StoreHarness) -> None:
    """A served lane comes after lanes that were not served, also after a crash."""
    await harness.add(*(task(number, "ab"[number % 2]) for number in range(8)))
    [[first]] = await claim_repeatedly(harness, 1, limit=1)
    await harness.reopen()

    [[second]] = await claim_repeatedly(harness, 1, limit=1)

    assert first.lane != second.lane


@conformance_case
async def tenants_take_turns(harness: StoreHarness) -> None:
    """A tenant with a thousand lanes does not starve a tenant with one."""
    await harness.add(*(task(number, f"h{number}") for number in range(1000)))
    harness.clock.advance(1)
    await harness.add(*(task(2000 + number, tenant="beta") for number in range(3)))

    rounds = await claim_repeatedly(harness, 6, limit=1)

    assert 3 == sum(leased.tenant == "beta" for [leased] in rounds)


@conformance_case
async def tenants_share_a_claim(harness: StoreHarness) -> None:
    """A claim with several lanes has tasks of every tenant."""
    await harness.add(*(task(number, f"h{number % 40}") for number in range(400)))
    await harness.add(*(task(1000 + number, tenant="beta") for number in range(10)))
    await harness.add(*(task(2000 + number, tenant="gamma") for number in range(10)))

    [tasks] = await claim_repeatedly(harness, 1, limit=12, per_lane=2)

    counts = {name: sum(leased.tenant == name for leased in tasks) for name in ("beta", "gamma")}
    assert (12, {"beta": 2, "gamma": 2}) == (len(tasks), counts)


@conformance_case
async def small_claims_reach_every_lane(harness: StoreHarness) -> None:
    """Claims with a limit below the length of one queue return tasks of every lane."""
    await harness.add(*(task(number) for number in range(300)))
    await harness.add(*(task(1000 + number, "b") for number in range(3)))

    rounds = await claim_repeatedly(harness, 2, limit=5, per_lane=50)

    assert 3 == sum(leased.lane != LANE for tasks in rounds for leased in tasks)


@conformance_case
async def lanes_without_due_tasks_take_no_turn(harness: StoreHarness) -> None:
    """Lanes that are parked, paused or without due tasks do not delay other lanes."""
    later = START_MS + HORIZON_MS + HOUR_MS
    await harness.add(*(task(number, f"h{number}", next_attempt_at=later) for number in range(30)))
    for number in range(30, 60):
        new_task = task(number, f"h{number}")
        await harness.add(new_task)
        if number % 2:
            await harness.store.park(new_task.lane, later, probes=1, consecutive_opens=1)
        else:
            await harness.store.pause(new_task.lane)
    await harness.add(task(100), task(101, "b"))

    tasks = (await harness.claim(limit=2)).tasks

    assert [100, 101] == sorted(task_numbers(tasks))
    assert {Status.PENDING: 60, Status.IN_FLIGHT: 2} == await harness.counts()
