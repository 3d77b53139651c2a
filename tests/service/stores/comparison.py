"""Comparison of stores: the same calls on the same clock must have the same results.

Every engine in `ENGINES` takes part. Details that the port leaves open are not compared: versions,
the order of tasks due at the same time, `next_at` (it only must not be too late), and empty
lanes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from tarry.service.model import AttemptRecord, LaneRecord, ReplayRecord, Status, Task
from tarry.service.store import ClaimResult, LeaseTerms, Store, TaskFilter
from tarry.service.stores.sqlite import SqliteStore
from tests.service.stores.harness import ManualClock
from tests.service.stores.model_store import ModelState, ModelStore

T = TypeVar("T")
OpenStore = Callable[[ManualClock], Store]

TENANTS = ("acme", "beta")
LANE_COUNTED_STATUSES = (Status.PENDING, Status.IN_FLIGHT, Status.EXHAUSTED)


def model_stores(folder: Path) -> OpenStore:
    """Return a function that opens model stores with one state."""
    state = ModelState()
    return lambda clock: ModelStore(clock, state)


def sqlite_stores(folder: Path) -> OpenStore:
    """Return a function that opens SQLite stores on one file."""
    return lambda clock: SqliteStore(folder / "tasks.db", clock=clock)


ENGINES: dict[str, Callable[[Path], OpenStore]] = {
    "model": model_stores,
    "sqlite": sqlite_stores,
}
"""For each engine, a function that takes an empty folder and returns a function to open stores."""


class StoreSnapshot(NamedTuple):
    """Everything that the port returns about the contents of a store."""

    tasks: dict[str, list[Task]]
    attempts: dict[str, list[AttemptRecord]]
    lanes: list[LaneRecord]
    counts: dict[str | None, Any]
    replays: list[ReplayRecord]
    policies: list[Any]
    keys: list[Any]
    orphaned_bodies: list[str]


class StoreComparison:
    """One store of each engine, on one clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._folder = TemporaryDirectory()
        self._runner = asyncio.Runner()
        self._open_functions = [
            open_function(self._create_folder(name)) for name, open_function in ENGINES.items()
        ]
        self._opened: list[Store] = []
        self.stores: list[Store] = []
        self.crash()

    def crash(self) -> None:
        """Open new stores over the same data, without closing the old ones."""
        self.stores = [open_function(self.clock) for open_function in self._open_functions]
        self._opened += self.stores
        for store in self.stores:
            self._run(store.open())

    def close(self) -> None:
        """Close all stores."""
        for store in self._opened:
            self._run(store.close())
        self._runner.close()
        self._folder.cleanup()

    def call_each(self, call: Callable[[int, Store], Awaitable[T]]) -> list[T]:
        """Make a call on every store; return the results in the order of `ENGINES`."""
        return [self._run(call(index, store)) for index, store in enumerate(self.stores)]

    def call_and_compare(self, call: Callable[[Store], Awaitable[T]]) -> T:
        """Make a call on every store, and check that the results are equal."""
        first, *others = self.call_each(lambda _, store: call(store))
        for name, other in zip(list(ENGINES)[1:], others, strict=True):
            assert first == other, f"model and {name} disagree"
        return first

    def snapshot(self) -> StoreSnapshot:
        """Return the contents of the stores, and check that they are equal."""
        return self.call_and_compare(snapshot)

    def _create_folder(self, name: str) -> Path:
        folder = Path(self._folder.name, name)
        folder.mkdir()
        return folder

    def _run(self, awaitable: Awaitable[T]) -> T:
        async def main() -> T:
            return await awaitable

        return self._runner.run(main())


def without_engine_details(task: Task) -> Task:
    """Return a task without the details that differ between engines."""
    if task.status.is_finished:
        task = replace(task, wake_at=0, cancelling=False)
    return replace(task, version=0)


