"""What every store must do: numbers, and what is swept away."""

from __future__ import annotations

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import AddStatus, Retention, TaskFilter
from tests.service.stores.bench import (
    DAY,
    HOUR,
    MINUTE,
    NOON,
    Bench,
    conforms,
    numbers,
    stop,
    succeed,
    task,
    task_id,
    wait,
)

KEEP = Retention(succeeded=HOUR, dead=DAY)


# --- numbers --------------------------------------------------------------------------------------


@conforms
async def counters_follow_every_change(bench: Bench) -> None:
    """By tenant and in all, through a whole life, and after a crash."""
    await bench.add(*(task(number) for number in range(6)), task(9, tenant="beta"))
    assert {Status.PENDING: 6} == await bench.counts("acme")
    assert {Status.PENDING: 1} == await bench.counts("beta")
    assert {Status.PENDING: 7} == await bench.counts()
    await bench.store.cancel("acme", task_id(5))
    held = [one for one in (await bench.claim()).tasks if one.tenant == "acme"]
    await bench.store.finish([succeed(held[0]), stop(held[1]), wait(held[2], NOON + HOUR)])
    expected = {
        Status.PENDING: 1,
        Status.IN_FLIGHT: 2,
        Status.SUCCEEDED: 1,
        Status.EXHAUSTED: 1,
        Status.CANCELLED: 1,
    }

    assert expected == await bench.counts("acme")
    await bench.reopen()
    assert expected == await bench.counts("acme")
    assert {Status.IN_FLIGHT: 1} == await bench.counts("beta")
    assert {} == await bench.counts("nobody")


@conforms
async def the_series_counts_attempts_by_minute(bench: Bench) -> None:
    """When they were logged, by outcome, by tenant and in all; quiet minutes are left out."""
    await bench.add(task(1), task(2), task(3, tenant="beta"))
    one, two, three = sorted((await bench.claim()).tasks, key=lambda held: held.id)
    bench.clock.now = NOON + MINUTE - 1
    await bench.store.finish([succeed(one), stop(three)])
    bench.clock.now = NOON + 3 * MINUTE
    await bench.store.finish([succeed(two)])

    async def series(tenant: str | None, since: int) -> list[tuple[int, dict[str, int]]]:
        points = await bench.store.series(tenant, since=since)
        return [(point.minute, point.outcomes) for point in points]

    late = (NOON + 3 * MINUTE, {"success": 1})
    assert [(NOON, {"success": 1}), late] == await series("acme", 0)
    assert [(NOON, {"transient": 1})] == await series("beta", 0)
    assert [(NOON, {"success": 1, "transient": 1}), late] == await series(None, NOON + 5)
    assert [late] == await series(None, NOON + MINUTE)
    assert [late] == await series(None, NOON + 3 * MINUTE + 59_999)
    assert [] == await series(None, NOON + 4 * MINUTE)
    await bench.reopen()
    assert [(NOON, {"success": 1}), late] == await series("acme", 0)


@conforms
async def a_day_of_the_series_is_kept(bench: Bench) -> None:
    """What is older than a day is not told, whether swept or not."""
    held = await bench.leased(1)
    await bench.store.finish([succeed(held)])
    bench.clock.advance(DAY - MINUTE)
    assert 1 == len(await bench.store.series(None, since=0))
    bench.clock.advance(2 * MINUTE)

    assert [] == await bench.store.series(None, since=0)
    held = await bench.leased(2)
    await bench.store.finish([succeed(held)])
    assert 1 == len(await bench.store.series("acme", since=0))


# --- sweep ----------------------------------------------------------------------------------------


async def swept(bench: Bench, limit: int) -> int:
    """Sweep until there is no more to do, in steps within the limit."""
    total = 0
    for _ in range(100):
        result = await bench.store.sweep(KEEP, limit)
        assert result.tasks <= limit
        total += result.tasks
        if not result.more:
            return total
    raise AssertionError("the sweep does not end")


@conforms
async def a_sweep_removes_what_is_out_of_time(bench: Bench) -> None:
    """Succeeded and cancelled ones after one time, dead ones after another, live ones never."""
    held = await bench.leased(1)
    await bench.store.finish([succeed(held)])
    await bench.dead(2)
    await bench.add(task(3))
    await bench.store.cancel("acme", task_id(3))
    await bench.add(task(4, next_attempt_at=NOON + 9 * DAY))
    await bench.leased(5)
    bench.clock.now = NOON + HOUR - 1
    assert 0 == await swept(bench, 10)

    bench.clock.advance(1)
    assert 2 == await swept(bench, 10)
    assert {Status.EXHAUSTED: 1, Status.PENDING: 1, Status.IN_FLIGHT: 1} == await bench.counts()
    assert await bench.store.get_task("acme", task_id(1)) is None
    assert [] == await bench.store.list_attempts("acme", task_id(1))
    bench.clock.now = NOON + DAY
    assert 1 == await swept(bench, 10)

    assert {Status.PENDING: 1, Status.IN_FLIGHT: 1} == await bench.counts()
    assert 0 == (await bench.lane()).dead
    assert AddStatus.ADDED is (await bench.add(task(1)))[0].status


