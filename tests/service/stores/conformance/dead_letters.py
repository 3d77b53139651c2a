"""Conformance: counting, replaying and purging dead letters."""

from __future__ import annotations

from typing import Any

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import AddStatus, RetryNowStatus, StoredTaskFilter
from tarry.wire.tasks import Search
from tests.service.stores.harness import (
    HOUR_MS,
    LANE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    purge,
    retry_result,
    step_replay,
    success_result,
    task,
    task_id,
    task_numbers,
)

REPLAY_ID = "0195d000-0000-7000-9000-000000000001"


def replay_of_all(replay_id: str = REPLAY_ID, **fields: Any) -> ReplayRecord:
    """Return a replay of all dead letters of acme."""
    return ReplayRecord(**{"id": replay_id, "tenant": "acme", **fields})


def replay_of(reason: str, **fields: Any) -> ReplayRecord:
    """Return a replay of the dead letters of acme with this reason."""
    return replay_of_all(search=Search(status="EXHAUSTED", reason=reason), **fields)


async def replay_step(
    harness: StoreHarness, limit: int = 100, replay_id: str = REPLAY_ID
) -> ReplayRecord:
    """Make one step of a replay that must exist."""
    found = await step_replay(harness.store, replay_id, limit)
    assert found is not None
    return found


async def pending_numbers(harness: StoreHarness) -> list[int]:
    """Return the numbers of the tasks that are PENDING."""
    page = await harness.store.list_tasks(
        "acme", StoredTaskFilter(status=Status.PENDING), limit=1000
    )
    return sorted(task_numbers(page.items))


async def add_dead_letters(harness: StoreHarness, count: int) -> None:
    """Add `count` dead letters."""
    for number in range(count):
        await harness.add_dead_letter(number)


@conformance_case
async def a_tiny_replay_rate_does_not_overflow(harness: StoreHarness) -> None:
    """With a very small rate, the time of the next step is still a valid time."""
    await add_dead_letters(harness, 3)
    await harness.store.start_replay(replay_of_all(rate=1e-300))

    after = await replay_step(harness, 1)

    assert (1, "running") == (after.replayed, after.status)
    assert START_MS < after.next_at < 2**53
    assert after == await replay_step(harness, 1)


@conformance_case
async def dead_letters_are_counted_by_filter(harness: StoreHarness) -> None:
    """Dead letters can be counted by tenant, lane, policy, reason and time."""
    await harness.add_dead_letter(1, "attempts", host="a")
    await harness.add_dead_letter(2, "budget", host="b", policy_id="webhook")
    await harness.add_dead_letter(3, "attempts", host="b", tenant="beta")
    await harness.add(task(4, next_attempt_at=START_MS + HOUR_MS))
    harness.clock.advance(10)
    await harness.add_dead_letter(5, "attempts", host="b", policy_id="webhook")

    async def count(tenant: str = "acme", **fields: Any) -> int:
        task_filter = StoredTaskFilter(status=Status.EXHAUSTED, **fields)
        return await harness.store.count_tasks(tenant, task_filter)

    assert 3 == await count()
    assert 1 == await count("beta")
    assert 2 == await count(policy_id="webhook")
    assert 0 == await count(lane="acme/https:unknown:443")
    assert 2 == await count(finished_until=START_MS + 9)
    assert 3 == await count(finished_until=START_MS + 10)
    assert 1 == await count(policy_id="webhook", reason="attempts")
    assert 1 == await count(lane=LANE)
    assert {Status.EXHAUSTED: 4, Status.PENDING: 1} == await harness.counts()


@conformance_case
async def a_replay_is_stored(harness: StoreHarness) -> None:
    """The store sets the times of a replay; a new replay is due."""
    await add_dead_letters(harness, 3)
    harness.clock.advance(5)

    created = await harness.store.start_replay(replay_of("attempts", rate=2.0, matched=3))

    assert (START_MS + 5, START_MS + 5, START_MS + 5) == (
        created.created_at,
        created.before,
        created.next_at,
    )
    assert (3, 0, "running", None) == (
        created.matched,
        created.replayed,
        created.status,
        created.finished_at,
    )
    assert ("attempts", 2.0) == (created.search.reason, created.rate)
    await harness.reopen()
    assert created == await harness.store.get_replay("acme", REPLAY_ID)
    assert {Status.EXHAUSTED: 3} == await harness.counts()


