"""What every store must do: dead letters that are counted, replayed and purged."""

from __future__ import annotations

from typing import Any

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import RetryNowStatus, TaskFilter
from tests.service.stores.bench import (
    HOUR,
    LANE,
    NOON,
    SECOND,
    Bench,
    conforms,
    numbers,
    stop,
    task,
    task_id,
)

JOB = "0195d000-0000-7000-9000-000000000001"


def job(replay_id: str = JOB, **fields: Any) -> ReplayRecord:
    """A job over all dead letters of acme."""
    return ReplayRecord(**{"id": replay_id, "tenant": "acme", **fields})


async def step(bench: Bench, limit: int = 100, replay_id: str = JOB) -> ReplayRecord:
    """Take one step of a job that must be there."""
    found = await bench.store.replay_step(replay_id, limit)
    assert found is not None
    return found


async def waiting(bench: Bench) -> list[int]:
    """The numbers of the tasks that wait."""
    page = await bench.store.list_tasks("acme", TaskFilter(status=Status.PENDING), limit=1000)
    return sorted(numbers(page.items))


async def bury(bench: Bench, count: int) -> None:
    """Make so many dead letters."""
    for number in range(count):
        await bench.dead(number)


@conforms
async def a_replay_may_be_as_slow_as_can_be(bench: Bench) -> None:
    """The next step is far away, but not beyond all times."""
    await bury(bench, 3)
    await bench.store.start_replay(job(rate=1e-300))

    after = await step(bench, 1)

    assert (1, "running") == (after.replayed, after.status)
    assert NOON < after.next_at < 2**53
    assert after == await step(bench, 1)


@conforms
async def letters_are_counted_by_filter(bench: Bench) -> None:
    """By tenant, lane, policy, reason and time, and nothing is changed."""
    await bench.dead(1, "attempts", host="a")
    await bench.dead(2, "budget", host="b", policy_id="webhook")
    await bench.dead(3, "attempts", host="b", tenant="beta")
    await bench.add(task(4, next_attempt_at=NOON + HOUR))
    bench.clock.advance(10)
    await bench.dead(5, "attempts", host="b", policy_id="webhook")
    counts = {
        3: job(),
        1: job(tenant="beta"),
        2: job(policy_id="webhook"),
        0: job(lane="acme/https:unknown:443"),
    }

    for expected, replay in counts.items():
        assert expected == await bench.store.count_dead(replay)
    assert 2 == await bench.store.count_dead(job(before=NOON + 9))
    assert 3 == await bench.store.count_dead(job(before=NOON + 10))
    assert 1 == await bench.store.count_dead(job(policy_id="webhook", reason="attempts"))
    assert 1 == await bench.store.count_dead(job(lane=LANE))
    assert {Status.EXHAUSTED: 4, Status.PENDING: 1} == await bench.counts()


@conforms
async def a_job_is_kept_with_its_count(bench: Bench) -> None:
    """The store says when it was made, what it matches, and that it is due at once."""
    await bury(bench, 3)
    bench.clock.advance(5)

    made = await bench.store.start_replay(job(reason="attempts", rate=2.0))

    assert (NOON + 5, NOON + 5, NOON + 5) == (made.created_at, made.before, made.next_at)
    assert (3, 0, "running", None) == (made.matched, made.replayed, made.status, made.finished_at)
    assert ("attempts", 2.0) == (made.reason, made.rate)
    await bench.reopen()
    assert made == await bench.store.get_replay("acme", JOB)
    assert {Status.EXHAUSTED: 3} == await bench.counts()


@conforms
async def the_same_job_again_is_the_same(bench: Bench) -> None:
    """After a lost answer the id finds the job as it stands."""
    await bury(bench, 3)
    await bench.store.start_replay(job())
    stands = await step(bench, 2)
    bench.clock.advance(5)

    assert stands == await bench.store.start_replay(job(reason="other"))
    assert [stands] == await bench.store.list_replays(running=True)


