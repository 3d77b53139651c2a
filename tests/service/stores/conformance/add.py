"""Conformance: adding tasks."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import Status
from tarry.service.store import AddStatus, FinishStatus, NewTask, Retention, StoredTaskFilter
from tests.service.stores.harness import (
    HORIZON_MS,
    LANE,
    LEASE,
    OTHER_LEASE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    purge,
    task,
    task_id,
    task_numbers,
)


@conformance_case
async def an_added_task_is_stored_unchanged(harness: StoreHarness) -> None:
    """A stored task has the fields of the caller, and times from the store's clock."""
    new_task = task(
        key="kä ' \" % \\ " + "k" * 200,
        fingerprint=bytes(range(256)),
        packed_content=bytes(range(256)) * 64,
        owned_body_ref="bodies/1",
        policy_id="webhook",
        policy_version=3,
        next_attempt_at=START_MS + 5000,
    )

    [added] = await harness.add(new_task)

    expected = replace(
        new_task,
        created_at=START_MS,
        first_due_at=START_MS + 5000,
        wake_at=START_MS + 5000,
        version=added.task.version,
    )
    assert (AddStatus.ADDED, expected, False) == (added.status, added.task, added.leased)
    assert expected == await harness.get_task(1)
    await harness.reopen()
    assert expected == await harness.get_task(1)


@conformance_case
async def a_delay_counts_from_the_time_of_adding(harness: StoreHarness) -> None:
    """`delay_ms` is added to the store's time, and has precedence over `next_attempt_at`."""
    new_task = task(next_attempt_at=START_MS + 99)

    [added] = await harness.store.add([NewTask(new_task, delay_ms=2000)])

    times = (added.task.next_attempt_at, added.task.first_due_at, added.task.wake_at)
    assert (START_MS + 2000,) * 3 == times


@conformance_case
async def a_task_with_a_past_due_time_is_due_now(harness: StoreHarness) -> None:
    """A task is due at once if its `next_attempt_at` is in the past or not set."""
    added = await harness.add(task(1), task(2, next_attempt_at=START_MS - 5))

    assert [START_MS, START_MS] == [result.task.next_attempt_at for result in added]
    assert [START_MS, START_MS] == [result.task.first_due_at for result in added]


@conformance_case
async def state_of_an_added_task_is_ignored(harness: StoreHarness) -> None:
    """Attempts, status and other state fields of a new task are not stored."""
    stale = task(
        status=Status.EXHAUSTED,
        reason="attempts",
        attempts=4,
        attempts_before_replay=2,
        previous_delay=1.5,
        backoff_offset=1,
        last_outcome_kind="transient",
        worker="other",
        wake_at=START_MS + 99,
        cancelling=True,
        replays=3,
        created_at=5,
        first_due_at=5,
        finished_at=5,
    )

    await harness.add(stale)

    expected = task(
        created_at=START_MS, next_attempt_at=START_MS, first_due_at=START_MS, wake_at=START_MS
    )
    stored = await harness.get_task(1)
    assert replace(expected, version=stored.version) == stored
    assert {Status.PENDING: 1} == await harness.counts()


@conformance_case
async def an_existing_key_returns_the_stored_task(harness: StoreHarness) -> None:
    """An existing key with the same fingerprint returns the current state of the stored task."""
    await harness.add(task(1, key="k", fingerprint=b"p"))
    leased = (await harness.claim()).tasks[0]

    [repeated] = await harness.add(
        task(2, key="k", fingerprint=b"p", packed_content=b"other content")
    )

    assert (AddStatus.EXISTING, leased, False) == (repeated.status, repeated.task, repeated.leased)
    assert await harness.store.get_task("acme", task_id(2)) is None
    assert {Status.IN_FLIGHT: 1} == await harness.counts()