@conformance_case
async def starting_a_replay_is_idempotent(harness: StoreHarness) -> None:
    """Starting the same id again returns the stored replay unchanged."""
    await add_dead_letters(harness, 3)
    await harness.store.start_replay(replay_of_all())
    current = await replay_step(harness, 2)
    harness.clock.advance(5)

    assert current == await harness.store.start_replay(replay_of("other"))
    assert [current] == await harness.store.list_replays(running=True)


@conformance_case
async def a_replay_makes_its_dead_letters_pending(harness: StoreHarness) -> None:
    """Each step replays the oldest dead letters, which keep their ids, keys and attempts."""
    for number in range(5):
        await harness.add_dead_letter(
            number, "budget" if number == 3 else "attempts", owned_body_ref=f"b{number}"
        )
    before = [await harness.get_task(number) for number in range(5)]
    harness.clock.advance(HOUR_MS)
    await harness.store.start_replay(replay_of("attempts"))

    assert ("running", 2) == _status_and_count(await replay_step(harness, 2))
    assert [0, 1] == await pending_numbers(harness)
    done = await replay_step(harness, 2)

    assert ("waiting", 4, None) == (done.status, done.replayed, done.finished_at)
    assert [0, 1, 2, 4] == await pending_numbers(harness)
    for number in (0, 1, 2, 4):
        replayed, dead = await harness.get_task(number), before[number]
        assert (dead.key, dead.packed_content, dead.owned_body_ref) == (
            replayed.key,
            replayed.packed_content,
            replayed.owned_body_ref,
        )
        assert (Status.PENDING, None, None) == (
            replayed.status,
            replayed.reason,
            replayed.finished_at,
        )
        assert (1, 1, 1) == (replayed.attempts, replayed.attempts_before_replay, replayed.replays)
        assert (None, 0, None) == (
            replayed.previous_delay,
            replayed.backoff_offset,
            replayed.last_outcome_kind,
        )
        assert (START_MS + HOUR_MS,) * 3 == (
            replayed.next_attempt_at,
            replayed.first_due_at,
            replayed.wake_at,
        )
        assert dead.version + 1 == replayed.version
    assert before[3] == await harness.get_task(3)
    lane = await harness.get_lane()
    assert (4, 1) == (lane.pending, lane.exhausted)
    assert {Status.PENDING: 4, Status.EXHAUSTED: 1} == await harness.counts()


def _status_and_count(replay: ReplayRecord) -> tuple[str, int]:
    return replay.status, replay.replayed


@conformance_case
async def a_replay_does_not_replay_a_task_twice(harness: StoreHarness) -> None:
    """A task that fails again is not replayed by the same replay, but by a later one."""
    await add_dead_letters(harness, 3)
    harness.clock.advance(1)
    await harness.store.start_replay(replay_of_all())
    await replay_step(harness, 2)
    harness.clock.advance(1)
    await harness.store.finish(
        [exhausted_result(leased) for leased in (await harness.claim()).tasks]
    )

    done = await replay_step(harness, 2)

    assert ("waiting", 3) == _status_and_count(done)
    assert [2] == await pending_numbers(harness)
    assert (2, 1, 1) == _attempt_counts(await harness.get_task(0))
    harness.clock.advance(1)
    await harness.store.start_replay(replay_of_all("0195d000-0000-7000-9000-000000000002"))
    await replay_step(harness, 100, "0195d000-0000-7000-9000-000000000002")
    assert (2, 2, 2) == _attempt_counts(await harness.get_task(0))


@conformance_case
async def a_task_that_fails_at_once_is_not_replayed_twice(harness: StoreHarness) -> None:
    """A task that fails in the millisecond in which it was replayed is not replayed again."""
    await add_dead_letters(harness, 3)
    await harness.store.start_replay(replay_of_all())
    for _ in range(2):
        await replay_step(harness, 1)
        await harness.store.finish(
            [exhausted_result(leased) for leased in (await harness.claim()).tasks]
        )

    assert ("waiting", 3) == _status_and_count(await replay_step(harness, 5))

    assert [1, 1, 1] == [(await harness.get_task(number)).replays for number in range(3)]