@conforms
async def a_job_brings_its_letters_back(bench: Bench) -> None:
    """Step by step, oldest first; ids and keys stay, attempts are forgiven."""
    for number in range(5):
        await bench.dead(number, "budget" if number == 3 else "attempts", body_ref=f"b{number}")
    before = [await bench.get(number) for number in range(5)]
    bench.clock.advance(HOUR)
    await bench.store.start_replay(job(reason="attempts"))

    assert ("running", 2) == _progress(await step(bench, 2))
    assert [0, 1] == await waiting(bench)
    await step(bench, 2)
    done = await step(bench, 2)

    assert ("done", 4, NOON + HOUR) == (done.status, done.replayed, done.finished_at)
    assert [0, 1, 2, 4] == await waiting(bench)
    for number in (0, 1, 2, 4):
        anew, old = await bench.get(number), before[number]
        assert (old.key, old.content, old.body_ref) == (anew.key, anew.content, anew.body_ref)
        assert (Status.PENDING, None, None) == (anew.status, anew.reason, anew.finished_at)
        assert (1, 1, 1) == (anew.attempts, anew.forgiven, anew.replays)
        assert (None, 0, None) == (anew.previous_delay, anew.restarted, anew.last_kind)
        assert (NOON + HOUR,) * 3 == (anew.next_attempt_at, anew.started_at, anew.wake_at)
        assert old.version + 1 == anew.version
    assert before[3] == await bench.get(3)
    lane = await bench.lane()
    assert (4, 1) == (lane.pending, lane.dead)
    assert {Status.PENDING: 4, Status.EXHAUSTED: 1} == await bench.counts()


def _progress(replay: ReplayRecord) -> tuple[str, int]:
    return replay.status, replay.replayed


@conforms
async def a_letter_that_dies_again_is_not_the_jobs_business(bench: Bench) -> None:
    """A job ends, however often its letters die; the next one forgives again."""
    await bury(bench, 3)
    bench.clock.advance(1)
    await bench.store.start_replay(job())
    await step(bench, 2)
    bench.clock.advance(1)
    await bench.store.finish([stop(held) for held in (await bench.claim()).tasks])

    await step(bench, 2)
    done = await step(bench, 2)

    assert ("done", 3) == _progress(done)
    assert [2] == await waiting(bench)
    assert (2, 1, 1) == _life(await bench.get(0))
    bench.clock.advance(1)
    await bench.store.start_replay(job("0195d000-0000-7000-9000-000000000002"))
    await step(bench, 100, "0195d000-0000-7000-9000-000000000002")
    assert (2, 2, 2) == _life(await bench.get(0))


@conforms
async def a_letter_comes_back_once_in_a_job(bench: Bench) -> None:
    """Also when it dies again in the same millisecond."""
    await bury(bench, 3)
    await bench.store.start_replay(job())
    for _ in range(2):
        await step(bench, 1)
        await bench.store.finish([stop(held) for held in (await bench.claim()).tasks])

    assert ("done", 3) == _progress(await step(bench, 5))

    assert [1, 1, 1] == [(await bench.get(number)).replays for number in range(3)]


@conforms
async def what_dies_later_is_not_the_jobs_business(bench: Bench) -> None:
    """A job that names a time to come takes what is dead when it is made."""
    await bench.dead(1)
    made = await bench.store.start_replay(job(before=NOON + HOUR))
    bench.clock.advance(1)
    await bench.dead(2)

    done = await step(bench)

    assert (NOON, 1, 1) == (made.before, made.matched, done.replayed)
    assert [1] == await waiting(bench)


def _life(found: Any) -> tuple[int, int, int]:
    return found.attempts, found.forgiven, found.replays


@conforms
async def a_rate_puts_the_next_step_off(bench: Bench) -> None:
    """A step before its time changes nothing; n letters take n / rate seconds."""
    await bury(bench, 7)
    await bench.store.start_replay(job(rate=2.0))

    first = await step(bench, 3)
    assert (3, NOON + 1500) == (first.replayed, first.next_at)
    bench.clock.advance(1499)
    assert first == await step(bench, 3)
    bench.clock.advance(1)
    second = await step(bench, 3)
    assert (6, NOON + 3000) == (second.replayed, second.next_at)
    bench.clock.advance(10 * SECOND)
    assert ("done", 7) == _progress(await step(bench, 3))


@conforms
async def a_step_that_comes_late_catches_up(bench: Bench) -> None:
    """The next is due as if it had come in time, but a job that rested for long makes no rush."""
    await bury(bench, 9)
    await bench.store.start_replay(job(rate=2.0))

    bench.clock.advance(300)
    assert NOON + 500 == (await step(bench, 1)).next_at
    bench.clock.advance(HOUR)
    late = await step(bench, 1)

    assert (2, NOON + HOUR + 300 - 1000 + 500) == (late.replayed, late.next_at)


@conforms
async def without_a_rate_the_next_step_is_due_at_once(bench: Bench) -> None:
    """A rate of 0 is no limit."""
    await bury(bench, 3)
    await bench.store.start_replay(job())

    assert NOON == (await step(bench, 1)).next_at
    assert 2 == (await step(bench, 1)).replayed