async def snapshot(store: Store) -> StoreSnapshot:
    """Read everything in a store, in small pages, and check that its counts are exact."""
    tasks = {tenant: await list_all_tasks(store, tenant) for tenant in TENANTS}
    found = [task for tenant in TENANTS for task in tasks[tenant]]
    logs = await asyncio.gather(*(store.list_attempts(task.tenant, task.id) for task in found))
    attempts = {task.id: log for task, log in zip(found, logs, strict=True)}
    counts = {}
    for tenant in (None, *TENANTS):
        counters = await store.counters(tenant)
        exact = Counter(task.status for task in found if tenant in {None, task.tenant})
        assert {status: exact[status] for status in Status} == counters.task_counts
        counts[tenant] = counters
    lanes = [lane for lane in await list_all_lanes(store) if is_used(lane)]
    for lane in lanes:
        exact = Counter(task.status for task in found if task.lane == lane.name)
        counted = (lane.pending, lane.in_flight, lane.exhausted)
        assert tuple(exact[status] for status in LANE_COUNTED_STATUSES) == counted
    return StoreSnapshot(
        {tenant: [without_engine_details(task) for task in tasks[tenant]] for tenant in TENANTS},
        attempts,
        lanes,
        counts,
        [replace(replay, cursor=None) for replay in await store.list_replays(running=False)],
        [await store.list_policies(tenant) for tenant in TENANTS],
        sorted(await store.list_api_keys(), key=lambda key: key.id),
        sorted(await store.list_orphaned_bodies(1000)),
    )


async def list_all_tasks(store: Store, tenant: str) -> list[Task]:
    """Return all tasks of a tenant, page by page."""
    page = await store.list_tasks(tenant, TaskFilter(), limit=7)
    found = page.items
    while page.cursor is not None:
        page = await store.list_tasks(tenant, TaskFilter(), cursor=page.cursor, limit=7)
        found += page.items
    return found


async def list_all_lanes(store: Store) -> list[LaneRecord]:
    """Return all lanes, page by page."""
    page = await store.list_lanes(None, limit=3)
    found = page.items
    while page.cursor is not None:
        page = await store.list_lanes(None, cursor=page.cursor, limit=3)
        found += page.items
    return found


def is_used(lane: LaneRecord) -> bool:
    """Return whether a lane must be listed: it is not empty, or not open."""
    is_shut = lane.paused or lane.parked_until is not None
    return is_shut or lane.pending + lane.in_flight + lane.exhausted > 0


def check_claim(
    claimed: ClaimResult,
    before: StoreSnapshot,
    after: StoreSnapshot,
    terms: LeaseTerms,
    skipped_lanes: Collection[str],
) -> None:
    """Check the order, lanes, times and `next_at` of a claim."""
    times = [task.next_attempt_at for task in claimed.tasks]
    assert sorted(times) == times
    lanes = {lane.name: lane for lane in before.lanes}
    for task in claimed.tasks:
        lane = lanes[task.lane]
        assert task.lane not in skipped_lanes
        assert not lane.paused
        assert (lane.parked_until or 0) <= claimed.now
        assert task.next_attempt_at <= claimed.now + terms.horizon_ms
        assert task.wake_at == max(claimed.now, task.next_attempt_at) + terms.length_ms
    exact = earliest_claim(after, terms, claimed.now, skipped_lanes)
    if exact is not None:
        assert claimed.next_at is not None
        assert claimed.next_at <= max(exact, claimed.now)
    if not claimed.tasks and claimed.next_at is not None:
        assert claimed.next_at > claimed.now


def earliest_claim(
    contents: StoreSnapshot, terms: LeaseTerms, now: int, skipped_lanes: Collection[str]
) -> int | None:
    """Return when the next claim may find a task, computed from all tasks."""
    times = []
    for lane in contents.lanes:
        if lane.paused or lane.name in skipped_lanes:
            continue
        live = [task for task in contents.tasks[lane.tenant] if task.lane == lane.name]
        ends = [task.wake_at for task in live if task.status is Status.IN_FLIGHT]
        due = [task.wake_at - terms.horizon_ms for task in live if task.status is Status.PENDING]
        until = lane.parked_until
        if until is not None and until <= now and sum(end > now for end in ends) >= lane.probes:
            due, ends = [], [min((end for end in ends if end > now), default=now)]
        times += [max(at, until or 0) for at in due + ends]
    return min(times, default=None)
