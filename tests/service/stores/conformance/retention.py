"""Conformance: counters, attempts per minute, and retention."""

from __future__ import annotations

from tarry.service.model import ReplayRecord, SigningSecretRecord, Status
from tarry.service.records.signing_secrets import list_signing_secrets, put_signing_secret
from tarry.service.store import AddStatus, Retention, StoredTaskFilter
from tarry.wire.tasks import DownstreamLimits
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    LANE,
    MINUTE_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    retry_result,
    step_replay,
    success_result,
    task,
    task_id,
    task_numbers,
)

RETENTION = Retention(succeeded_ms=HOUR_MS, exhausted_ms=DAY_MS)


# --- counters and attempts per minute -------------------------------------------------------------


@conformance_case
async def counters_follow_every_change(harness: StoreHarness) -> None:
    """Counters match the tasks of each tenant after every transition, and after a crash."""
    await harness.add(*(task(number) for number in range(6)), task(9, tenant="beta"))
    assert {Status.PENDING: 6} == await harness.counts("acme")
    assert {Status.PENDING: 1} == await harness.counts("beta")
    assert {Status.PENDING: 7} == await harness.counts()
    await harness.store.cancel("acme", task_id(5))
    leased = [task for task in (await harness.claim()).tasks if task.tenant == "acme"]
    await harness.store.finish(
        [
            success_result(leased[0]),
            exhausted_result(leased[1]),
            retry_result(leased[2], START_MS + HOUR_MS),
        ]
    )
    expected = {
        Status.PENDING: 1,
        Status.IN_FLIGHT: 2,
        Status.SUCCEEDED: 1,
        Status.EXHAUSTED: 1,
        Status.CANCELLED: 1,
    }

    assert expected == await harness.counts("acme")
    await harness.reopen()
    assert expected == await harness.counts("acme")
    assert {Status.IN_FLIGHT: 1} == await harness.counts("beta")
    assert {} == await harness.counts("unknown")


@conformance_case
async def attempts_are_counted_per_minute(harness: StoreHarness) -> None:
    """Attempts are counted by outcome and tenant in the minute in which they are logged."""
    await harness.add(task(1), task(2), task(3, tenant="beta"))
    first, second, third = sorted((await harness.claim()).tasks, key=lambda leased: leased.id)
    harness.clock.now = START_MS + MINUTE_MS - 1
    await harness.store.finish([success_result(first), exhausted_result(third)])
    harness.clock.now = START_MS + 3 * MINUTE_MS
    await harness.store.finish([success_result(second)])

    async def attempts_per_minute(
        tenant: str | None, since: int
    ) -> list[tuple[int, dict[str, int]]]:
        minutes = await harness.store.attempts_per_minute(tenant, since=since)
        return [(minute.minute, minute.counts_by_outcome) for minute in minutes]

    late = (START_MS + 3 * MINUTE_MS, {"success": 1})
    assert [(START_MS, {"success": 1}), late] == await attempts_per_minute("acme", 0)
    assert [(START_MS, {"transient": 1})] == await attempts_per_minute("beta", 0)
    assert [(START_MS, {"success": 1, "transient": 1}), late] == await attempts_per_minute(
        None, START_MS + 5
    )
    assert [late] == await attempts_per_minute(None, START_MS + MINUTE_MS)
    assert [late] == await attempts_per_minute(None, START_MS + 3 * MINUTE_MS + 59_999)
    assert [] == await attempts_per_minute(None, START_MS + 4 * MINUTE_MS)
    await harness.reopen()
    assert [(START_MS, {"success": 1}), late] == await attempts_per_minute("acme", 0)


@conformance_case
async def attempts_per_minute_cover_one_day(harness: StoreHarness) -> None:
    """Counts of minutes that are older than a day are not returned."""
    leased = await harness.lease_new_task(1)
    await harness.store.finish([success_result(leased)])
    harness.clock.advance(DAY_MS - MINUTE_MS)
    assert 1 == len(await harness.store.attempts_per_minute(None, since=0))
    harness.clock.advance(2 * MINUTE_MS)

    assert [] == await harness.store.attempts_per_minute(None, since=0)
    leased = await harness.lease_new_task(2)
    await harness.store.finish([success_result(leased)])
    assert 1 == len(await harness.store.attempts_per_minute("acme", since=0))


# --- sweep ----------------------------------------------------------------------------------------


async def sweep_all(harness: StoreHarness, limit: int) -> int:
    """Sweep until no expired task is left; return the number of deleted tasks."""
    total = 0
    for _ in range(100):
        result = await harness.store.sweep(RETENTION, limit)
        assert result.removed_task_count <= limit
        total += result.removed_task_count
        if not result.has_more:
            return total
    raise AssertionError("the sweep does not end")


