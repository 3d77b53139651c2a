"""The harness of store tests: an open store, its clock, and builders of tasks and results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tarry.service.model import AttemptRecord, LaneRecord, ReplayRecord, Status, Task
from tarry.service.store import (
    AddResult,
    ClaimResult,
    LeaseTerms,
    NewTask,
    Store,
    StoredTaskFilter,
    TaskResult,
)
from tarry.service.task_search import build_column_filter, search_of_replay

START_MS = 1_800_000_000_000
"""Time at which every test starts; the first millisecond of a minute."""
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1000, 60_000, 3_600_000, 86_400_000
HORIZON_MS = 1000
LEASE = LeaseTerms("worker", 30 * SECOND_MS, HORIZON_MS)
OTHER_LEASE = LeaseTerms("other", 30 * SECOND_MS, HORIZON_MS)
LANE = "acme/https:a.example:443"


class ManualClock:
    """A clock in epoch milliseconds that only the test advances."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        """Return the time."""
        return self.now

    def advance(self, ms: int) -> None:
        """Advance the clock."""
        self.now += ms


@dataclass
class StoreHarness:
    """A store, its clock, and a function that opens another store over the same data."""

    new_store: Callable[[ManualClock], Store]
    """Returns a new store over the same data."""
    clock: ManualClock = field(default_factory=ManualClock)
    opened: list[Store] = field(default_factory=list)

    @property
    def store(self) -> Store:
        """The store that was opened last."""
        return self.opened[-1]

    async def reopen(self) -> Store:
        """Open a new store without closing the old one, as after a crash."""
        store = self.new_store(self.clock)
        await store.open()
        self.opened.append(store)
        return store

    async def run(self, case: Case) -> None:
        """Run a case on an open store, and close all stores."""
        try:
            await self.reopen()
            await case(self)
        finally:
            for store in self.opened:
                await store.close()

    async def add(self, *tasks: Task, **options: Any) -> list[AddResult]:
        """Add tasks that are due at their `next_attempt_at`."""
        return await self.store.add([NewTask(task) for task in tasks], **options)

    async def claim(
        self,
        terms: LeaseTerms = LEASE,
        *,
        limit: int = 1000,
        per_lane: int = 1000,
        lane_limits: Mapping[str, int] = {},
    ) -> ClaimResult:
        """Claim tasks; the default limits allow all of them."""
        return await self.store.claim(
            terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits
        )

    async def lease_new_task(
        self, number: int = 1, terms: LeaseTerms = LEASE, **fields: Any
    ) -> Task:
        """Add, claim and return a task; no other task may be claimable."""
        await self.add(task(number, **fields))
        [leased] = (await self.claim(terms)).tasks
        return leased

    async def add_dead_letter(self, number: int, reason: str = "attempts", **fields: Any) -> Task:
        """Add and return a dead letter with one attempt."""
        leased = await self.lease_new_task(number, **fields)
        await self.store.finish([exhausted_result(leased, reason)])
        return await self.get_task(number, leased.tenant)

    async def get_task(self, number: int, tenant: str = "acme") -> Task:
        """Return a task that must exist."""
        found = await self.store.get_task(tenant, task_id(number))
        assert found is not None
        return found

    async def get_lane(self, name: str = LANE) -> LaneRecord:
        """Return a lane that must exist."""
        found = await self.store.get_lane(name)
        assert found is not None
        return found

    async def counts(self, tenant: str | None = None) -> dict[Status, int]:
        """Return the number of tasks by status, without zeros; every status must be counted."""
        counts = (await self.store.counters(tenant)).task_counts
        assert set(Status) == set(counts)
        return {status: count for status, count in counts.items() if count}


Case = Callable[[StoreHarness], Awaitable[None]]

CASES: list[Case] = []


def conformance_case(case: Case) -> Case:
    """Add a case to the conformance suite."""
    CASES.append(case)
    return case


def case_name(case: Case) -> str:
    """Return the name of a case, for test ids."""
    return getattr(case, "__name__", repr(case))


def task_id(number: int) -> str:
    """Return an id in the format of a UUIDv7; ids increase with the number."""
    return f"0195d000-0000-7000-8000-{number:012x}"


def task(number: int = 1, host: str = "a", tenant: str = "acme", **fields: Any) -> Task:
    """Return a task to add, in the lane of a host."""
    fields = {
        "lane": f"{tenant}/https:{host}.example:443",
        "key": f"key {number}",
        "fingerprint": b"fingerprint %d" % number,
        "packed_content": b"content %d" % number,
        **fields,
    }
    return Task(id=task_id(number), tenant=tenant, **fields)


def next_attempt(leased: Task, outcome: str = "transient", **fields: Any) -> AttemptRecord:
    """Return the record of the next attempt of a leased task."""
    return AttemptRecord(
        attempt_number=leased.attempts + 1,
        scheduled_at=leased.next_attempt_at,
        started_at=leased.next_attempt_at + 1,
        outcome=outcome,
        worker=leased.worker,
        **fields,
    )


def retry_result(leased: Task, retry_at: int, **fields: Any) -> TaskResult:
    """Return the result of a failed attempt that is retried at `retry_at`."""
    return TaskResult(
        task=leased,
        attempt=next_attempt(leased),
        status=Status.PENDING,
        next_attempt_at=retry_at,
        last_outcome_kind="transient",
        **fields,
    )


def success_result(leased: Task, **fields: Any) -> TaskResult:
    """Return the result of a successful attempt."""
    return TaskResult(
        task=leased,
        attempt=next_attempt(leased, "success"),
        status=Status.SUCCEEDED,
        last_outcome_kind="success",
        **fields,
    )


def exhausted_result(leased: Task, reason: str = "attempts", **fields: Any) -> TaskResult:
    """Return the result of a failed attempt that makes the task a dead letter."""
    return TaskResult(
        task=leased,
        attempt=next_attempt(leased),
        status=Status.EXHAUSTED,
        reason=reason,
        last_outcome_kind="transient",
        **fields,
    )


def task_numbers(tasks: list[Task]) -> list[int]:
    """Return the numbers of tasks, in the same order."""
    return [int(found.id[-12:], 16) for found in tasks]


async def step_replay(
    store: Store, replay_id: str, limit: int = 100, quota: int | None = None
) -> ReplayRecord | None:
    """Make a step of a replay of acme or beta, as the maintenance of the service does."""
    for tenant in ("acme", "beta"):
        replay = await store.get_replay(tenant, replay_id)
        if replay is not None:
            task_filter = build_column_filter(tenant, search_of_replay(replay))
            page = await store.list_tasks(
                tenant, task_filter, cursor=replay.cursor, limit=limit, oldest_first=True
            )
            task_ids = [found.id for found in page.items]
            return await store.replay_step(
                replay_id, replay.cursor, task_ids, page.cursor, quota=quota
            )
    return await store.replay_step(replay_id, None, [], None)


async def purge(store: Store, tenant: str, task_filter: StoredTaskFilter, limit: int) -> int:
    """Delete up to `limit` tasks that match a filter, oldest first, if they are dead letters."""
    page = await store.list_tasks(tenant, task_filter, limit=limit, oldest_first=True)
    return await store.delete_dead_letters(tenant, [found.id for found in page.items])
