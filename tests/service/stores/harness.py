"""An empty store under test, a hand on its clock, and short ways to make what the cases need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tarry.service.model import AttemptRecord, LaneRecord, Status, Task
from tarry.service.store import AddResult, ClaimResult, Lease, NewTask, Store, TaskResult

START_MS = 1_800_000_000_000
"""When every case begins, in epoch ms: the beginning of a minute."""
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1000, 60_000, 3_600_000, 86_400_000
HORIZON_MS = 1000
LEASE = Lease("worker", 30 * SECOND_MS, HORIZON_MS)
OTHER_LEASE = Lease("other", 30 * SECOND_MS, HORIZON_MS)
LANE = "acme/https:a.example:443"


class ManualClock:
    """A clock in epoch ms that is set by hand."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        """Tell the time."""
        return self.now

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self.now += ms


@dataclass
class StoreHarness:
    """A store, its clock, and a way to open the same data again."""

    make: Callable[[ManualClock], Store]
    """Return a new store over the same durable state, each time it is called."""
    clock: ManualClock = field(default_factory=ManualClock)
    opened: list[Store] = field(default_factory=list)

    @property
    def store(self) -> Store:
        """The store that was opened last."""
        return self.opened[-1]

    async def reopen(self) -> Store:
        """Go on with a new store, as after a crash: the old one was not closed."""
        store = self.make(self.clock)
        await store.open()
        self.opened.append(store)
        return store

    async def run(self, case: Case) -> None:
        """Run a case on an open store, and close what was opened."""
        try:
            await self.reopen()
            await case(self)
        finally:
            for store in self.opened:
                await store.close()

    # --- short ways -------------------------------------------------------------------------------

    async def add(self, *tasks: Task, **options: Any) -> list[AddResult]:
        """Add tasks, each at its own time."""
        return await self.store.add([NewTask(task) for task in tasks], **options)

    async def claim(
        self, lease: Lease = LEASE, *, limit: int = 1000, per_lane: int = 1000, skip: Any = ()
    ) -> ClaimResult:
        """Claim with room for everything."""
        return await self.store.claim(lease, limit=limit, per_lane=per_lane, skip=skip)

    async def leased(self, number: int = 1, lease: Lease = LEASE, **fields: Any) -> Task:
        """Return a task that was added and claimed, and nothing else with it."""
        await self.add(task(number, **fields))
        [held] = (await self.claim(lease)).tasks
        return held

    async def dead(self, number: int, reason: str = "attempts", **fields: Any) -> Task:
        """Return a dead letter, with one attempt."""
        held = await self.leased(number, **fields)
        await self.store.finish([dead_result(held, reason)])
        return await self.get(number, held.tenant)

    async def get(self, number: int, tenant: str = "acme") -> Task:
        """Return a task that must be there."""
        found = await self.store.get_task(tenant, task_id(number))
        assert found is not None
        return found

    async def lane(self, name: str = LANE) -> LaneRecord:
        """Return a lane that must be there."""
        found = await self.store.get_lane(name)
        assert found is not None
        return found

    async def counts(self, tenant: str | None = None) -> dict[Status, int]:
        """The counts that are not 0, after a look that every status is named."""
        counts = (await self.store.counters(tenant)).tasks
        assert set(Status) == set(counts)
        return {status: count for status, count in counts.items() if count}


Case = Callable[[StoreHarness], Awaitable[None]]

CASES: list[Case] = []


def conformance_case(case: Case) -> Case:
    """Add a case to the list."""
    CASES.append(case)
    return case


def case_name(case: Case) -> str:
    """The name of a case."""
    return getattr(case, "__name__", repr(case))


def task_id(number: int) -> str:
    """An id in the form of a UUIDv7; a higher number is a later one."""
    return f"0195d000-0000-7000-8000-{number:012x}"


def task(number: int = 1, host: str = "a", tenant: str = "acme", **fields: Any) -> Task:
    """A task to add, of the lane of a host."""
    fields = {
        "lane": f"{tenant}/https:{host}.example:443",
        "key": f"key {number}",
        "fingerprint": b"print %d" % number,
        "content": b"content %d" % number,
        **fields,
    }
    return Task(id=task_id(number), tenant=tenant, **fields)


def next_attempt(held: Task, outcome: str = "transient", **fields: Any) -> AttemptRecord:
    """The next attempt of a task, as a worker logs it."""
    return AttemptRecord(
        number=held.attempts + 1,
        scheduled_at=held.next_attempt_at,
        started_at=held.next_attempt_at + 1,
        outcome=outcome,
        worker=held.worker,
        **fields,
    )


def retry_result(held: Task, until: int, **fields: Any) -> TaskResult:
    """An attempt that failed, and another at a time."""
    return TaskResult(
        task=held,
        attempt=next_attempt(held),
        status=Status.PENDING,
        next_attempt_at=until,
        last_kind="transient",
        **fields,
    )


def success_result(held: Task, **fields: Any) -> TaskResult:
    """An attempt that succeeded."""
    return TaskResult(
        task=held,
        attempt=next_attempt(held, "success"),
        status=Status.SUCCEEDED,
        last_kind="success",
        **fields,
    )


def dead_result(held: Task, reason: str = "attempts", **fields: Any) -> TaskResult:
    """An attempt that failed, and none after it."""
    return TaskResult(
        task=held,
        attempt=next_attempt(held),
        status=Status.EXHAUSTED,
        reason=reason,
        last_kind="transient",
        **fields,
    )


def task_numbers(tasks: list[Task]) -> list[int]:
    """The numbers of tasks, in their order."""
    return [int(found.id[-12:], 16) for found in tasks]