@conformance_case
async def an_existing_key_with_another_fingerprint_is_a_conflict(harness: StoreHarness) -> None:
    """An existing key with another fingerprint returns the stored task and changes nothing."""
    [first] = await harness.add(task(1, key="k", fingerprint=b"p"))

    [repeated] = await harness.add(task(2, key="k", fingerprint=b"q"))

    assert (AddStatus.CONFLICT, first.task) == (repeated.status, repeated.task)
    assert first.task == await harness.get_task(1)
    assert {Status.PENDING: 1} == await harness.counts()


@conformance_case
async def keys_are_unique_per_tenant(harness: StoreHarness) -> None:
    """Two tenants may use the same key; keys that differ in case or spaces are different."""
    keys = ["k", "K", "k ", "k%", "k_", "k'", "kä", "ka\u0308", ""]
    added = await harness.add(
        *(task(number, key=key) for number, key in enumerate(keys)),
        task(99, tenant="beta", key="k"),
    )

    assert [AddStatus.ADDED] * 10 == [result.status for result in added]


@conformance_case
async def a_batch_equals_single_additions(harness: StoreHarness) -> None:
    """Of two tasks with the same key in a batch, the first is added; results keep the order."""
    results = await harness.add(
        task(1, key="k", fingerprint=b"p"),
        task(2, key="other"),
        task(3, key="k", fingerprint=b"p"),
        task(4, key="k", fingerprint=b"q"),
    )

    assert [
        (AddStatus.ADDED, task_id(1)),
        (AddStatus.ADDED, task_id(2)),
        (AddStatus.EXISTING, task_id(1)),
        (AddStatus.CONFLICT, task_id(1)),
    ] == [(result.status, result.task.id) for result in results]
    assert {Status.PENDING: 2} == await harness.counts()
    assert 2 == (await harness.get_lane()).pending


@conformance_case
async def adding_is_idempotent(harness: StoreHarness) -> None:
    """Adding a batch again, also after a crash, changes nothing."""
    batch = [NewTask(task(1), lease_on_add=True), NewTask(task(2), delay_ms=500)]
    first = await harness.store.add(batch, LEASE)
    harness.clock.advance(7)
    await harness.reopen()

    repeated = await harness.store.add(batch, LEASE)

    assert [AddStatus.EXISTING] * 2 == [result.status for result in repeated]
    assert [result.task for result in first] == [result.task for result in repeated]
    assert {Status.PENDING: 1, Status.IN_FLIGHT: 1} == await harness.counts()


@conformance_case
async def a_key_is_reserved_until_its_task_is_deleted(harness: StoreHarness) -> None:
    """A finished task keeps its key; once the task is deleted, the key is free."""
    await harness.add_dead_letter(1, key="k")
    [existing] = await harness.add(task(2, key="k", fingerprint=b"fingerprint 1"))
    assert (AddStatus.EXISTING, Status.EXHAUSTED) == (existing.status, existing.task.status)

    assert 1 == await purge(harness.store, "acme", StoredTaskFilter(), 10)

    [added_again] = await harness.add(task(2, key="k"))
    assert AddStatus.ADDED is added_again.status


@conformance_case
async def a_new_task_replaces_a_cancelled_task_with_its_key(harness: StoreHarness) -> None:
    """The key of a cancelled task can be used again, with any content; the old task is deleted."""
    await harness.add(task(1, key="k", fingerprint=b"p", owned_body_ref="old"))
    await harness.store.cancel("acme", task_id(1))

    results = await harness.add(
        task(2, key="new"),
        task(3, key="k", fingerprint=b"q"),
        task(4, key="k", fingerprint=b"q"),
        task(5, key="last"),
    )

    assert [AddStatus.ADDED, AddStatus.ADDED, AddStatus.EXISTING, AddStatus.ADDED] == [
        result.status for result in results
    ]
    assert task_id(3) == results[2].task.id
    assert await harness.store.get_task("acme", task_id(1)) is None
    assert [5, 3, 2] == task_numbers(
        (await harness.store.list_tasks("acme", StoredTaskFilter())).items
    )
    assert ["old"] == await harness.store.list_orphaned_bodies(10)
    assert {Status.PENDING: 3} == await harness.counts()
    assert 3 == (await harness.get_lane()).pending


