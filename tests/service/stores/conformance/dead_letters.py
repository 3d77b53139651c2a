"""What every store must do: dead letters that are counted, replayed and purged."""

from __future__ import annotations

from typing import Any

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import AddStatus, RetryNowStatus, TaskFilter
from tests.service.stores.harness import (
    HOUR_MS,
    LANE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    dead_result,
    success_result,
    task,
    task_id,
    task_numbers,
)

JOB = "0195d000-0000-7000-9000-000000000001"


def job(replay_id: str = JOB, **fields: Any) -> ReplayRecord:
    """A job over all dead letters of acme."""
    return ReplayRecord(**{"id": replay_id, "tenant": "acme", **fields})


async def step(harness: StoreHarness, limit: int = 100, replay_id: str = JOB) -> ReplayRecord:
    """Take one step of a job that must be there."""
    found = await harness.store.replay_step(replay_id, limit)
    assert found is not None
    return found


async def waiting(harness: StoreHarness) -> list[int]:
    """The numbers of the tasks that wait."""
    page = await harness.store.list_tasks("acme", TaskFilter(status=Status.PENDING), limit=1000)
    return sorted(task_numbers(page.items))


async def bury(harness: StoreHarness, count: int) -> None:
    """Make so many dead letters."""
    for number in range(count):
        await harness.dead(number)


@conformance_case
async def a_replay_may_be_as_slow_as_can_be(harness: StoreHarness) -> None:
    """The next step is far away, but not beyond all times."""
    await bury(harness, 3)
    await harness.store.start_replay(job(rate=1e-300))

    after = await step(harness, 1)

    assert (1, "running") == (after.replayed, after.status)
    assert START_MS < after.next_at < 2**53
    assert after == await step(harness, 1)


@conformance_case
async def letters_are_counted_by_filter(harness: StoreHarness) -> None:
    """By tenant, lane, policy, reason and time, and nothing is changed."""
    await harness.dead(1, "attempts", host="a")
    await harness.dead(2, "budget", host="b", policy_id="webhook")
    await harness.dead(3, "attempts", host="b", tenant="beta")
    await harness.add(task(4, next_attempt_at=START_MS + HOUR_MS))
    harness.clock.advance(10)
    await harness.dead(5, "attempts", host="b", policy_id="webhook")
    counts = {
        3: job(),
        1: job(tenant="beta"),
        2: job(policy_id="webhook"),
        0: job(lane="acme/https:unknown:443"),
    }

    for expected, replay in counts.items():
        assert expected == await harness.store.count_dead(replay)
    assert 2 == await harness.store.count_dead(job(before=START_MS + 9))
    assert 3 == await harness.store.count_dead(job(before=START_MS + 10))
    assert 1 == await harness.store.count_dead(job(policy_id="webhook", reason="attempts"))
    assert 1 == await harness.store.count_dead(job(lane=LANE))
    assert {Status.EXHAUSTED: 4, Status.PENDING: 1} == await harness.counts()


@conformance_case
async def a_job_is_kept_with_its_count(harness: StoreHarness) -> None:
    """The store says when it was made, what it matches, and that it is due at once."""
    await bury(harness, 3)
    harness.clock.advance(5)

    made = await harness.store.start_replay(job(reason="attempts", rate=2.0))

    assert (START_MS + 5, START_MS + 5, START_MS + 5) == (
        made.created_at,
        made.before,
        made.next_at,
    )
    assert (3, 0, "running", None) == (made.matched, made.replayed, made.status, made.finished_at)
    assert ("attempts", 2.0) == (made.reason, made.rate)
    await harness.reopen()
    assert made == await harness.store.get_replay("acme", JOB)
    assert {Status.EXHAUSTED: 3} == await harness.counts()


@conformance_case
async def the_same_job_again_is_the_same(harness: StoreHarness) -> None:
    """After a lost answer the id finds the job as it stands."""
    await bury(harness, 3)
    await harness.store.start_replay(job())
    stands = await step(harness, 2)
    harness.clock.advance(5)

    assert stands == await harness.store.start_replay(job(reason="other"))
    assert [stands] == await harness.store.list_replays(running=True)