@conformance_case
async def a_replay_ignores_later_dead_letters(harness: StoreHarness) -> None:
    """A replay with a future `before` matches only dead letters that exist at its start."""
    await harness.add_dead_letter(1)
    created = await harness.store.start_replay(replay_of_all(before=START_MS + HOUR_MS))
    harness.clock.advance(1)
    await harness.add_dead_letter(2)

    done = await replay_step(harness)

    assert (START_MS, 1) == (created.before, done.replayed)
    assert [1] == await pending_numbers(harness)


def _attempt_counts(found: Any) -> tuple[int, int, int]:
    return found.attempts, found.attempts_before_replay, found.replays


@conformance_case
async def a_rate_delays_the_next_step(harness: StoreHarness) -> None:
    """After n replayed tasks, the next step is due n / rate seconds later, and not before."""
    await add_dead_letters(harness, 7)
    await harness.store.start_replay(replay_of_all(rate=2.0))

    first = await replay_step(harness, 3)
    assert (3, START_MS + 1500) == (first.replayed, first.next_at)
    harness.clock.advance(1499)
    assert first == await replay_step(harness, 3)
    harness.clock.advance(1)
    second = await replay_step(harness, 3)
    assert (6, START_MS + 3000) == (second.replayed, second.next_at)
    harness.clock.advance(10 * SECOND_MS)
    assert ("waiting", 7) == _status_and_count(await replay_step(harness, 3))


@conformance_case
async def a_late_step_catches_up(harness: StoreHarness) -> None:
    """After a late step, the next step is due earlier, by at most `MAX_REPLAY_LAG_MS`."""
    await add_dead_letters(harness, 9)
    await harness.store.start_replay(replay_of_all(rate=2.0))

    harness.clock.advance(300)
    assert START_MS + 500 == (await replay_step(harness, 1)).next_at
    harness.clock.advance(HOUR_MS)
    late = await replay_step(harness, 1)

    assert (2, START_MS + HOUR_MS + 300 - 1000 + 500) == (late.replayed, late.next_at)


@conformance_case
async def without_a_rate_the_next_step_is_due_at_once(harness: StoreHarness) -> None:
    """With a rate of 0, the next step is due at once."""
    await add_dead_letters(harness, 3)
    await harness.store.start_replay(replay_of_all())

    assert START_MS == (await replay_step(harness, 1)).next_at
    assert 2 == (await replay_step(harness, 1)).replayed


@conformance_case
async def a_waiting_replay_counts_finished_tasks_less_often(harness: StoreHarness) -> None:
    """The next count is due after a second, later after a tenth of the replay's age, up to 30 s."""
    await add_dead_letters(harness, 1)
    await harness.store.start_replay(replay_of_all())
    for age_ms, interval_ms in ((0, 1000), (100_000, 10_000), (HOUR_MS, 30_000)):
        harness.clock.now = START_MS + age_ms
        assert interval_ms == (await replay_step(harness)).next_at - START_MS - age_ms


@conformance_case
async def a_replay_waits_for_the_quota(harness: StoreHarness) -> None:
    """A step replays no more tasks than the quota allows, and continues when tasks are finished."""
    await add_dead_letters(harness, 5)
    await harness.add(task(10))
    await harness.add(task(11, tenant="beta"))
    await harness.store.start_replay(replay_of_all())

    async def step() -> ReplayRecord:
        found = await step_replay(harness.store, REPLAY_ID, 4, quota=3)
        assert found is not None
        return found

    full = await step()
    assert (("running", 2), START_MS + 1000) == (_status_and_count(full), full.next_at)
    assert [0, 1, 10] == await pending_numbers(harness)
    harness.clock.advance(1000)
    full = await step()
    assert (("running", 2), START_MS + 2000) == (_status_and_count(full), full.next_at)
    for number in (0, 1):
        await harness.store.cancel("acme", task_id(number))
    assert full == await step()  # not due yet
    harness.clock.advance(1000)
    assert ("running", 4) == _status_and_count(await step())
    for number in (2, 3):
        await harness.store.cancel("acme", task_id(number))
    harness.clock.advance(1000)
    assert ("waiting", 5) == _status_and_count(await step())
    await harness.store.cancel("acme", task_id(4))
    harness.clock.advance(1000)
    done = await step()
    assert (("done", 5), {"CANCELLED": 5}) == (_status_and_count(done), done.finished)


