"""Conformance: lanes that are parked, half-open, paused and listed."""

from __future__ import annotations

from tarry.service.store import FinishStatus, NewTask
from tests.service.stores.harness import (
    HOUR_MS,
    LANE,
    LEASE,
    MINUTE_MS,
    OTHER_LEASE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    retry_result,
    success_result,
    task,
    task_numbers,
)

BETA = "beta/https:a.example:443"


@conformance_case
async def a_parked_lane_gives_no_tasks(harness: StoreHarness) -> None:
    """Its tasks are unchanged, other lanes continue, and `next_at` includes its end."""
    added = await harness.add(task(1), task(2, "b"))
    await harness.store.park(LANE, START_MS + MINUTE_MS, probes=1, consecutive_opens=1)

    assert [2] == task_numbers((await harness.claim()).tasks)
    await harness.store.finish([success_result(await harness.get(2))])
    harness.clock.now = START_MS + MINUTE_MS - 1
    claimed = await harness.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is not None
    assert harness.clock.now < claimed.next_at <= START_MS + MINUTE_MS
    assert added[0].task == await harness.get(1)
    harness.clock.advance(1)
    assert [1] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def a_half_open_lane_gives_as_many_tasks_as_probes(harness: StoreHarness) -> None:
    """Each probe that ends allows another one."""
    await harness.add(*(task(number) for number in range(6)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=2, consecutive_opens=3)
    harness.clock.advance(SECOND_MS)

    claimed = await harness.claim()
    assert ([0, 1], {LANE: 3}) == (task_numbers(claimed.tasks), claimed.consecutive_opens_by_lane)
    full = await harness.claim()
    assert ([], {}) == (full.tasks, full.consecutive_opens_by_lane)
    assert full.next_at is None or full.next_at > harness.clock.now
    await harness.store.finish([success_result(claimed.tasks[0])])
    again = await harness.claim()

    assert ([2], {LANE: 3}) == (task_numbers(again.tasks), again.consecutive_opens_by_lane)


@conformance_case
async def attempts_started_before_parking_count_as_probes(harness: StoreHarness) -> None:
    """Attempts that were IN_FLIGHT when the lane was parked count until they end."""
    await harness.add(*(task(number) for number in range(5)))
    leased = (await harness.claim(limit=3)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=2, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)
    assert [] == (await harness.claim()).tasks

    await harness.store.finish([success_result(one) for one in leased[:2]])

    assert [3] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def expired_probes_do_not_block_the_lane(harness: StoreHarness) -> None:
    """Expired leases free their slots, and their tasks are claimed again as probes."""
    await harness.add(*(task(number) for number in range(4)))
    leased = (await harness.claim(limit=2)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.now = leased[0].wake_at

    claimed = await harness.claim(OTHER_LEASE)

    assert (1, {LANE: 1}) == (len(claimed.tasks), claimed.consecutive_opens_by_lane)
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    harness.clock.advance(OTHER_LEASE.length_ms)
    assert 1 == len((await harness.claim()).tasks)


@conformance_case
async def a_late_result_frees_no_second_probe(harness: StoreHarness) -> None:
    """An expired lease holds no probe, so its result does not free one."""
    await harness.add(*(task(number) for number in range(4)))
    [late] = (await harness.claim(limit=1)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.now = late.wake_at
    assert [1] == task_numbers((await harness.claim(OTHER_LEASE)).tasks)

    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(late)])

    assert [] == (await harness.claim(OTHER_LEASE)).tasks


@conformance_case
async def opens_are_returned_only_for_lanes_with_leased_tasks(harness: StoreHarness) -> None:
    """`consecutive_opens_by_lane` has only lanes of which the claim has tasks."""
    await harness.add(task(1, next_attempt_at=START_MS + HOUR_MS), task(2, "b"))
    await harness.store.park(LANE, START_MS, probes=1, consecutive_opens=1)

    claimed = await harness.claim()

    assert ([2], {}) == (task_numbers(claimed.tasks), claimed.consecutive_opens_by_lane)


@conformance_case
async def parking_again_replaces_the_first_parking(harness: StoreHarness) -> None:
    """The last call counts, with its time, probes and number of openings."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)
    [probe] = (await harness.claim()).tasks
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=3, consecutive_opens=2)
    await harness.store.finish([retry_result(probe, START_MS + 2 * SECOND_MS)])

    harness.clock.advance(MINUTE_MS)
    assert [] == (await harness.claim()).tasks
    await harness.reopen()
    harness.clock.now = START_MS + HOUR_MS
    claimed = await harness.claim()

    assert (3, {LANE: 2}) == (len(claimed.tasks), claimed.consecutive_opens_by_lane)


@conformance_case
async def unparking_keeps_a_lane_paused(harness: StoreHarness) -> None:
    """Unparking resets the breaker's state, not the operator's pause."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, consecutive_opens=4)
    await harness.store.pause(LANE)

    await harness.store.unpark(LANE)
    await harness.store.unpark("acme/https:unknown:443")

    lane = await harness.lane()
    assert (None, 0, 0, True) == (
        lane.parked_until,
        lane.probes,
        lane.consecutive_opens,
        lane.paused,
    )
    assert [] == (await harness.claim()).tasks
    await harness.store.resume(LANE)
    assert 5 == len((await harness.claim()).tasks)


@conformance_case
async def a_resumed_lane_is_open(harness: StoreHarness) -> None:
    """Resuming a lane also ends its parking, and resets the number of openings."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, consecutive_opens=4)

    await harness.store.resume(LANE)

    lane = await harness.lane()
    assert (None, 0, 0, False) == (
        lane.parked_until,
        lane.probes,
        lane.consecutive_opens,
        lane.paused,
    )
    claimed = await harness.claim()
    assert (5, {}) == (len(claimed.tasks), claimed.consecutive_opens_by_lane)


@conformance_case
async def a_paused_lane_gives_no_tasks(harness: StoreHarness) -> None:
    """Neither due tasks nor expired leases are claimed until the lane is resumed."""
    await harness.add(task(1), task(2))
    await harness.claim(limit=1)
    await harness.store.pause(LANE)
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=5, consecutive_opens=1)
    harness.clock.advance(HOUR_MS)
    await harness.reopen()

    claimed = await harness.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is None or claimed.next_at > harness.clock.now
    await harness.store.resume(LANE)
    assert 2 == len((await harness.claim()).tasks)


@conformance_case
async def results_are_stored_in_parked_and_paused_lanes(harness: StoreHarness) -> None:
    """Parking and pausing do not affect leases."""
    await harness.add(task(1), task(2))
    one, two = (await harness.claim()).tasks
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, consecutive_opens=1)
    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [retry_result(one, START_MS + SECOND_MS)]
    )
    await harness.store.pause(LANE)
    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(two)])


@conformance_case
async def an_empty_lane_can_be_paused_and_parked(harness: StoreHarness) -> None:
    """This works before its first task; resuming an unknown lane does nothing."""
    await harness.store.resume("acme/https:unknown:443")
    assert await harness.store.get_lane("acme/https:unknown:443") is None
    await harness.store.pause(LANE)
    await harness.store.park(BETA, START_MS + HOUR_MS, probes=1, consecutive_opens=1)
    assert ("acme", True) == ((await harness.lane()).tenant, (await harness.lane()).paused)
    assert "beta" == (await harness.lane(BETA)).tenant

    await harness.add(task(1), task(2, tenant="beta"))

    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_lane_counts_its_tasks(harness: StoreHarness) -> None:
    """Pending, in-flight and dead tasks are counted, and the time of the last claim is known."""
    await harness.add(*(task(number) for number in range(5)))
    lane = await harness.lane()
    assert (LANE, "acme", 5, 0, 0) == (
        lane.name,
        lane.tenant,
        lane.pending,
        lane.in_flight,
        lane.exhausted,
    )
    assert lane.last_claim_at is None
    harness.clock.advance(5)
    leased = (await harness.claim(limit=4)).tasks
    await harness.store.finish(
        [
            success_result(leased[0]),
            exhausted_result(leased[1]),
            retry_result(leased[2], START_MS + HOUR_MS),
        ]
    )

    lane = await harness.lane()

    assert (2, 1, 1, START_MS + 5) == (
        lane.pending,
        lane.in_flight,
        lane.exhausted,
        lane.last_claim_at,
    )
    await harness.reopen()
    assert lane == await harness.lane()


@conformance_case
async def a_lease_on_add_does_not_count_as_a_claim(harness: StoreHarness) -> None:
    """`served_at` is None if tasks of the lane were only leased when they were added."""
    await harness.store.add([NewTask(task(1), lease_on_add=True)], LEASE)

    assert (await harness.lane()).last_claim_at is None


@conformance_case
async def lanes_are_listed_by_name(harness: StoreHarness) -> None:
    """Pages have no gaps and no repeats, for one tenant or for all."""
    hosts = [f"h{number}" for number in range(7)]
    for number, host in enumerate(reversed(hosts)):
        await harness.add(task(number, host), task(100 + number, host, tenant="beta"))

    async def listed(tenant: str | None, limit: int) -> list[str]:
        names: list[str] = []
        cursor = None
        for _ in range(40):
            page = await harness.store.list_lanes(tenant, cursor=cursor, limit=limit)
            assert len(page.items) <= limit
            names += [lane.name for lane in page.items]
            cursor = page.cursor
            if cursor is None:
                break
        assert cursor is None
        return names

    acme = [f"acme/https:{host}.example:443" for host in hosts]
    beta = [f"beta/https:{host}.example:443" for host in hosts]
    for limit in (1, 3, 7, 100):
        assert acme == await listed("acme", limit)
        assert beta == await listed("beta", limit)
        assert acme + beta == await listed(None, limit)
    assert [] == await listed("unknown", 100)