@conformance_case
async def a_job_brings_its_letters_back(harness: StoreHarness) -> None:
    """Step by step, oldest first; ids and keys stay, attempts are forgiven."""
    for number in range(5):
        await harness.dead(number, "budget" if number == 3 else "attempts", body_ref=f"b{number}")
    before = [await harness.get(number) for number in range(5)]
    harness.clock.advance(HOUR_MS)
    await harness.store.start_replay(job(reason="attempts"))

    assert ("running", 2) == _progress(await step(harness, 2))
    assert [0, 1] == await waiting(harness)
    await step(harness, 2)
    done = await step(harness, 2)

    assert ("done", 4, START_MS + HOUR_MS) == (done.status, done.replayed, done.finished_at)
    assert [0, 1, 2, 4] == await waiting(harness)
    for number in (0, 1, 2, 4):
        anew, old = await harness.get(number), before[number]
        assert (old.key, old.content, old.body_ref) == (anew.key, anew.content, anew.body_ref)
        assert (Status.PENDING, None, None) == (anew.status, anew.reason, anew.finished_at)
        assert (1, 1, 1) == (anew.attempts, anew.forgiven, anew.replays)
        assert (None, 0, None) == (anew.previous_delay, anew.restarted, anew.last_kind)
        assert (START_MS + HOUR_MS,) * 3 == (anew.next_attempt_at, anew.started_at, anew.wake_at)
        assert old.version + 1 == anew.version
    assert before[3] == await harness.get(3)
    lane = await harness.lane()
    assert (4, 1) == (lane.pending, lane.dead)
    assert {Status.PENDING: 4, Status.EXHAUSTED: 1} == await harness.counts()


def _progress(replay: ReplayRecord) -> tuple[str, int]:
    return replay.status, replay.replayed


@conformance_case
async def a_letter_that_dies_again_is_not_the_jobs_business(harness: StoreHarness) -> None:
    """A job ends, however often its letters die; the next one forgives again."""
    await bury(harness, 3)
    harness.clock.advance(1)
    await harness.store.start_replay(job())
    await step(harness, 2)
    harness.clock.advance(1)
    await harness.store.finish([dead_result(held) for held in (await harness.claim()).tasks])

    await step(harness, 2)
    done = await step(harness, 2)

    assert ("done", 3) == _progress(done)
    assert [2] == await waiting(harness)
    assert (2, 1, 1) == _life(await harness.get(0))
    harness.clock.advance(1)
    await harness.store.start_replay(job("0195d000-0000-7000-9000-000000000002"))
    await step(harness, 100, "0195d000-0000-7000-9000-000000000002")
    assert (2, 2, 2) == _life(await harness.get(0))


@conformance_case
async def a_letter_comes_back_once_in_a_job(harness: StoreHarness) -> None:
    """Also when it dies again in the same millisecond."""
    await bury(harness, 3)
    await harness.store.start_replay(job())
    for _ in range(2):
        await step(harness, 1)
        await harness.store.finish([dead_result(held) for held in (await harness.claim()).tasks])

    assert ("done", 3) == _progress(await step(harness, 5))

    assert [1, 1, 1] == [(await harness.get(number)).replays for number in range(3)]


@conformance_case
async def what_dies_later_is_not_the_jobs_business(harness: StoreHarness) -> None:
    """A job that names a time to come takes what is dead when it is made."""
    await harness.dead(1)
    made = await harness.store.start_replay(job(before=START_MS + HOUR_MS))
    harness.clock.advance(1)
    await harness.dead(2)

    done = await step(harness)

    assert (START_MS, 1, 1) == (made.before, made.matched, done.replayed)
    assert [1] == await waiting(harness)


def _life(found: Any) -> tuple[int, int, int]:
    return found.attempts, found.forgiven, found.replays