@conformance_case
async def a_cancelled_task_is_kept_if_its_replacement_is_not_added(harness: StoreHarness) -> None:
    """A cancelled task stays if the new task is over quota, or is the cancelled task itself."""
    await harness.add(task(1, key="k"), task(2))
    await harness.store.cancel("acme", task_id(1))

    [over_quota] = await harness.add(task(3, key="k"), quota=1)
    [repeated] = await harness.add(task(1, key="k"))

    assert (AddStatus.OVER_QUOTA, AddStatus.EXISTING) == (over_quota.status, repeated.status)
    assert {Status.PENDING: 1, Status.CANCELLED: 1} == await harness.counts()


@conformance_case
async def a_quota_limits_unfinished_tasks_per_tenant(harness: StoreHarness) -> None:
    """Tasks of a batch that exceed the quota of their tenant are OVER_QUOTA."""
    results = await harness.add(task(1), task(2), task(3), task(4, tenant="beta"), task(5), quota=2)

    assert [
        AddStatus.ADDED,
        AddStatus.ADDED,
        AddStatus.OVER_QUOTA,
        AddStatus.ADDED,
        AddStatus.OVER_QUOTA,
    ] == [result.status for result in results]
    assert task_id(3) == results[2].task.id
    assert await harness.store.get_task("acme", task_id(3)) is None
    assert {Status.PENDING: 2} == await harness.counts("acme")


@conformance_case
async def removed_lanes_free_the_quota(harness: StoreHarness) -> None:
    """A lane that was removed by a sweep is not counted; a paused lane is."""
    await harness.add(task(1), task(2, "b"))
    await harness.store.pause("acme/https:c.example:443")
    for number in (1, 2):
        await harness.store.cancel("acme", task_id(number))
    assert AddStatus.TOO_MANY_LANES is (await harness.add(task(3, "d"), lane_quota=3))[0].status
    await harness.store.sweep(Retention(0, 0), 10)

    results = await harness.add(task(3, "d"), task(4, "e"), task(5, "f"), lane_quota=3)

    added = [AddStatus.ADDED, AddStatus.ADDED, AddStatus.TOO_MANY_LANES]
    assert added == [result.status for result in results]


@conformance_case
async def a_quota_counts_only_unfinished_tasks(harness: StoreHarness) -> None:
    """A quota counts IN_FLIGHT tasks, but no finished ones; an existing key needs no quota."""
    leased = await harness.lease_new_task(1)
    assert AddStatus.OVER_QUOTA is (await harness.add(task(2), quota=1))[0].status
    assert AddStatus.EXISTING is (await harness.add(task(1), quota=1))[0].status
    conflict = task(1, fingerprint=b"other")
    assert AddStatus.CONFLICT is (await harness.add(conflict, quota=1))[0].status

    assert [FinishStatus.APPLIED] == await harness.store.finish([exhausted_result(leased)])

    assert AddStatus.ADDED is (await harness.add(task(2), quota=1))[0].status
    assert AddStatus.OVER_QUOTA is (await harness.add(task(3), quota=0))[0].status
    assert AddStatus.ADDED is (await harness.add(task(3)))[0].status


@conformance_case
async def a_lane_quota_limits_the_lanes_of_each_tenant(harness: StoreHarness) -> None:
    """Only a task that needs a new lane is TOO_MANY_LANES; other tenants can add lanes."""
    tasks = [task(1, "a"), task(2, "b"), task(3, "c"), task(4, "a"), task(5, "c", "beta")]
    results = await harness.add(*tasks, lane_quota=2)

    assert [
        AddStatus.ADDED,
        AddStatus.ADDED,
        AddStatus.TOO_MANY_LANES,
        AddStatus.ADDED,
        AddStatus.ADDED,
    ] == [result.status for result in results]
    assert task_id(3) == results[2].task.id
    assert await harness.store.get_task("acme", task_id(3)) is None
    assert await harness.store.get_lane("acme/https:c.example:443") is None
    await harness.reopen()
    repeated = [task(3, "c"), task(1, "c"), task(6, "c", key="key 1", fingerprint=b"other")]
    statuses = [result.status for result in await harness.add(*repeated, lane_quota=2)]
    assert [AddStatus.TOO_MANY_LANES, AddStatus.EXISTING, AddStatus.CONFLICT] == statuses
    assert AddStatus.ADDED is (await harness.add(task(3, "c"), lane_quota=3))[0].status


