"""What every store must do: lanes that are parked, probed, paused and listed, and fairness."""

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
    dead_result,
    retry_result,
    success_result,
    task,
    task_numbers,
)

BETA = "beta/https:a.example:443"


@conformance_case
async def a_parked_lane_gives_nothing_until_its_time(harness: StoreHarness) -> None:
    """Its tasks are left as they are, other lanes go on, and `next_at` knows the time."""
    added = await harness.add(task(1), task(2, "b"))
    await harness.store.park(LANE, START_MS + MINUTE_MS, probes=1, opened=1)

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
async def a_half_open_lane_gives_its_probes(harness: StoreHarness) -> None:
    """No more are in flight at a time than the probes; each that ends makes room for one."""
    await harness.add(*(task(number) for number in range(6)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=2, opened=3)
    harness.clock.advance(SECOND_MS)

    claimed = await harness.claim()
    assert ([0, 1], {LANE: 3}) == (task_numbers(claimed.tasks), claimed.probing)
    full = await harness.claim()
    assert ([], {}) == (full.tasks, full.probing)
    assert full.next_at is None or full.next_at > harness.clock.now
    await harness.store.finish([success_result(claimed.tasks[0])])
    again = await harness.claim()

    assert ([2], {LANE: 3}) == (task_numbers(again.tasks), again.probing)


@conformance_case
async def attempts_from_before_the_parking_take_probes(harness: StoreHarness) -> None:
    """What was in flight when the lane was parked counts until it ends."""
    await harness.add(*(task(number) for number in range(5)))
    held = (await harness.claim(limit=3)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=2, opened=1)
    harness.clock.advance(SECOND_MS)
    assert [] == (await harness.claim()).tasks

    await harness.store.finish([success_result(one) for one in held[:2]])

    assert [3] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def probes_of_a_dead_worker_do_not_block_the_lane(harness: StoreHarness) -> None:
    """Leases that ran out leave their room: they are claimed anew, as probes."""
    await harness.add(*(task(number) for number in range(4)))
    held = (await harness.claim(limit=2)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, opened=1)
    harness.clock.now = held[0].wake_at

    claimed = await harness.claim(OTHER_LEASE)

    assert (1, {LANE: 1}) == (len(claimed.tasks), claimed.probing)
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    harness.clock.advance(OTHER_LEASE.length)
    assert 1 == len((await harness.claim()).tasks)


@conformance_case
async def a_late_finish_makes_no_room_for_a_second_probe(harness: StoreHarness) -> None:
    """A lease that ran out takes no probe, so its end gives none back."""
    await harness.add(*(task(number) for number in range(4)))
    [late] = (await harness.claim(limit=1)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, opened=1)
    harness.clock.now = late.wake_at
    assert [1] == task_numbers((await harness.claim(OTHER_LEASE)).tasks)

    assert [FinishStatus.DONE] == await harness.store.finish([success_result(late)])

    assert [] == (await harness.claim(OTHER_LEASE)).tasks


@conformance_case
async def a_half_open_lane_with_nothing_to_probe_is_not_named(harness: StoreHarness) -> None:
    """`probing` names only lanes whose tasks are in the answer."""
    await harness.add(task(1, next_attempt_at=START_MS + HOUR_MS), task(2, "b"))
    await harness.store.park(LANE, START_MS, probes=1, opened=1)

    claimed = await harness.claim()

    assert ([2], {}) == (task_numbers(claimed.tasks), claimed.probing)


@conformance_case
async def a_lane_parked_again_stays_shut_for_longer(harness: StoreHarness) -> None:
    """The last call stands, with its count and its probes."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, opened=1)
    harness.clock.advance(SECOND_MS)
    [probe] = (await harness.claim()).tasks
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=3, opened=2)
    await harness.store.finish([retry_result(probe, START_MS + 2 * SECOND_MS)])

    harness.clock.advance(MINUTE_MS)
    assert [] == (await harness.claim()).tasks
    await harness.reopen()
    harness.clock.now = START_MS + HOUR_MS
    claimed = await harness.claim()

    assert (3, {LANE: 2}) == (len(claimed.tasks), claimed.probing)


@conformance_case
async def a_lane_that_recovered_stays_paused(harness: StoreHarness) -> None:
    """Unparking forgets what the breaker said, and leaves the operator's hand where it is."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, opened=4)
    await harness.store.pause(LANE)

    await harness.store.unpark(LANE)
    await harness.store.unpark("acme/https:unknown:443")

    lane = await harness.lane()
    assert (None, 0, 0, True) == (lane.parked_until, lane.probes, lane.opened, lane.paused)
    assert [] == (await harness.claim()).tasks
    await harness.store.resume(LANE)
    assert 5 == len((await harness.claim()).tasks)


@conformance_case
async def a_resumed_lane_is_open(harness: StoreHarness) -> None:
    """Resuming forgets that a lane was parked, and how often."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, opened=4)

    await harness.store.resume(LANE)

    lane = await harness.lane()
    assert (None, 0, 0, False) == (lane.parked_until, lane.probes, lane.opened, lane.paused)
    claimed = await harness.claim()
    assert (5, {}) == (len(claimed.tasks), claimed.probing)


@conformance_case
async def a_paused_lane_gives_nothing(harness: StoreHarness) -> None:
    """However long it takes, parked or not, abandoned or due, until it is resumed."""
    await harness.add(task(1), task(2))
    await harness.claim(limit=1)
    await harness.store.pause(LANE)
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=5, opened=1)
    harness.clock.advance(HOUR_MS)
    await harness.reopen()

    claimed = await harness.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is None or claimed.next_at > harness.clock.now
    await harness.store.resume(LANE)
    assert 2 == len((await harness.claim()).tasks)


@conformance_case
async def a_running_attempt_ends_in_a_lane_that_is_shut(harness: StoreHarness) -> None:
    """Parking and pausing touch no lease: finishes are written as ever."""
    await harness.add(task(1), task(2))
    one, two = (await harness.claim()).tasks
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, opened=1)
    assert [FinishStatus.DONE] == await harness.store.finish(
        [retry_result(one, START_MS + SECOND_MS)]
    )
    await harness.store.pause(LANE)
    assert [FinishStatus.DONE] == await harness.store.finish([success_result(two)])


@conformance_case
async def a_lane_without_tasks_can_be_shut(harness: StoreHarness) -> None:
    """A lane may be paused or parked before its first task; to resume an unknown one is nothing."""
    await harness.store.resume("acme/https:unknown:443")
    assert await harness.store.get_lane("acme/https:unknown:443") is None
    await harness.store.pause(LANE)
    await harness.store.park(BETA, START_MS + HOUR_MS, probes=1, opened=1)
    assert ("acme", True) == ((await harness.lane()).tenant, (await harness.lane()).paused)
    assert "beta" == (await harness.lane(BETA)).tenant

    await harness.add(task(1), task(2, tenant="beta"))

    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_lane_counts_its_tasks(harness: StoreHarness) -> None:
    """Pending, in flight and dead are counted as things happen; it knows when it was served."""
    await harness.add(*(task(number) for number in range(5)))
    lane = await harness.lane()
    assert (LANE, "acme", 5, 0, 0) == (
        lane.name,
        lane.tenant,
        lane.pending,
        lane.in_flight,
        lane.dead,
    )
    assert lane.served_at is None
    harness.clock.advance(5)
    held = (await harness.claim(limit=4)).tasks
    await harness.store.finish(
        [success_result(held[0]), dead_result(held[1]), retry_result(held[2], START_MS + HOUR_MS)]
    )

    lane = await harness.lane()

    assert (2, 1, 1, START_MS + 5) == (lane.pending, lane.in_flight, lane.dead, lane.served_at)
    await harness.reopen()
    assert lane == await harness.lane()


@conformance_case
async def a_direct_lease_is_no_claim(harness: StoreHarness) -> None:
    """A lane that was served by direct leases alone has not been claimed from."""
    await harness.store.add([NewTask(task(1), direct=True)], LEASE)

    assert (await harness.lane()).served_at is None


@conformance_case
async def lanes_are_listed_by_name(harness: StoreHarness) -> None:
    """In pages without gaps or repeats, of one tenant or of all."""
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
    assert [] == await listed("nobody", 100)
