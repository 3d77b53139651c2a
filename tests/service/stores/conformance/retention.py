"""What every store must do: numbers, and what is swept away."""

from __future__ import annotations

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import AddStatus, Retention, TaskFilter
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    dead_result,
    retry_result,
    success_result,
    task,
    task_id,
    task_numbers,
)

KEEP = Retention(succeeded=HOUR_MS, dead=DAY_MS)


# --- numbers --------------------------------------------------------------------------------------


@conformance_case
async def counters_follow_every_change(harness: StoreHarness) -> None:
    """By tenant and in all, through a whole life, and after a crash."""
    await harness.add(*(task(number) for number in range(6)), task(9, tenant="beta"))
    assert {Status.PENDING: 6} == await harness.counts("acme")
    assert {Status.PENDING: 1} == await harness.counts("beta")
    assert {Status.PENDING: 7} == await harness.counts()
    await harness.store.cancel("acme", task_id(5))
    held = [one for one in (await harness.claim()).tasks if one.tenant == "acme"]
    await harness.store.finish(
        [success_result(held[0]), dead_result(held[1]), retry_result(held[2], START_MS + HOUR_MS)]
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
    assert {} == await harness.counts("nobody")


@conformance_case
async def the_series_counts_attempts_by_minute(harness: StoreHarness) -> None:
    """When they were logged, by outcome, by tenant and in all; quiet minutes are left out."""
    await harness.add(task(1), task(2), task(3, tenant="beta"))
    one, two, three = sorted((await harness.claim()).tasks, key=lambda held: held.id)
    harness.clock.now = START_MS + MINUTE_MS - 1
    await harness.store.finish([success_result(one), dead_result(three)])
    harness.clock.now = START_MS + 3 * MINUTE_MS
    await harness.store.finish([success_result(two)])

    async def series(tenant: str | None, since: int) -> list[tuple[int, dict[str, int]]]:
        points = await harness.store.series(tenant, since=since)
        return [(point.minute, point.outcomes) for point in points]

    late = (START_MS + 3 * MINUTE_MS, {"success": 1})
    assert [(START_MS, {"success": 1}), late] == await series("acme", 0)
    assert [(START_MS, {"transient": 1})] == await series("beta", 0)
    assert [(START_MS, {"success": 1, "transient": 1}), late] == await series(None, START_MS + 5)
    assert [late] == await series(None, START_MS + MINUTE_MS)
    assert [late] == await series(None, START_MS + 3 * MINUTE_MS + 59_999)
    assert [] == await series(None, START_MS + 4 * MINUTE_MS)
    await harness.reopen()
    assert [(START_MS, {"success": 1}), late] == await series("acme", 0)


@conformance_case
async def a_day_of_the_series_is_kept(harness: StoreHarness) -> None:
    """What is older than a day is not told, whether swept or not."""
    held = await harness.leased(1)
    await harness.store.finish([success_result(held)])
    harness.clock.advance(DAY_MS - MINUTE_MS)
    assert 1 == len(await harness.store.series(None, since=0))
    harness.clock.advance(2 * MINUTE_MS)

    assert [] == await harness.store.series(None, since=0)
    held = await harness.leased(2)
    await harness.store.finish([success_result(held)])
    assert 1 == len(await harness.store.series("acme", since=0))


# --- sweep ----------------------------------------------------------------------------------------


async def swept(harness: StoreHarness, limit: int) -> int:
    """Sweep until there is no more to do, in steps within the limit."""
    total = 0
    for _ in range(100):
        result = await harness.store.sweep(KEEP, limit)
        assert result.tasks <= limit
        total += result.tasks
        if not result.more:
            return total
    raise AssertionError("the sweep does not end")


@conformance_case
async def a_sweep_removes_what_is_out_of_time(harness: StoreHarness) -> None:
    """Succeeded and cancelled ones after one time, dead ones after another, live ones never."""
    held = await harness.leased(1)
    await harness.store.finish([success_result(held)])
    await harness.dead(2)
    await harness.add(task(3))
    await harness.store.cancel("acme", task_id(3))
    await harness.add(task(4, next_attempt_at=START_MS + 9 * DAY_MS))
    await harness.leased(5)
    harness.clock.now = START_MS + HOUR_MS - 1
    assert 0 == await swept(harness, 10)

    harness.clock.advance(1)
    assert 2 == await swept(harness, 10)
    assert {Status.EXHAUSTED: 1, Status.PENDING: 1, Status.IN_FLIGHT: 1} == await harness.counts()
    assert await harness.store.get_task("acme", task_id(1)) is None
    assert [] == await harness.store.list_attempts("acme", task_id(1))
    harness.clock.now = START_MS + DAY_MS
    assert 1 == await swept(harness, 10)

    assert {Status.PENDING: 1, Status.IN_FLIGHT: 1} == await harness.counts()
    assert 0 == (await harness.lane()).dead
    assert AddStatus.ADDED is (await harness.add(task(1)))[0].status


@conformance_case
async def a_sweep_goes_in_small_steps(harness: StoreHarness) -> None:
    """No more than the limit at a time, and it says whether there is more to do."""
    await harness.add(*(task(number) for number in range(10)))
    await harness.store.finish([success_result(held) for held in (await harness.claim()).tasks])
    harness.clock.advance(HOUR_MS)

    first = await harness.store.sweep(KEEP, 4)

    assert (4, True) == (first.tasks, first.more)
    assert {Status.SUCCEEDED: 6} == await harness.counts()
    await harness.reopen()
    assert 6 == await swept(harness, 4)
    last = await harness.store.sweep(KEEP, 4)
    assert (0, False) == (last.tasks, last.more)


@conformance_case
async def bodies_are_orphans_until_they_are_buried(harness: StoreHarness) -> None:
    """Only those of tasks that are gone; a crash before the burial forgets none."""
    await harness.add(*(task(number, body_ref=f"b{number}") for number in range(5)))
    held = (await harness.claim(limit=4)).tasks
    await harness.store.finish([success_result(one) for one in held[:3]] + [dead_result(held[3])])
    await harness.add(task(9))
    await harness.store.cancel("acme", task_id(9))
    assert [] == await harness.store.orphans(10)
    harness.clock.advance(HOUR_MS)
    assert 4 == await swept(harness, 2)

    assert 2 == len(await harness.store.orphans(2))
    await harness.reopen()
    orphans = await harness.store.orphans(10)
    assert {f"b{int(one.id[-12:], 16)}" for one in held[:3]} == set(orphans)
    await harness.store.forget_orphans(orphans[:2])
    await harness.store.forget_orphans([])
    await harness.store.forget_orphans(["unknown", orphans[0]])

    assert orphans[2:] == await harness.store.orphans(10)


@conformance_case
async def a_replayed_letter_is_not_swept(harness: StoreHarness) -> None:
    """A letter that lives again has no end until it ends again."""
    await harness.dead(1)
    harness.clock.advance(DAY_MS - 1)
    await harness.store.retry_now("acme", task_id(1))
    harness.clock.advance(DAY_MS)
    assert 0 == await swept(harness, 10)
    [held] = (await harness.claim()).tasks
    await harness.store.finish([dead_result(held)])
    harness.clock.advance(DAY_MS - 1)

    assert 0 == await swept(harness, 10)
    harness.clock.advance(1)
    assert 1 == await swept(harness, 10)


@conformance_case
async def replays_that_have_ended_are_swept(harness: StoreHarness) -> None:
    """When they ended as long ago as a dead letter may have; one that runs stays."""
    ended, running = task_id(7), task_id(8)
    await harness.store.start_replay(ReplayRecord(id=ended, tenant="acme"))
    await harness.store.start_replay(ReplayRecord(id=running, tenant="acme"))
    harness.clock.advance(DAY_MS)
    await harness.store.replay_step(ended, 1)
    harness.clock.advance(DAY_MS - 1)
    await swept(harness, 10)
    assert await harness.store.get_replay("acme", ended) is not None
    harness.clock.advance(1)

    await swept(harness, 10)

    assert await harness.store.get_replay("acme", ended) is None
    assert await harness.store.get_replay("acme", running) is not None
    assert [running] == [job.id for job in await harness.store.list_replays(running=False)]


@conformance_case
async def letters_that_a_replay_has_promised_are_not_swept(harness: StoreHarness) -> None:
    """Those of its tenant wait for its end; those of others do not."""
    await harness.dead(1)
    await harness.dead(2)
    await harness.dead(3, tenant="beta")
    job = ReplayRecord(id=task_id(7), tenant="acme", rate=0.001)
    await harness.store.start_replay(job)
    await harness.store.replay_step(job.id, 1)
    harness.clock.advance(DAY_MS)

    assert 1 == await swept(harness, 10)

    assert [2] == task_numbers(
        (await harness.store.list_tasks("acme", TaskFilter(status=Status.EXHAUSTED))).items
    )
    await harness.store.cancel_replay("acme", job.id)
    assert 1 == await swept(harness, 10)


@conformance_case
async def closing_twice_is_harmless(harness: StoreHarness) -> None:
    """A store may be closed by more than one hand."""
    await harness.add(task(1))

    await harness.store.close()
    await harness.store.close()