@conformance_case
async def retry_now_of_a_dead_letter_needs_quota(harness: StoreHarness) -> None:
    """A dead letter is not replayed above the quota; a PENDING task is made due in any case."""
    await harness.add_dead_letter(1)
    await harness.add(task(2, next_attempt_at=START_MS + HOUR_MS))
    before = await harness.get_task(1)

    assert RetryNowStatus.OVER_QUOTA is await harness.store.retry_now("acme", task_id(1), quota=1)
    assert before == await harness.get_task(1)
    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(2), quota=0)
    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1), quota=2)


@conformance_case
async def a_replay_continues_after_a_crash(harness: StoreHarness) -> None:
    """Each dead letter is replayed once, although the store crashes between steps."""
    await add_dead_letters(harness, 5)
    current = await harness.store.start_replay(replay_of_all())
    for _ in range(5):
        current = await replay_step(harness, 1)
        await harness.reopen()
        assert current == await harness.store.get_replay("acme", REPLAY_ID)

    assert ("waiting", 5) == _status_and_count(current)
    assert [1] * 5 == [(await harness.get_task(number)).replays for number in range(5)]


@conformance_case
async def a_replay_skips_retried_and_purged_dead_letters(harness: StoreHarness) -> None:
    """Dead letters that were retried or purged since the start are not replayed."""
    await add_dead_letters(harness, 4)
    await harness.store.start_replay(replay_of_all())
    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1))
    assert 1 == await purge(harness.store, "acme", StoredTaskFilter(), 1)

    done = await replay_step(harness)

    assert ("waiting", 2) == _status_and_count(done)
    assert 1 == (await harness.get_task(1)).replays


@conformance_case
async def a_step_is_made_once(harness: StoreHarness) -> None:
    """A step with an old cursor changes nothing: another process has made it."""
    await add_dead_letters(harness, 3)
    await harness.store.start_replay(replay_of_all())
    page = await harness.store.list_tasks("acme", StoredTaskFilter(), limit=2, oldest_first=True)
    task_ids = [found.id for found in page.items]

    first = await harness.store.replay_step(REPLAY_ID, None, task_ids, page.cursor)
    results = [exhausted_result(leased) for leased in (await harness.claim()).tasks]
    await harness.store.finish(results)
    repeated = await harness.store.replay_step(REPLAY_ID, None, task_ids, page.cursor)

    assert first == repeated
    assert [1, 1, 0] == [(await harness.get_task(number)).replays for number in range(3)]


@conformance_case
async def a_step_replays_only_dead_letters_of_its_tenant(harness: StoreHarness) -> None:
    """Tasks that are not dead letters, unknown ids and tasks of other tenants are skipped."""
    await add_dead_letters(harness, 1)
    await harness.add_dead_letter(1, tenant="beta")
    leased = await harness.lease_new_task(2)
    await harness.store.finish([success_result(leased)])
    await harness.store.start_replay(replay_of_all())
    task_ids = [task_id(2), task_id(1), task_id(0), task_id(99), "unknown"]

    done = await harness.store.replay_step(REPLAY_ID, None, task_ids, None)

    assert done is not None
    assert ("waiting", 1) == _status_and_count(done)
    assert {Status.PENDING: 1, Status.SUCCEEDED: 1} == await harness.counts("acme")
    assert {Status.EXHAUSTED: 1} == await harness.counts("beta")


@conformance_case
async def a_replay_without_matches_ends(harness: StoreHarness) -> None:
    """The first step of a replay without matches ends the replay."""
    await harness.store.start_replay(replay_of_all())

    assert ("done", 0) == _status_and_count(await replay_step(harness))