@conformance_case
async def a_rate_puts_the_next_step_off(harness: StoreHarness) -> None:
    """A step before its time changes nothing; n letters take n / rate seconds."""
    await bury(harness, 7)
    await harness.store.start_replay(job(rate=2.0))

    first = await step(harness, 3)
    assert (3, START_MS + 1500) == (first.replayed, first.next_at)
    harness.clock.advance(1499)
    assert first == await step(harness, 3)
    harness.clock.advance(1)
    second = await step(harness, 3)
    assert (6, START_MS + 3000) == (second.replayed, second.next_at)
    harness.clock.advance(10 * SECOND_MS)
    assert ("done", 7) == _progress(await step(harness, 3))


@conformance_case
async def a_step_that_comes_late_catches_up(harness: StoreHarness) -> None:
    """The next is due as if it had come in time, but a job that rested for long makes no rush."""
    await bury(harness, 9)
    await harness.store.start_replay(job(rate=2.0))

    harness.clock.advance(300)
    assert START_MS + 500 == (await step(harness, 1)).next_at
    harness.clock.advance(HOUR_MS)
    late = await step(harness, 1)

    assert (2, START_MS + HOUR_MS + 300 - 1000 + 500) == (late.replayed, late.next_at)


@conformance_case
async def without_a_rate_the_next_step_is_due_at_once(harness: StoreHarness) -> None:
    """A rate of 0 is no limit."""
    await bury(harness, 3)
    await harness.store.start_replay(job())

    assert START_MS == (await step(harness, 1)).next_at
    assert 2 == (await step(harness, 1)).replayed


@conformance_case
async def a_job_goes_on_after_a_crash(harness: StoreHarness) -> None:
    """Each letter comes back once, whatever happens between the steps."""
    await bury(harness, 5)
    stands = await harness.store.start_replay(job())
    for _ in range(6):
        stands = await step(harness, 1)
        await harness.reopen()
        assert stands == await harness.store.get_replay("acme", JOB)

    assert ("done", 5) == _progress(stands)
    assert [1] * 5 == [(await harness.get(number)).replays for number in range(5)]


@conformance_case
async def letters_that_are_gone_are_passed_over(harness: StoreHarness) -> None:
    """What was retried or purged since the job was made is not brought back again."""
    await bury(harness, 4)
    await harness.store.start_replay(job())
    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1))
    assert 1 == await harness.store.purge("acme", TaskFilter(), 1)

    done = await step(harness)

    assert ("done", 2, 4) == (done.status, done.replayed, done.matched)
    assert 1 == (await harness.get(1)).replays


@conformance_case
async def a_job_that_matches_nothing_ends(harness: StoreHarness) -> None:
    """Its first step is its last."""
    await harness.store.start_replay(job())

    assert ("done", 0) == _progress(await step(harness))


@conformance_case
async def a_cancelled_job_stops(harness: StoreHarness) -> None:
    """What it brought back stays, the rest stays dead, and a job that ended stays as it is."""
    await bury(harness, 4)
    await harness.store.start_replay(job())
    await step(harness, 1)
    harness.clock.advance(5)

    ended = await harness.store.cancel_replay("acme", JOB)

    assert ended is not None
    assert ("cancelled", 1, START_MS + 5) == (ended.status, ended.replayed, ended.finished_at)
    harness.clock.advance(5)
    assert ended == await step(harness)
    assert ended == await harness.store.cancel_replay("acme", JOB)
    assert ended == await harness.store.get_replay("acme", JOB)
    assert {Status.PENDING: 1, Status.EXHAUSTED: 3} == await harness.counts()


@conformance_case
async def jobs_are_those_of_a_tenant(harness: StoreHarness) -> None:
    """Another tenant's job is not there, and an unknown one is None."""
    await harness.dead(1)
    await harness.dead(2, tenant="beta")
    made = await harness.store.start_replay(job())

    for tenant, replay_id in (("beta", JOB), ("acme", "nope"), ("acme", "")):
        assert await harness.store.get_replay(tenant, replay_id) is None
        assert await harness.store.cancel_replay(tenant, replay_id) is None
    assert await harness.store.replay_step("nope", 10) is None
    assert [] == await harness.store.list_replays(running=False, tenant="beta")
    assert [made] == await harness.store.list_replays(running=True, tenant="acme")
    assert 1 == (await step(harness)).replayed
    assert Status.EXHAUSTED is (await harness.get(2, "beta")).status