@conforms
async def a_job_goes_on_after_a_crash(bench: Bench) -> None:
    """Each letter comes back once, whatever happens between the steps."""
    await bury(bench, 5)
    stands = await bench.store.start_replay(job())
    for _ in range(6):
        stands = await step(bench, 1)
        await bench.reopen()
        assert stands == await bench.store.get_replay("acme", JOB)

    assert ("done", 5) == _progress(stands)
    assert [1] * 5 == [(await bench.get(number)).replays for number in range(5)]


@conforms
async def letters_that_are_gone_are_passed_over(bench: Bench) -> None:
    """What was retried or purged since the job was made is not brought back again."""
    await bury(bench, 4)
    await bench.store.start_replay(job())
    assert RetryNowStatus.DUE is await bench.store.retry_now("acme", task_id(1))
    assert 1 == await bench.store.purge("acme", TaskFilter(), 1)

    done = await step(bench)

    assert ("done", 2, 4) == (done.status, done.replayed, done.matched)
    assert 1 == (await bench.get(1)).replays


@conforms
async def a_job_that_matches_nothing_ends(bench: Bench) -> None:
    """Its first step is its last."""
    await bench.store.start_replay(job())

    assert ("done", 0) == _progress(await step(bench))


@conforms
async def a_cancelled_job_stops(bench: Bench) -> None:
    """What it brought back stays, the rest stays dead, and a job that ended stays as it is."""
    await bury(bench, 4)
    await bench.store.start_replay(job())
    await step(bench, 1)
    bench.clock.advance(5)

    ended = await bench.store.cancel_replay("acme", JOB)

    assert ended is not None
    assert ("cancelled", 1, NOON + 5) == (ended.status, ended.replayed, ended.finished_at)
    bench.clock.advance(5)
    assert ended == await step(bench)
    assert ended == await bench.store.cancel_replay("acme", JOB)
    assert ended == await bench.store.get_replay("acme", JOB)
    assert {Status.PENDING: 1, Status.EXHAUSTED: 3} == await bench.counts()


@conforms
async def jobs_are_those_of_a_tenant(bench: Bench) -> None:
    """Another tenant's job is not there, and an unknown one is None."""
    await bench.dead(1)
    await bench.dead(2, tenant="beta")
    made = await bench.store.start_replay(job())

    for tenant, replay_id in (("beta", JOB), ("acme", "nope"), ("acme", "")):
        assert await bench.store.get_replay(tenant, replay_id) is None
        assert await bench.store.cancel_replay(tenant, replay_id) is None
    assert await bench.store.replay_step("nope", 10) is None
    assert [] == await bench.store.list_replays(running=False, tenant="beta")
    assert [made] == await bench.store.list_replays(running=True, tenant="acme")
    assert 1 == (await step(bench)).replayed
    assert Status.EXHAUSTED is (await bench.get(2, "beta")).status


@conforms
async def the_latest_jobs_come_first(bench: Bench) -> None:
    """All that were made, newest first, a hundred at most."""
    ids = [f"0195d000-0000-7000-9000-{number:012x}" for number in range(120)]
    for replay_id in ids:
        await bench.store.start_replay(job(replay_id))
        bench.clock.advance(1)
    await bench.store.cancel_replay("acme", ids[-1])

    assert ids[:19:-1] == [found.id for found in await bench.store.list_replays(running=False)]


@conforms
async def of_the_jobs_that_run_those_that_are_due_come_first(bench: Bench) -> None:
    """A hundred jobs that rest keep none waiting, whosever they are and however old."""
    await bury(bench, 1)
    ids = [f"0195d000-0000-7000-9000-{number:012x}" for number in range(103)]
    for replay_id in ids:
        await bench.store.start_replay(job(replay_id, rate=0.001))
        bench.clock.advance(1)
    other = await bench.store.start_replay(job("other", tenant="beta"))
    await bench.store.cancel_replay("acme", ids[2])

    async def running(tenant: str | None = None) -> list[str]:
        return [found.id for found in await bench.store.list_replays(running=True, tenant=tenant)]

    assert [*ids[:2], *ids[3:101]] == await running()
    assert ["other"] == await running("beta")
    for replay_id in ids[:4]:
        await bench.store.retry_now("acme", task_id(0))
        [held] = (await bench.claim()).tasks
        await bench.store.finish([stop(held)])
        await step(bench, 1, replay_id)
    await bench.reopen()

    assert [*ids[4:], other.id] == (await running())[:100]