@conformance_case
async def a_cancelled_replay_stops(harness: StoreHarness) -> None:
    """After a cancel, a replay makes no more tasks due, and does not change."""
    await add_dead_letters(harness, 4)
    await harness.store.start_replay(replay_of_all())
    await replay_step(harness, 1)
    harness.clock.advance(5)

    cancelled = await harness.store.cancel_replay("acme", REPLAY_ID)

    assert cancelled is not None
    assert ("cancelled", 1, START_MS + 5) == (
        cancelled.status,
        cancelled.replayed,
        cancelled.finished_at,
    )
    assert cancelled == await harness.store.cancel_replay("acme", REPLAY_ID)
    assert cancelled == await harness.store.get_replay("acme", REPLAY_ID)
    harness.clock.advance(5)
    assert ("cancelled", 1) == _status_and_count(await replay_step(harness))
    assert {Status.PENDING: 1, Status.EXHAUSTED: 3} == await harness.counts()


@conformance_case
async def a_replay_is_done_when_its_tasks_have_finished(harness: StoreHarness) -> None:
    """A replay counts its tasks by final status, and is done when the last one has finished."""
    await add_dead_letters(harness, 4)
    await harness.store.start_replay(replay_of_all())
    await replay_step(harness)
    first, second, third, fourth = (await harness.claim()).tasks
    await harness.store.finish([success_result(first), exhausted_result(second)])
    await harness.store.finish([retry_result(third, START_MS + HOUR_MS)])
    await harness.store.finish([exhausted_result(fourth)])
    await purge(harness.store, "acme", StoredTaskFilter(key=fourth.key), 1)

    early = await replay_step(harness)
    harness.clock.advance(SECOND_MS)
    waiting = await replay_step(harness)
    await harness.reopen()
    [listed] = await harness.store.list_replays(running=True)
    await harness.store.cancel("acme", third.id)
    harness.clock.advance(SECOND_MS)
    done = await replay_step(harness)

    assert {} == early.finished
    assert listed == waiting
    assert ("waiting", 1, {"SUCCEEDED": 1, "EXHAUSTED": 1, "DELETED": 1}) == (
        waiting.status,
        waiting.unfinished,
        waiting.finished,
    )
    assert ("done", 0, START_MS + 2 * SECOND_MS) == (
        done.status,
        done.unfinished,
        done.finished_at,
    )
    assert {"SUCCEEDED": 1, "EXHAUSTED": 1, "DELETED": 1, "CANCELLED": 1} == done.finished
    assert [] == await harness.store.list_replays(running=True)
    assert done == await replay_step(harness)


@conformance_case
async def a_waiting_replay_can_be_cancelled(harness: StoreHarness) -> None:
    """A cancelled replay ends at once, and still counts the tasks that it has replayed."""
    await add_dead_letters(harness, 1)
    await harness.store.start_replay(replay_of_all())
    await replay_step(harness)

    cancelled = await harness.store.cancel_replay("acme", REPLAY_ID)

    assert cancelled is not None
    assert ("cancelled", 1, START_MS) == (
        cancelled.status,
        cancelled.unfinished,
        cancelled.finished_at,
    )
    [leased] = (await harness.claim()).tasks
    await harness.store.finish([success_result(leased)])
    harness.clock.advance(SECOND_MS)
    counted = await replay_step(harness)
    assert ("cancelled", {"SUCCEEDED": 1}, START_MS) == (
        counted.status,
        counted.finished,
        counted.finished_at,
    )
    assert [] == await harness.store.list_replays(running=True)


@conformance_case
async def replays_belong_to_a_tenant(harness: StoreHarness) -> None:
    """A tenant can neither read nor cancel a replay of another tenant."""
    await harness.add_dead_letter(1)
    await harness.add_dead_letter(2, tenant="beta")
    created = await harness.store.start_replay(replay_of_all())

    for tenant, replay_id in (("beta", REPLAY_ID), ("acme", "unknown"), ("acme", "")):
        assert await harness.store.get_replay(tenant, replay_id) is None
        assert await harness.store.cancel_replay(tenant, replay_id) is None
    assert await harness.store.replay_step("unknown", None, [], None) is None
    assert [] == await harness.store.list_replays(running=False, tenant="beta")
    assert [created] == await harness.store.list_replays(running=True, tenant="acme")
    assert 1 == (await replay_step(harness)).replayed
    assert Status.EXHAUSTED is (await harness.get_task(2, "beta")).status


