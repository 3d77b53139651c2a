"""What every store must do: lanes that are parked, probed, paused and listed, and fairness."""

from __future__ import annotations

from tarry.service.store import FinishStatus, NewTask
from tests.service.stores.bench import (
    HOUR,
    LANE,
    LEASE,
    MINUTE,
    NOON,
    OTHER,
    SECOND,
    Bench,
    conforms,
    numbers,
    stop,
    succeed,
    task,
    wait,
)

BETA = "beta/https:a.example:443"


@conforms
async def a_parked_lane_gives_nothing_until_its_time(bench: Bench) -> None:
    """Its tasks are left as they are, other lanes go on, and `next_at` knows the time."""
    added = await bench.add(task(1), task(2, "b"))
    await bench.store.park(LANE, NOON + MINUTE, probes=1, opened=1)

    assert [2] == numbers((await bench.claim()).tasks)
    await bench.store.finish([succeed(await bench.get(2))])
    bench.clock.now = NOON + MINUTE - 1
    claimed = await bench.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is not None
    assert bench.clock.now < claimed.next_at <= NOON + MINUTE
    assert added[0].task == await bench.get(1)
    bench.clock.advance(1)
    assert [1] == numbers((await bench.claim()).tasks)


@conforms
async def a_half_open_lane_gives_its_probes(bench: Bench) -> None:
    """No more are in flight at a time than the probes; each that ends makes room for one."""
    await bench.add(*(task(number) for number in range(6)))
    await bench.store.park(LANE, NOON + SECOND, probes=2, opened=3)
    bench.clock.advance(SECOND)

    claimed = await bench.claim()
    assert ([0, 1], {LANE: 3}) == (numbers(claimed.tasks), claimed.probing)
    full = await bench.claim()
    assert ([], {}) == (full.tasks, full.probing)
    assert full.next_at is None or full.next_at > bench.clock.now
    await bench.store.finish([succeed(claimed.tasks[0])])
    again = await bench.claim()

    assert ([2], {LANE: 3}) == (numbers(again.tasks), again.probing)


@conforms
async def attempts_from_before_the_parking_take_probes(bench: Bench) -> None:
    """What was in flight when the lane was parked counts until it ends."""
    await bench.add(*(task(number) for number in range(5)))
    held = (await bench.claim(limit=3)).tasks
    await bench.store.park(LANE, NOON + SECOND, probes=2, opened=1)
    bench.clock.advance(SECOND)
    assert [] == (await bench.claim()).tasks

    await bench.store.finish([succeed(one) for one in held[:2]])

    assert [3] == numbers((await bench.claim()).tasks)


@conforms
async def probes_of_a_dead_worker_do_not_block_the_lane(bench: Bench) -> None:
    """Leases that ran out leave their room: they are claimed anew, as probes."""
    await bench.add(*(task(number) for number in range(4)))
    held = (await bench.claim(limit=2)).tasks
    await bench.store.park(LANE, NOON + SECOND, probes=1, opened=1)
    bench.clock.now = held[0].wake_at

    claimed = await bench.claim(OTHER)

    assert (1, {LANE: 1}) == (len(claimed.tasks), claimed.probing)
    assert [] == (await bench.claim(OTHER)).tasks
    bench.clock.advance(OTHER.length)
    assert 1 == len((await bench.claim()).tasks)


@conforms
async def a_late_finish_makes_no_room_for_a_second_probe(bench: Bench) -> None:
    """A lease that ran out takes no probe, so its end gives none back."""
    await bench.add(*(task(number) for number in range(4)))
    [late] = (await bench.claim(limit=1)).tasks
    await bench.store.park(LANE, NOON + SECOND, probes=1, opened=1)
    bench.clock.now = late.wake_at
    assert [1] == numbers((await bench.claim(OTHER)).tasks)

    assert [FinishStatus.DONE] == await bench.store.finish([succeed(late)])

    assert [] == (await bench.claim(OTHER)).tasks


@conforms
async def a_half_open_lane_with_nothing_to_probe_is_not_named(bench: Bench) -> None:
    """`probing` names only lanes whose tasks are in the answer."""
    await bench.add(task(1, next_attempt_at=NOON + HOUR), task(2, "b"))
    await bench.store.park(LANE, NOON, probes=1, opened=1)

    claimed = await bench.claim()

    assert ([2], {}) == (numbers(claimed.tasks), claimed.probing)


@conforms
async def a_lane_parked_again_stays_shut_for_longer(bench: Bench) -> None:
    """The last call stands, with its count and its probes."""
    await bench.add(*(task(number) for number in range(5)))
    await bench.store.park(LANE, NOON + SECOND, probes=1, opened=1)
    bench.clock.advance(SECOND)
    [probe] = (await bench.claim()).tasks
    await bench.store.park(LANE, NOON + HOUR, probes=3, opened=2)
    await bench.store.finish([wait(probe, NOON + 2 * SECOND)])

    bench.clock.advance(MINUTE)
    assert [] == (await bench.claim()).tasks
    await bench.reopen()
    bench.clock.now = NOON + HOUR
    claimed = await bench.claim()

    assert (3, {LANE: 2}) == (len(claimed.tasks), claimed.probing)