@conformance_case
async def a_lane_quota_counts_lanes_without_tasks(harness: StoreHarness) -> None:
    """A paused lane without tasks counts, and its first task needs no quota."""
    await harness.store.pause("acme/https:a.example:443")
    results = await harness.add(task(1, "a"), task(2, "b"), lane_quota=1)
    assert [AddStatus.ADDED, AddStatus.TOO_MANY_LANES] == [result.status for result in results]


@conformance_case
async def lease_on_add_leases_to_the_adding_worker(harness: StoreHarness) -> None:
    """A task that is due within the horizon is leased to the worker that adds it."""
    [now, in_horizon] = await harness.store.add(
        [
            NewTask(task(1), lease_on_add=True),
            NewTask(task(2), delay_ms=HORIZON_MS, lease_on_add=True),
        ],
        LEASE,
    )

    for result, due in ((now, START_MS), (in_horizon, START_MS + HORIZON_MS)):
        assert (AddStatus.ADDED, True) == (result.status, result.leased)
        assert Status.IN_FLIGHT is result.task.status
        assert "worker" == result.task.worker
        assert (due, due + LEASE.length_ms) == (result.task.next_attempt_at, result.task.wake_at)
    assert now.task == await harness.get_task(1)
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    assert {Status.IN_FLIGHT: 2} == await harness.counts()
    assert [FinishStatus.APPLIED] == await harness.store.finish([exhausted_result(now.task)])


@conformance_case
async def lease_on_add_needs_a_due_time_within_the_horizon_and_lease_terms(
    harness: StoreHarness,
) -> None:
    """A task that is due later, or is added without the flag or lease terms, is PENDING."""
    later, not_leased = await harness.store.add(
        [NewTask(task(1), delay_ms=HORIZON_MS + 1, lease_on_add=True), NewTask(task(2))], LEASE
    )
    [no_lease] = await harness.store.add([NewTask(task(3), lease_on_add=True)])

    for result in (later, not_leased, no_lease):
        assert (AddStatus.ADDED, False) == (result.status, result.leased)
        assert (Status.PENDING, None) == (result.task.status, result.task.worker)
    assert [2, 3] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def lease_on_add_is_ignored_in_a_lane_that_is_not_active(harness: StoreHarness) -> None:
    """A task that is added to a paused, parked or half-open lane is PENDING."""

    async def is_leased_on_add(number: int) -> bool:
        [result] = await harness.store.add([NewTask(task(number), lease_on_add=True)], LEASE)
        assert AddStatus.ADDED is result.status
        return result.leased

    await harness.store.park(LANE, START_MS + SECOND_MS, probes=5, consecutive_opens=1)
    assert not await is_leased_on_add(1)
    harness.clock.advance(SECOND_MS)
    assert not await is_leased_on_add(2)
    await harness.store.resume(LANE)
    assert await is_leased_on_add(3)
    await harness.store.pause(LANE)
    assert not await is_leased_on_add(4)


@conformance_case
async def lease_on_add_is_ignored_for_an_existing_task(harness: StoreHarness) -> None:
    """A task whose key exists is not leased, even if the stored task is due."""
    await harness.add(task(1))

    [repeated] = await harness.store.add([NewTask(task(1), lease_on_add=True)], LEASE)

    assert (AddStatus.EXISTING, False) == (repeated.status, repeated.leased)
    assert Status.PENDING is repeated.task.status


@conformance_case
async def an_empty_batch_has_no_results(harness: StoreHarness) -> None:
    """Adding an empty batch returns an empty list."""
    assert [] == await harness.store.add([], LEASE, quota=1)