@conforms
async def a_sweep_goes_in_small_steps(bench: Bench) -> None:
    """No more than the limit at a time, and it says whether there is more to do."""
    await bench.add(*(task(number) for number in range(10)))
    await bench.store.finish([succeed(held) for held in (await bench.claim()).tasks])
    bench.clock.advance(HOUR)

    first = await bench.store.sweep(KEEP, 4)

    assert (4, True) == (first.tasks, first.more)
    assert {Status.SUCCEEDED: 6} == await bench.counts()
    await bench.reopen()
    assert 6 == await swept(bench, 4)
    last = await bench.store.sweep(KEEP, 4)
    assert (0, False) == (last.tasks, last.more)


@conforms
async def bodies_are_orphans_until_they_are_buried(bench: Bench) -> None:
    """Only those of tasks that are gone; a crash before the burial forgets none."""
    await bench.add(*(task(number, body_ref=f"b{number}") for number in range(5)))
    held = (await bench.claim(limit=4)).tasks
    await bench.store.finish([succeed(one) for one in held[:3]] + [stop(held[3])])
    await bench.add(task(9))
    await bench.store.cancel("acme", task_id(9))
    assert [] == await bench.store.orphans(10)
    bench.clock.advance(HOUR)
    assert 4 == await swept(bench, 2)

    assert 2 == len(await bench.store.orphans(2))
    await bench.reopen()
    orphans = await bench.store.orphans(10)
    assert {f"b{int(one.id[-12:], 16)}" for one in held[:3]} == set(orphans)
    await bench.store.forget_orphans(orphans[:2])
    await bench.store.forget_orphans([])
    await bench.store.forget_orphans(["unknown", orphans[0]])

    assert orphans[2:] == await bench.store.orphans(10)


@conforms
async def a_replayed_letter_is_not_swept(bench: Bench) -> None:
    """A letter that lives again has no end until it ends again."""
    await bench.dead(1)
    bench.clock.advance(DAY - 1)
    await bench.store.retry_now("acme", task_id(1))
    bench.clock.advance(DAY)
    assert 0 == await swept(bench, 10)
    [held] = (await bench.claim()).tasks
    await bench.store.finish([stop(held)])
    bench.clock.advance(DAY - 1)

    assert 0 == await swept(bench, 10)
    bench.clock.advance(1)
    assert 1 == await swept(bench, 10)


@conforms
async def replays_that_have_ended_are_swept(bench: Bench) -> None:
    """When they ended as long ago as a dead letter may have; one that runs stays."""
    ended, running = task_id(7), task_id(8)
    await bench.store.start_replay(ReplayRecord(id=ended, tenant="acme"))
    await bench.store.start_replay(ReplayRecord(id=running, tenant="acme"))
    bench.clock.advance(DAY)
    await bench.store.replay_step(ended, 1)
    bench.clock.advance(DAY - 1)
    await swept(bench, 10)
    assert await bench.store.get_replay("acme", ended) is not None
    bench.clock.advance(1)

    await swept(bench, 10)

    assert await bench.store.get_replay("acme", ended) is None
    assert await bench.store.get_replay("acme", running) is not None
    assert [running] == [job.id for job in await bench.store.list_replays(running=False)]


@conforms
async def letters_that_a_replay_has_promised_are_not_swept(bench: Bench) -> None:
    """Those of its tenant wait for its end; those of others do not."""
    await bench.dead(1)
    await bench.dead(2)
    await bench.dead(3, tenant="beta")
    job = ReplayRecord(id=task_id(7), tenant="acme", rate=0.001)
    await bench.store.start_replay(job)
    await bench.store.replay_step(job.id, 1)
    bench.clock.advance(DAY)

    assert 1 == await swept(bench, 10)

    assert [2] == numbers(
        (await bench.store.list_tasks("acme", TaskFilter(status=Status.EXHAUSTED))).items
    )
    await bench.store.cancel_replay("acme", job.id)
    assert 1 == await swept(bench, 10)


@conforms
async def closing_twice_is_harmless(bench: Bench) -> None:
    """A store may be closed by more than one hand."""
    await bench.add(task(1))

    await bench.store.close()
    await bench.store.close()