@conforms
async def a_lane_that_recovered_stays_paused(bench: Bench) -> None:
    """Unparking forgets what the breaker said, and leaves the operator's hand where it is."""
    await bench.add(*(task(number) for number in range(5)))
    await bench.store.park(LANE, NOON + HOUR, probes=1, opened=4)
    await bench.store.pause(LANE)

    await bench.store.unpark(LANE)
    await bench.store.unpark("acme/https:unknown:443")

    lane = await bench.lane()
    assert (None, 0, 0, True) == (lane.parked_until, lane.probes, lane.opened, lane.paused)
    assert [] == (await bench.claim()).tasks
    await bench.store.resume(LANE)
    assert 5 == len((await bench.claim()).tasks)


@conforms
async def a_resumed_lane_is_open(bench: Bench) -> None:
    """Resuming forgets that a lane was parked, and how often."""
    await bench.add(*(task(number) for number in range(5)))
    await bench.store.park(LANE, NOON + HOUR, probes=1, opened=4)

    await bench.store.resume(LANE)

    lane = await bench.lane()
    assert (None, 0, 0, False) == (lane.parked_until, lane.probes, lane.opened, lane.paused)
    claimed = await bench.claim()
    assert (5, {}) == (len(claimed.tasks), claimed.probing)


@conforms
async def a_paused_lane_gives_nothing(bench: Bench) -> None:
    """However long it takes, parked or not, abandoned or due, until it is resumed."""
    await bench.add(task(1), task(2))
    await bench.claim(limit=1)
    await bench.store.pause(LANE)
    await bench.store.park(LANE, NOON + SECOND, probes=5, opened=1)
    bench.clock.advance(HOUR)
    await bench.reopen()

    claimed = await bench.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is None or claimed.next_at > bench.clock.now
    await bench.store.resume(LANE)
    assert 2 == len((await bench.claim()).tasks)


@conforms
async def a_running_attempt_ends_in_a_lane_that_is_shut(bench: Bench) -> None:
    """Parking and pausing touch no lease: finishes are written as ever."""
    await bench.add(task(1), task(2))
    one, two = (await bench.claim()).tasks
    await bench.store.park(LANE, NOON + HOUR, probes=1, opened=1)
    assert [FinishStatus.DONE] == await bench.store.finish([wait(one, NOON + SECOND)])
    await bench.store.pause(LANE)
    assert [FinishStatus.DONE] == await bench.store.finish([succeed(two)])


@conforms
async def a_lane_without_tasks_can_be_shut(bench: Bench) -> None:
    """A lane may be paused or parked before its first task; to resume an unknown one is nothing."""
    await bench.store.resume("acme/https:unknown:443")
    assert await bench.store.get_lane("acme/https:unknown:443") is None
    await bench.store.pause(LANE)
    await bench.store.park(BETA, NOON + HOUR, probes=1, opened=1)
    assert ("acme", True) == ((await bench.lane()).tenant, (await bench.lane()).paused)
    assert "beta" == (await bench.lane(BETA)).tenant

    await bench.add(task(1), task(2, tenant="beta"))

    assert [] == (await bench.claim()).tasks


@conforms
async def a_lane_counts_its_tasks(bench: Bench) -> None:
    """Pending, in flight and dead are counted as things happen; it knows when it was served."""
    await bench.add(*(task(number) for number in range(5)))
    lane = await bench.lane()
    assert (LANE, "acme", 5, 0, 0) == (
        lane.name,
        lane.tenant,
        lane.pending,
        lane.in_flight,
        lane.dead,
    )
    assert lane.served_at is None
    bench.clock.advance(5)
    held = (await bench.claim(limit=4)).tasks
    await bench.store.finish([succeed(held[0]), stop(held[1]), wait(held[2], NOON + HOUR)])

    lane = await bench.lane()

    assert (2, 1, 1, NOON + 5) == (lane.pending, lane.in_flight, lane.dead, lane.served_at)
    await bench.reopen()
    assert lane == await bench.lane()


@conforms
async def a_direct_lease_is_no_claim(bench: Bench) -> None:
    """A lane that was served by direct leases alone has not been claimed from."""
    await bench.store.add([NewTask(task(1), direct=True)], LEASE)

    assert (await bench.lane()).served_at is None


@conforms
async def lanes_are_listed_by_name(bench: Bench) -> None:
    """In pages without gaps or repeats, of one tenant or of all."""
    hosts = [f"h{number}" for number in range(7)]
    for number, host in enumerate(reversed(hosts)):
        await bench.add(task(number, host), task(100 + number, host, tenant="beta"))

    async def listed(tenant: str | None, limit: int) -> list[str]:
        names: list[str] = []
        cursor = None
        for _ in range(40):
            page = await bench.store.list_lanes(tenant, cursor=cursor, limit=limit)
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