@conformance_case
async def the_latest_jobs_come_first(harness: StoreHarness) -> None:
    """All that were made, newest first, a hundred at most."""
    ids = [f"0195d000-0000-7000-9000-{number:012x}" for number in range(120)]
    for replay_id in ids:
        await harness.store.start_replay(job(replay_id))
        harness.clock.advance(1)
    await harness.store.cancel_replay("acme", ids[-1])

    assert ids[:19:-1] == [found.id for found in await harness.store.list_replays(running=False)]


@conformance_case
async def of_the_jobs_that_run_those_that_are_due_come_first(harness: StoreHarness) -> None:
    """A hundred jobs that rest keep none waiting, whosever they are and however old."""
    await bury(harness, 1)
    ids = [f"0195d000-0000-7000-9000-{number:012x}" for number in range(103)]
    for replay_id in ids:
        await harness.store.start_replay(job(replay_id, rate=0.001))
        harness.clock.advance(1)
    other = await harness.store.start_replay(job("other", tenant="beta"))
    await harness.store.cancel_replay("acme", ids[2])

    async def running(tenant: str | None = None) -> list[str]:
        return [found.id for found in await harness.store.list_replays(running=True, tenant=tenant)]

    assert [*ids[:2], *ids[3:101]] == await running()
    assert ["other"] == await running("beta")
    for replay_id in ids[:4]:
        await harness.store.retry_now("acme", task_id(0))
        [held] = (await harness.claim()).tasks
        await harness.store.finish([dead_result(held)])
        await step(harness, 1, replay_id)
    await harness.reopen()

    assert [*ids[4:], other.id] == (await running())[:100]


JOB = "0195d000-0000-7000-9000-000000000001"


@conformance_case
async def a_purge_removes_dead_letters(harness: StoreHarness) -> None:
    """Up to a limit, oldest first, with their logs, bodies and keys; nothing else goes."""
    for number in range(4):
        await harness.dead(number, body_ref=f"b{number}")
    await harness.add(task(10, next_attempt_at=START_MS + HOUR_MS, body_ref="b10"))
    held = await harness.leased(11)
    await harness.store.finish([success_result(held)])

    assert 3 == await harness.store.purge("acme", TaskFilter(), 3)

    assert [11, 10, 3] == task_numbers((await harness.store.list_tasks("acme", TaskFilter())).items)
    assert [] == await harness.store.list_attempts("acme", task_id(0))
    assert ["b0", "b1", "b2"] == sorted(await harness.store.orphans(10))
    assert {Status.PENDING: 1, Status.SUCCEEDED: 1, Status.EXHAUSTED: 1} == await harness.counts()
    assert 1 == (await harness.lane()).dead
    assert AddStatus.ADDED is (await harness.add(task(0)))[0].status
    assert 1 == await harness.store.purge("acme", TaskFilter(), 3)
    assert 0 == await harness.store.purge("acme", TaskFilter(), 3)


@conformance_case
async def a_purge_has_filters(harness: StoreHarness) -> None:
    """Lane, policy and reason choose; a query for another status removes nothing."""
    await harness.dead(1, "budget")
    await harness.dead(2, "attempts", policy_id="webhook")
    await harness.dead(3, "attempts", host="b")
    await harness.add(task(4))
    purge = harness.store.purge

    assert 0 == await purge("acme", TaskFilter(status=Status.PENDING), 10)
    assert 0 == await purge("acme", TaskFilter(reason="unknown"), 10)
    assert 1 == await purge("acme", TaskFilter(status=Status.EXHAUSTED, reason="budget"), 10)
    assert 1 == await purge("acme", TaskFilter(policy_id="webhook"), 10)
    assert 1 == await purge("acme", TaskFilter(lane="acme/https:b.example:443"), 10)
    assert {Status.PENDING: 1} == await harness.counts()
