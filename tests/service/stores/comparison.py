"""Comparison of stores: the same calls at the same time must have the same results.

All implementations in `STORE_FACTORIES` are compared, except for details that the port does not
define: versions, the order of tasks due at the same time, and `next_at` (only an upper bound is
checked).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from tarry.service.model import (
    AttemptRecord,
    LaneActivity,
    LaneRecord,
    PolicyVersion,
    ReplayRecord,
    Status,
    Task,
    WorkerRecord,
)
from tarry.service.records.api_keys import list_api_keys
from tarry.service.records.lane_activity import read_lane_activity
from tarry.service.records.series import SERIES_RETENTION_MS, SeriesPoint, list_series
from tarry.service.records.signing_secrets import list_signing_secrets
from tarry.service.records.workers import list_workers
from tarry.service.store import (
    ClaimResult,
    ConfiguredLimits,
    LeaseTerms,
    RecordKind,
    Store,
    StoredTaskFilter,
)
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.service.stores.harness import ManualClock
from tests.service.stores.reference_store import ReferenceState, ReferenceStore
from tests.service.stores.reference_store.state import is_skipped

T = TypeVar("T")
StoreFactory = Callable[[ManualClock], Store]

TENANTS = ("acme", "beta")
LANE_COUNTED_STATUSES = (Status.PENDING, Status.IN_FLIGHT, Status.EXHAUSTED)


def reference_store_factory(folder: Path) -> StoreFactory:
    """Return a function that creates reference stores with one state."""
    state = ReferenceState()
    return lambda clock: ReferenceStore(clock, state)


def sqlite_store_factory(folder: Path) -> StoreFactory:
    """Return a function that creates SQLite stores on one file."""
    return lambda clock: SqliteTaskStore(folder / "tasks.db", clock=clock)


STORE_FACTORIES: dict[str, Callable[[Path], StoreFactory]] = {
    "reference": reference_store_factory,
    "sqlite": sqlite_store_factory,
}
"""For each implementation, a function that returns a store factory for an empty folder."""


class StoreSnapshot(NamedTuple):
    """The complete contents of a store, as its methods return them."""

    tasks: dict[str, list[Task]]
    attempts: dict[str, list[AttemptRecord]]
    lanes: list[LaneRecord]
    counts: dict[str | None, Any]
    attempts_per_minute: dict[str | None, Any]
    replays: list[ReplayRecord]
    policies: list[Any]
    keys: list[Any]
    signing_secrets: list[Any]
    paused_lanes: frozenset[str]
    workers: list[WorkerRecord]
    series: list[list[SeriesPoint]]
    lane_activity: dict[str, LaneActivity]
    orphaned_bodies: list[str]


class StoreComparison:
    """One store of each implementation, on one clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._folder = TemporaryDirectory()
        self._runner = asyncio.Runner()
        self._folder_count = 0
        self._factories = self._create_factories()
        self._opened_stores: list[Store] = []
        self.stores: list[Store] = []
        self.crash()

    def crash(self) -> None:
        """Open new stores over the same data, without closing the old ones."""
        self.stores = [factory(self.clock) for factory in self._factories]
        self._opened_stores += self.stores
        for store in self.stores:
            self._run(store.open)

    def transfer(self) -> None:
        """Continue with new stores, each with the records of the previous implementation."""
        # All records are read first: the factories may use the same server for the new stores.
        exported = [self._run(partial(_export_records, store)) for store in self.stores]
        self._factories = self._create_factories()
        self.crash()
        sources = [*exported[-1:], *exported[:-1]]
        for records, target in zip(sources, self.stores, strict=True):
            for kind, batch in records:
                self._run(partial(target.import_records, kind, batch))

    def close(self) -> None:
        """Close all stores."""
        for store in self._opened_stores:
            self._run(store.close)
        self._runner.close()
        self._folder.cleanup()

    def call_each(self, call: Callable[[int, Store], Awaitable[T]]) -> list[T]:
        """Call every store; return the results in the order of `STORE_FACTORIES`."""
        return [self._run(partial(call, index, store)) for index, store in enumerate(self.stores)]

    def call_and_compare(self, call: Callable[[Store], Awaitable[T]]) -> T:
        """Call every store, check that the results are equal, and return the first."""
        first, *others = self.call_each(lambda _, store: call(store))
        for name, other in zip(list(STORE_FACTORIES)[1:], others, strict=True):
            assert first == other, f"the reference store and {name} have different results"
        return first

    def snapshot(self) -> StoreSnapshot:
        """Check that the contents of the stores are equal, and return them."""
        return self.call_and_compare(snapshot)

    def _create_factories(self) -> list[StoreFactory]:
        return [
            factory_for(self._create_folder(name)) for name, factory_for in STORE_FACTORIES.items()
        ]

    def _create_folder(self, name: str) -> Path:
        self._folder_count += 1
        folder = Path(self._folder.name, f"{name}-{self._folder_count}")
        folder.mkdir()
        return folder

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call a method of a store in the event loop."""

        async def main() -> T:
            return await call()

        return self._runner.run(main())


async def _export_records(store: Store) -> list[tuple[RecordKind, list[Any]]]:
    """Return all records of a store in small batches."""
    batches: list[tuple[RecordKind, list[Any]]] = []
    for kind in RecordKind:
        page = await store.export_records(kind, limit=5)
        batches.append((kind, page.items))
        while page.cursor is not None:
            page = await store.export_records(kind, cursor=page.cursor, limit=5)
            batches.append((kind, page.items))
    return batches


def comparable_task(task: Task) -> Task:
    """Return a task without the fields that may differ between implementations."""
    if task.status.is_finished:
        task = replace(task, wake_at=0, cancelling=False)
    return replace(task, version=0)


async def snapshot(store: Store) -> StoreSnapshot:
    """Read the contents of a store in small pages, and check its counters."""
    tasks = {tenant: await list_all_tasks(store, tenant) for tenant in TENANTS}
    found = [task for tenant in TENANTS for task in tasks[tenant]]
    logs = await asyncio.gather(*(store.list_attempts(task.tenant, task.id) for task in found))
    attempts = {task.id: log for task, log in zip(found, logs, strict=True)}
    counts = {}
    for tenant in (None, *TENANTS):
        counters = await store.counters(tenant)
        expected = Counter(task.status for task in found if tenant in {None, task.tenant})
        assert {status: expected[status] for status in Status} == counters.task_counts
        counts[tenant] = counters
    limits = await store.load_limits(ConfiguredLimits(version=-1))
    assert limits is not None
    lanes = await list_all_lanes(store)
    for lane in lanes:
        expected = Counter(task.status for task in found if task.lane == lane.name)
        counted = (lane.pending, lane.in_flight, lane.exhausted)
        assert tuple(expected[status] for status in LANE_COUNTED_STATUSES) == counted
    return StoreSnapshot(
        {tenant: [comparable_task(task) for task in tasks[tenant]] for tenant in TENANTS},
        attempts,
        lanes,
        counts,
        {tenant: await store.attempts_per_minute(tenant, since=0) for tenant in (None, *TENANTS)},
        [
            replace(replay, cursor=None, count_cursor=None)
            for replay in await store.list_replays(running=False)
        ],
        [await list_all_policies(store, tenant) for tenant in TENANTS],
        sorted(await list_api_keys(store), key=lambda key: key.id),
        [await list_signing_secrets(store, tenant) for tenant in TENANTS],
        limits.paused_lanes,
        await list_workers(store),
        [await list_series(store, step_ms, since=0) for step_ms in SERIES_RETENTION_MS],
        await read_lane_activity(store, [lane.name for lane in lanes]),
        sorted(await store.list_orphaned_bodies(1000)),
    )


async def list_all_tasks(store: Store, tenant: str) -> list[Task]:
    """Return all tasks of a tenant, page by page."""
    page = await store.list_tasks(tenant, StoredTaskFilter(), limit=7)
    found = page.items
    while page.cursor is not None:
        page = await store.list_tasks(tenant, StoredTaskFilter(), cursor=page.cursor, limit=7)
        found += page.items
    return found


async def list_all_policies(store: Store, tenant: str) -> list[PolicyVersion]:
    """Return the versions of all policies of a tenant."""
    newest = (await store.list_policies(tenant)).items
    versions = [
        await store.get_policy(tenant, policy.id, version)
        for policy in newest
        for version in range(1, policy.version + 1)
    ]
    return [version for version in versions if version is not None]


async def list_all_lanes(store: Store) -> list[LaneRecord]:
    """Return all lanes, page by page."""
    page = await store.list_lanes(None, limit=3)
    found = page.items
    while page.cursor is not None:
        page = await store.list_lanes(None, cursor=page.cursor, limit=3)
        found += page.items
    return found


def check_claim(
    claimed: ClaimResult,
    before: StoreSnapshot,
    after: StoreSnapshot,
    terms: LeaseTerms,
    lane_limits: Mapping[str, int],
) -> None:
    """Check the order, lanes, times and `next_at` of a claim."""
    times = [task.next_attempt_at for task in claimed.tasks]
    assert sorted(times) == times
    lanes = {lane.name: lane for lane in before.lanes}
    known = {task.id: task for tasks in before.tasks.values() for task in tasks}
    for task in claimed.tasks:
        lane = lanes[task.lane]
        assert not is_skipped(task.lane, lane_limits)
        assert not lane.paused
        assert (lane.parked_until or 0) <= claimed.now
        assert task.next_attempt_at <= claimed.now + terms.horizon_ms
        # The attempt of a pending task may be deferred until `wake_at`.
        is_pending = known[task.id].status is Status.PENDING
        startable_at = known[task.id].wake_at if is_pending else task.next_attempt_at
        assert max(claimed.now, startable_at) + terms.length_ms == task.wake_at
    for name, limit in lane_limits.items():
        assert limit >= sum(task.lane == name for task in claimed.tasks)
    latest_next_at = earliest_claim(after, terms, claimed.now, lane_limits)
    if latest_next_at is not None:
        assert claimed.next_at is not None
        assert claimed.next_at <= max(latest_next_at, claimed.now)
    if not (claimed.tasks or claimed.renewed_tasks) and claimed.next_at is not None:
        assert claimed.next_at > claimed.now


def earliest_claim(
    contents: StoreSnapshot, terms: LeaseTerms, now: int, lane_limits: Mapping[str, int]
) -> int | None:
    """Return the earliest time at which a claim finds a task, computed from all tasks."""
    times = []
    for lane in contents.lanes:
        if lane.paused or is_skipped(lane.name, lane_limits):
            continue
        tasks = [task for task in contents.tasks[lane.tenant] if task.lane == lane.name]
        lease_ends = [task.wake_at for task in tasks if task.status is Status.IN_FLIGHT]
        due = [task.wake_at - terms.horizon_ms for task in tasks if task.status is Status.PENDING]
        parked_until = lane.parked_until
        if (
            parked_until is not None
            and parked_until <= now
            and sum(end > now for end in lease_ends) >= lane.probes
        ):
            due, lease_ends = [], [min((end for end in lease_ends if end > now), default=now)]
        times += [max(at, parked_until or 0) for at in due + lease_ends]
    return min(times, default=None)