@conformance_case
async def a_sweep_deletes_expired_tasks(harness: StoreHarness) -> None:
    """Finished tasks expire after a time that depends on their status; others never expire."""
    leased = await harness.lease_new_task(1)
    await harness.store.finish([success_result(leased)])
    await harness.add_dead_letter(2)
    await harness.add(task(3))
    await harness.store.cancel("acme", task_id(3))
    await harness.add(task(4, next_attempt_at=START_MS + 9 * DAY_MS))
    await harness.lease_new_task(5)
    harness.clock.now = START_MS + HOUR_MS - 1
    assert 0 == await sweep_all(harness, 10)

    harness.clock.advance(1)
    assert 2 == await sweep_all(harness, 10)
    assert {Status.EXHAUSTED: 1, Status.PENDING: 1, Status.IN_FLIGHT: 1} == await harness.counts()
    assert await harness.store.get_task("acme", task_id(1)) is None
    assert [] == await harness.store.list_attempts("acme", task_id(1))
    harness.clock.now = START_MS + DAY_MS
    assert 1 == await sweep_all(harness, 10)

    assert {Status.PENDING: 1, Status.IN_FLIGHT: 1} == await harness.counts()
    assert 0 == (await harness.get_lane()).exhausted
    assert AddStatus.ADDED is (await harness.add(task(1)))[0].status


@conformance_case
async def a_sweep_respects_its_limit(harness: StoreHarness) -> None:
    """A sweep deletes at most `limit` tasks, and returns whether there are more."""
    await harness.add(*(task(number) for number in range(10)))
    await harness.store.finish([success_result(leased) for leased in (await harness.claim()).tasks])
    harness.clock.advance(HOUR_MS)

    first = await harness.store.sweep(RETENTION, 4)

    assert (4, True) == (first.removed_task_count, first.has_more)
    assert {Status.SUCCEEDED: 6} == await harness.counts()
    await harness.reopen()
    assert 6 == await sweep_all(harness, 4)
    last = await harness.store.sweep(RETENTION, 4)
    assert (0, False) == (last.removed_task_count, last.has_more)


@conformance_case
async def bodies_of_deleted_tasks_are_listed_until_they_are_forgotten(
    harness: StoreHarness,
) -> None:
    """Bodies of deleted tasks are listed as orphaned, also after a crash."""
    await harness.add(*(task(number, owned_body_ref=f"b{number}") for number in range(5)))
    leased = (await harness.claim(limit=4)).tasks
    await harness.store.finish(
        [success_result(leased_task) for leased_task in leased[:3]] + [exhausted_result(leased[3])]
    )
    await harness.add(task(9))
    await harness.store.cancel("acme", task_id(9))
    assert [] == await harness.store.list_orphaned_bodies(10)
    harness.clock.advance(HOUR_MS)
    assert 4 == await sweep_all(harness, 2)

    assert 2 == len(await harness.store.list_orphaned_bodies(2))
    await harness.reopen()
    orphaned_bodies = await harness.store.list_orphaned_bodies(10)
    assert {f"b{number}" for number in task_numbers(leased[:3])} == set(orphaned_bodies)
    await harness.store.forget_orphaned_bodies(orphaned_bodies[:2])
    await harness.store.forget_orphaned_bodies([])
    await harness.store.forget_orphaned_bodies(["unknown", orphaned_bodies[0]])

    assert orphaned_bodies[2:] == await harness.store.list_orphaned_bodies(10)


@conformance_case
async def a_replayed_dead_letter_is_not_swept(harness: StoreHarness) -> None:
    """A replayed task does not expire until it is finished again."""
    await harness.add_dead_letter(1)
    harness.clock.advance(DAY_MS - 1)
    await harness.store.retry_now("acme", task_id(1))
    harness.clock.advance(DAY_MS)
    assert 0 == await sweep_all(harness, 10)
    [leased] = (await harness.claim()).tasks
    await harness.store.finish([exhausted_result(leased)])
    harness.clock.advance(DAY_MS - 1)

    assert 0 == await sweep_all(harness, 10)
    harness.clock.advance(1)
    assert 1 == await sweep_all(harness, 10)


@conformance_case
async def finished_replays_are_swept(harness: StoreHarness) -> None:
    """Finished replays expire like dead letters; running replays do not expire."""
    finished_id, running_id = task_id(7), task_id(8)
    await harness.store.start_replay(ReplayRecord(id=finished_id, tenant="acme"))
    await harness.store.start_replay(ReplayRecord(id=running_id, tenant="acme"))
    harness.clock.advance(DAY_MS)
    await step_replay(harness.store, finished_id, 1)
    harness.clock.advance(DAY_MS - 1)
    await sweep_all(harness, 10)
    assert await harness.store.get_replay("acme", finished_id) is not None
    harness.clock.advance(1)

    await sweep_all(harness, 10)

    assert await harness.store.get_replay("acme", finished_id) is None
    assert await harness.store.get_replay("acme", running_id) is not None
    assert [running_id] == [replay.id for replay in await harness.store.list_replays(running=False)]