@conformance_case
async def replays_are_listed_newest_first(harness: StoreHarness) -> None:
    """At most a hundred replays are listed, newest first."""
    ids = [f"0195d000-0000-7000-9000-{number:012x}" for number in range(120)]
    for replay_id in ids:
        await harness.store.start_replay(replay_of_all(replay_id))
        harness.clock.advance(1)
    await harness.store.cancel_replay("acme", ids[-1])

    assert ids[:19:-1] == [found.id for found in await harness.store.list_replays(running=False)]


@conformance_case
async def running_replays_are_listed_by_due_time(harness: StoreHarness) -> None:
    """Running replays are listed by due time, so that a due one is among the first hundred."""
    await add_dead_letters(harness, 1)
    ids = [f"0195d000-0000-7000-9000-{number:012x}" for number in range(103)]
    for replay_id in ids:
        await harness.store.start_replay(replay_of_all(replay_id, rate=0.001))
        harness.clock.advance(1)
    other = await harness.store.start_replay(replay_of_all("other", tenant="beta"))
    await harness.store.cancel_replay("acme", ids[2])

    async def running_ids(tenant: str | None = None) -> list[str]:
        return [found.id for found in await harness.store.list_replays(running=True, tenant=tenant)]

    assert [*ids[:2], *ids[3:101]] == await running_ids()
    assert ["other"] == await running_ids("beta")
    for replay_id in ids[:4]:
        await harness.store.retry_now("acme", task_id(0))
        [leased] = (await harness.claim()).tasks
        await harness.store.finish([exhausted_result(leased)])
        await replay_step(harness, 1, replay_id)
    await harness.reopen()

    assert [*ids[4:], other.id] == (await running_ids())[:100]


@conformance_case
async def a_purge_deletes_dead_letters(harness: StoreHarness) -> None:
    """A purge deletes the oldest dead letters up to a limit, with their logs and keys."""
    for number in range(4):
        await harness.add_dead_letter(number, owned_body_ref=f"b{number}")
    await harness.add(task(10, next_attempt_at=START_MS + HOUR_MS, owned_body_ref="b10"))
    leased = await harness.lease_new_task(11)
    await harness.store.finish([success_result(leased)])

    assert 3 == await purge(harness.store, "acme", StoredTaskFilter(), 3)

    assert [11, 10, 3] == task_numbers(
        (await harness.store.list_tasks("acme", StoredTaskFilter())).items
    )
    assert [] == await harness.store.list_attempts("acme", task_id(0))
    assert ["b0", "b1", "b2"] == sorted(await harness.store.list_orphaned_bodies(10))
    assert {Status.PENDING: 1, Status.SUCCEEDED: 1, Status.EXHAUSTED: 1} == await harness.counts()
    assert 1 == (await harness.get_lane()).exhausted
    assert AddStatus.ADDED is (await harness.add(task(0)))[0].status
    dead_letters = StoredTaskFilter(status=Status.EXHAUSTED)
    assert 1 == await purge(harness.store, "acme", dead_letters, 3)
    assert 0 == await purge(harness.store, "acme", dead_letters, 3)


@conformance_case
async def a_purge_deletes_only_dead_letters_of_its_tenant(harness: StoreHarness) -> None:
    """Tasks that are not dead letters, unknown ids and tasks of other tenants are not deleted."""
    await harness.add_dead_letter(1)
    await harness.add_dead_letter(2, tenant="beta")
    await harness.add(task(3))
    task_ids = [task_id(1), task_id(2), task_id(3), task_id(99), "unknown"]

    assert 1 == await harness.store.delete_dead_letters("acme", task_ids)
    assert 0 == await harness.store.delete_dead_letters("acme", [])

    assert {Status.PENDING: 1} == await harness.counts("acme")
    assert {Status.EXHAUSTED: 1} == await harness.counts("beta")
