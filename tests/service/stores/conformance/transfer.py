"""Conformance: export and import of all records, and the mark of a store that is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from tarry.service.model import (
    ApiKeyRecord,
    PolicyVersion,
    ReplayRecord,
    SigningSecretRecord,
    Status,
    Task,
    WorkerRecord,
)
from tarry.service.records.api_keys import put_api_key, revoke_api_key
from tarry.service.records.signing_secrets import put_signing_secret
from tarry.service.records.transfer_mark import TransferMark, get_transfer, set_transfer
from tarry.service.records.workers import is_in_use, record_worker
from tarry.service.store import (
    MAX_PAGE_BYTES,
    POLICY_RETENTION_MS,
    AddStatus,
    ConfiguredLimits,
    LaneLimits,
    NewTask,
    PolicyWriteStatus,
    RecordKind,
    Retention,
    Store,
)
from tarry.wire.tasks import DownstreamLimits
from tests.service.stores.comparison import snapshot
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    LANE,
    LEASE,
    MINUTE_MS,
    OTHER_LEASE,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    next_attempt,
    retry_result,
    step_replay,
    success_result,
    task,
    task_id,
    task_numbers,
)
from tests.service.stores.reference_store import ReferenceState, ReferenceStore

REPLAY_ID = "0195d000-0000-7000-9000-000000000001"
PAUSED_LANE, PARKED_LANE = "acme/https:paused.example:443", "acme/https:c.example:443"
REPLAYED_LANE = "acme/https:d.example:443"
MARK = TransferMark(id="transfer", is_source=False, other_store="sqlite:old.db")


async def reference_harness(harness: StoreHarness) -> StoreHarness:
    """Return a harness of an empty reference store with the clock of another harness."""
    state = ReferenceState()
    other = StoreHarness(lambda clock: ReferenceStore(clock, state), clock=harness.clock)
    await other.reopen()
    return other


async def fill(harness: StoreHarness) -> None:
    """Store records of every kind, and tasks in every status."""
    store = harness.store
    for number in (20, 21, 22):
        await harness.add_dead_letter(number, host="d")
    harness.clock.advance(10)
    replay = ReplayRecord(id=REPLAY_ID, tenant="acme", rate=1.0, matched=3)
    await store.start_replay(replay)
    await step_replay(store, REPLAY_ID, limit=1)  # 20 is PENDING now
    for tenant, policy_id, document in (
        ("acme", "p", b"1"),
        ("acme", "p", b"2"),
        ("beta", "q", b"3"),
        ("beta", "q", b"4"),
    ):
        policy = PolicyVersion(tenant=tenant, id=policy_id, version=0, document=document)
        await store.put_policy(policy, replace=True)
        harness.clock.advance(5)
    for name, role in (("a", "read"), ("b", "admin")):
        key = ApiKeyRecord(id=name, tenant="acme", digest=name.encode(), name="kéy", role=role)
        await put_api_key(store, key)
    await revoke_api_key(store, "b")
    for name in ("a", "b"):
        secret = SigningSecretRecord(tenant="acme", id=name, secret=b"\xc1secret", lane=LANE)
        await put_signing_secret(store, secret, expire_previous_ms=DAY_MS)
    await _add_tasks(harness)
    assert PolicyWriteStatus.DELETED == await store.delete_policy("beta", "q")
    await store.park(PARKED_LANE, START_MS + HOUR_MS, probes=3, consecutive_opens=2)
    await store.pause(PAUSED_LANE)
    await store.set_limits(LANE, DownstreamLimits(concurrency=7), max_limited=10)
    await store.record_lane_limits([LaneLimits(LANE, 12.5, 3)])
    await store.add_to_budgets({LANE: 4.5})


async def _add_tasks(harness: StoreHarness) -> None:
    store = harness.store
    await harness.add(
        task(2),
        task(3, policy_id="p", policy_version=1, owned_body_ref=".tarry/x/acme/3"),
        task(4),
        task(5),
        task(7),
        task(8, tenant="beta", policy_id="q", policy_version=2),
    )
    claimed = (await harness.claim(lane_limits={REPLAYED_LANE: 0})).tasks
    leased = {int(found.id[-12:], 16): found for found in claimed}
    harness.clock.advance(3)
    await store.finish(
        [
            retry_result(leased[2], START_MS + MINUTE_MS, previous_delay=1.5, backoff_offset=1),
            success_result(leased[4]),
            exhausted_result(leased[5]),
            exhausted_result(leased[8]),
        ]
    )
    await store.cancel("acme", task_id(7))  # 3 and 7 stay IN_FLIGHT
    await harness.add(
        task(1, next_attempt_at=START_MS + 2 * HOUR_MS),
        task(6, next_attempt_at=START_MS + HOUR_MS),
        task(9, host="c"),
    )
    await store.cancel("acme", task_id(6))


async def export_all(store: Store, kind: RecordKind, limit: int = 1000) -> list[Any]:
    """Return all records of a kind."""
    page = await store.export_records(kind, limit=limit)
    records = page.items
    while page.cursor is not None:
        page = await store.export_records(kind, cursor=page.cursor, limit=limit)
        assert len(page.items) <= limit
        records += page.items
    return records


async def transfer(source: Store, target: Store, limit: int = 2) -> None:
    """Import all records of a store into another."""
    for kind in RecordKind:
        records = await export_all(source, kind, limit)
        for begin in range(0, len(records), 3):
            await target.import_records(kind, records[begin : begin + 3])


async def contents(store: Store) -> Sequence[Any]:
    """Return everything that a transfer moves."""
    found = await snapshot(store)
    limits = await store.load_limits(ConfiguredLimits())
    assert limits is not None
    # Only the order within a tenant is defined.
    tasks = sorted(await export_all(store, RecordKind.TASK), key=lambda each: each.tenant)
    return (
        found._replace(
            attempts_per_minute={}, workers=[], series=[], lane_activity={}, orphaned_bodies=[]
        ),
        [replace(each, wake_at=0) for each in tasks],
        limits.by_lane,
        await store.list_lane_limits(10),
        {
            lane: round(value, 9)
            for lane, value in (await store.add_to_budgets({LANE: 0.0, PARKED_LANE: 0.0})).items()
        },
    )


@conformance_case
async def records_of_another_store_are_imported(harness: StoreHarness) -> None:
    """After an import in small batches, the store has the contents of the reference store.

    Importing all records again changes nothing.
    """
    source = await reference_harness(harness)
    await fill(source)
    expected = await contents(source.store)
    task_counts = (await source.store.counters()).task_counts
    assert all(task_counts[status] for status in Status)

    for _ in range(2):
        await transfer(source.store, harness.store)
        assert expected == await contents(harness.store)
    await harness.reopen()
    assert expected == await contents(harness.store)


@conformance_case
async def records_are_exported_to_another_store(harness: StoreHarness) -> None:
    """A reference store that imports all records has the contents of this store."""
    await fill(harness)
    target = await reference_harness(harness)

    await transfer(harness.store, target.store)

    assert await contents(harness.store) == await contents(target.store)


@conformance_case
async def records_have_all_fields_and_their_order(harness: StoreHarness) -> None:
    """Each kind has the same records in each store; tasks are in the order of adding."""
    await fill(harness)
    reference = await reference_harness(harness)
    await transfer(harness.store, reference.store)

    for kind in RecordKind:
        records = await export_all(harness.store, kind, limit=1)
        assert records
        expected = await export_all(reference.store, kind)
        assert sorted(map(repr, expected)) == sorted(map(repr, records))
    tasks = await export_all(harness.store, RecordKind.TASK)
    assert [20, 21, 22, 2, 3, 4, 5, 7, 1, 6, 9] == task_numbers(
        [found for found in tasks if found.tenant == "acme"]
    )
    versions = await export_all(harness.store, RecordKind.POLICY)
    assert [1, 2] == [policy.version for policy in versions]
    [replay] = await export_all(harness.store, RecordKind.REPLAY)
    assert (None, None) == (replay.cursor, replay.count_cursor)


@conformance_case
async def an_import_changes_no_existing_task(harness: StoreHarness) -> None:
    """A task whose id or idempotency key exists is skipped, whatever its state is."""
    source = await reference_harness(harness)
    await source.add(task(1), task(2))
    tasks = await export_all(source.store, RecordKind.TASK)
    await harness.store.import_records(RecordKind.TASK, tasks[:1])
    [leased] = (await harness.claim()).tasks
    await harness.store.finish([success_result(leased)])
    await harness.add(task(3, key="key 2"))

    await harness.store.import_records(RecordKind.TASK, tasks)

    assert {Status.SUCCEEDED: 1, Status.PENDING: 1} == await harness.counts()
    assert None is await harness.store.get_task("acme", task_id(2))
    assert [1, 3] == task_numbers(await export_all(harness.store, RecordKind.TASK))


@conformance_case
async def imported_tasks_continue(harness: StoreHarness) -> None:
    """Imported tasks are claimed when they are due, and their leases are lost when they expire."""
    source = await reference_harness(harness)
    await fill(source)
    await transfer(source.store, harness.store)
    before = await harness.claim(OTHER_LEASE)
    assert [20] == task_numbers(before.tasks)
    harness.clock.advance(2 * MINUTE_MS)

    claimed = await harness.claim(replace(OTHER_LEASE, worker="third"))

    assert {2, 3, 20} == set(task_numbers(claimed.tasks))
    assert 3 == claimed.lost_attempts  # 3, 7 and 20
    leased = {int(found.id[-12:], 16): found for found in claimed.tasks}
    assert (1, 1, "third") == (leased[3].attempts, leased[3].lost_attempts, leased[3].worker)
    assert (1, 1.5, 1) == (leased[2].attempts, leased[2].previous_delay, leased[2].backoff_offset)
    assert Status.CANCELLED is (await harness.get_task(7)).status
    lost = (await harness.store.list_attempts("acme", task_id(3)))[0]
    assert LEASE.worker == lost.worker
    await harness.store.finish([success_result(found) for found in claimed.tasks])
    assert Status.SUCCEEDED is (await harness.get_task(3)).status
    assert 2 == len(await harness.store.list_attempts("acme", task_id(2)))
    [result] = await harness.store.add([NewTask(task(30, key="key 4", fingerprint=b"other"))])
    assert AddStatus.CONFLICT is result.status
    harness.clock.advance(2 * HOUR_MS)
    assert {1, 9} == set(task_numbers((await harness.claim(OTHER_LEASE)).tasks))


@conformance_case
async def an_imported_result_of_an_old_lease_is_superseded(harness: StoreHarness) -> None:
    """A version is kept: a result for a lease from before the transfer does not apply later."""
    source = await reference_harness(harness)
    leased = await source.lease_new_task(1)
    await transfer(source.store, harness.store)
    harness.clock.advance(2 * MINUTE_MS)
    [again] = (await harness.claim(OTHER_LEASE)).tasks

    [superseded, applied] = await harness.store.finish(
        [success_result(leased), success_result(again)]
    )

    assert ("superseded", "applied") == (superseded, applied)


@conformance_case
async def an_imported_replay_continues(harness: StoreHarness) -> None:
    """An imported replay replays the remaining dead letters, none twice, and counts all tasks."""
    source = await reference_harness(harness)
    await fill(source)
    await transfer(source.store, harness.store)

    for _ in range(4):
        harness.clock.advance(MINUTE_MS)
        claimed = await harness.claim(lane_limits={LANE: 0})
        await harness.store.finish([success_result(found) for found in claimed.tasks])
        await step_replay(harness.store, REPLAY_ID)

    replay = await harness.store.get_replay("acme", REPLAY_ID)
    assert replay is not None
    assert ("done", 3, {"SUCCEEDED": 3}) == (replay.status, replay.replayed, replay.finished)
    replays = [(await harness.get_task(number)).replays for number in (20, 21, 22)]
    assert [1, 1, 1] == replays


@conformance_case
async def imported_policies_keep_their_versions(harness: StoreHarness) -> None:
    """Used versions and the numbers of deleted policies stay, and unused ones are removed."""
    source = await reference_harness(harness)
    await fill(source)
    await transfer(source.store, harness.store)
    store = harness.store

    assert PolicyWriteStatus.CONFLICT == await store.delete_policy("acme", "p")
    policy = PolicyVersion(tenant="beta", id="q", version=0, document=b"5")
    _, recreated = await store.put_policy(policy, replace=False)
    assert 3 == recreated.version
    harness.clock.advance(POLICY_RETENTION_MS + HOUR_MS)
    await store.sweep(Retention(10 * DAY_MS, 10 * DAY_MS), 100)
    assert await store.get_policy("acme", "p", 1) is not None

    [leased] = [
        found for found in (await harness.claim(OTHER_LEASE)).tasks if found.policy_id == "p"
    ]
    await store.finish([success_result(leased)])
    harness.clock.advance(1)
    while (await store.sweep(Retention(0, 10 * DAY_MS), 100)).has_more:
        pass
    await store.sweep(Retention(0, 10 * DAY_MS), 100)
    assert None is await store.get_policy("acme", "p", 1)
    assert await store.get_policy("acme", "p", 2) is not None


@conformance_case
async def a_page_of_records_is_bounded_by_its_size(harness: StoreHarness) -> None:
    """Large tasks and attempts make pages short, and no record is left out."""
    size = MAX_PAGE_BYTES // 2
    await harness.add(*(task(number, packed_content=bytes(size)) for number in range(1, 6)))
    claimed: list[Task] = (await harness.claim()).tasks
    await harness.store.finish(
        [
            replace(
                success_result(found),
                attempt=next_attempt(found, "success", response_excerpt="x" * size),
            )
            for found in claimed
        ]
    )

    for kind in (RecordKind.TASK, RecordKind.ATTEMPT):
        page = await harness.store.export_records(kind, limit=100)
        assert len(page.items) < 5
        assert 5 == len(await export_all(harness.store, kind, limit=100))


@conformance_case
async def the_mark_of_a_transfer_is_stored(harness: StoreHarness) -> None:
    """The mark survives a crash, is replaced by another one, and can be removed."""
    assert None is await get_transfer(harness.store)
    for mark in (MARK, replace(MARK, kind=RecordKind.TASK, cursor="[7]", is_complete=True)):
        await set_transfer(harness.store, mark)
        await harness.reopen()
        assert mark == await get_transfer(harness.store)
    for _ in range(2):
        await set_transfer(harness.store, None)
        assert None is await get_transfer(harness.store)


@conformance_case
async def another_process_that_uses_the_store_is_noticed(harness: StoreHarness) -> None:
    """A store is in use while another process has registered itself."""
    assert not await is_in_use(harness.store)
    first = harness.store
    await harness.reopen()
    await record_worker(first, WorkerRecord(name="host-1-a", host="host", pid=1))

    assert await is_in_use(harness.store)