@conformance_case
async def dead_letters_of_a_running_replay_are_not_swept(harness: StoreHarness) -> None:
    """While a replay runs, dead letters of its tenant are not swept."""
    await harness.add_dead_letter(1)
    await harness.add_dead_letter(2)
    await harness.add_dead_letter(3, tenant="beta")
    replay = ReplayRecord(id=task_id(7), tenant="acme", rate=0.001)
    await harness.store.start_replay(replay)
    await step_replay(harness.store, replay.id, 1)
    harness.clock.advance(DAY_MS)

    assert 1 == await sweep_all(harness, 10)

    assert [2] == task_numbers(
        (await harness.store.list_tasks("acme", StoredTaskFilter(status=Status.EXHAUSTED))).items
    )
    await harness.store.cancel_replay("acme", replay.id)
    assert 1 == await sweep_all(harness, 10)


@conformance_case
async def dead_letters_are_swept_while_a_replay_waits(harness: StoreHarness) -> None:
    """A replay that only waits for its tasks does not keep dead letters; it is not swept itself."""
    await harness.add_dead_letter(1)
    await harness.store.start_replay(ReplayRecord(id=task_id(7), tenant="acme"))
    await step_replay(harness.store, task_id(7))
    await harness.claim()
    await harness.add_dead_letter(2)
    harness.clock.advance(DAY_MS)

    assert 1 == await sweep_all(harness, 10)

    assert await harness.store.get_replay("acme", task_id(7)) is not None


@conformance_case
async def lanes_without_tasks_are_swept(harness: StoreHarness) -> None:
    """A lane is removed with its last task, unless it is paused or parked, or has limits."""
    lanes = {host: f"acme/https:{host}.example:443" for host in "abcdef"}
    await harness.store.set_limits(lanes["f"], DownstreamLimits(concurrency=1), max_limited=9)
    for number, host in enumerate("abcd"):
        leased = await harness.lease_new_task(number, host=host)
        await harness.store.finish([success_result(leased)])
    await harness.add_dead_letter(8, host="e")
    await harness.store.pause(lanes["b"])
    parked_until = START_MS + 2 * HOUR_MS
    await harness.store.park(lanes["c"], parked_until, probes=1, consecutive_opens=1)
    await harness.add(task(9, "d", next_attempt_at=START_MS + 9 * DAY_MS))

    async def sweep_and_list() -> str:
        await sweep_all(harness, 1)
        page = await harness.store.list_lanes("acme")
        return "".join(host for host, lane in lanes.items() if lane in {n.name for n in page.items})

    assert "abcdef" == await sweep_and_list()
    harness.clock.advance(HOUR_MS)
    assert "bcdef" == await sweep_and_list()
    harness.clock.now = parked_until
    assert "bdef" == await sweep_and_list()
    await harness.store.resume(lanes["b"])
    await harness.reopen()
    await harness.store.set_limits(lanes["f"], None, max_limited=9)
    harness.clock.advance(DAY_MS)
    assert "d" == await sweep_and_list()


@conformance_case
async def a_removed_lane_can_be_used_again(harness: StoreHarness) -> None:
    """A task of a removed lane creates the lane, and the tasks of other lanes are not affected.

    The signing secret of the lane still exists. Its retry budget starts again.
    """
    secret = SigningSecretRecord(tenant="acme", id="secret", lane=LANE, secret=b"")
    await put_signing_secret(harness.store, secret, expire_previous_ms=0)
    leased = await harness.lease_new_task(1, host="a")
    await harness.store.finish([success_result(leased)])
    harness.clock.advance(HOUR_MS)
    await harness.store.add_to_budgets({LANE: -8.0})
    await sweep_all(harness, 10)
    assert await harness.store.get_lane(LANE) is None
    await harness.add(task(2, "b"), task(3, "a"))

    assert [2, 3] == sorted(task_numbers((await harness.claim()).tasks))
    for number, host in ((2, "b"), (3, "a")):
        found = await harness.get_task(number)
        assert f"acme/https:{host}.example:443" == found.lane
        assert 1 == (await harness.get_lane(found.lane)).in_flight
    assert [LANE] == [found.lane for found in await list_signing_secrets(harness.store, "acme")]
    assert {LANE: 1.0} == await harness.store.add_to_budgets({LANE: 1.0})


@conformance_case
async def closing_twice_is_harmless(harness: StoreHarness) -> None:
    """A second close does nothing."""
    await harness.add(task(1))

    await harness.store.close()
    await harness.store.close()
