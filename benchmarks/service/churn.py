"""Size of PostgreSQL's hot tables while many tasks pass through them.

Tasks are added, claimed and finished in batches, by a process that calls the store directly. Every
fifth task is retried once, so that its row is updated more often, and finished tasks are deleted at
once. A backlog that is due tomorrow stays in the tables. Row versions that are not needed any more
must be removed as fast as new ones are written: then the tables grow in the beginning only.

In the last tenth, another client keeps a transaction open, as a forgotten session or a long report
would do. PostgreSQL removes no row versions meanwhile, so the tables grow, but claims must not
become slower.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from uuid_utils import uuid7

from benchmarks.service.backlog import DAY_MS, Progress
from benchmarks.service.limits import LimitCheck
from benchmarks.service.servers import postgres_server
from tarry.errors import StoreUnavailable
from tarry.service.encryption import Codec
from tarry.service.model import AttemptRecord, Status, Task, TaskContent
from tarry.service.store import ClaimResult, LeaseTerms, NewTask, Retention, TaskResult
from tarry.service.stores.postgres import PostgresTaskStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

TASKS = 10_000_000
BACKLOG = 10_000
WINDOWS = 10
"""The figures are reported for each tenth of the tasks."""
BATCH_SIZE = 1_000
TENANTS, LANES = 5, 100
HOT_TABLES = ("live", "task_key", "finished", "lane", "tenant", "policy_use", "series")
MAX_GROWTH, MAX_CLAIM_RATIO = 1.2, 1.5
_MAX_TRIES = 5
_TERMS = LeaseTerms("benchmark", 60_000, 1_000)
_NOTHING_KEPT = Retention(0, 0)
_SIZE = "SELECT pg_total_relation_size(('tarry.' || $1::text)::regclass)"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChurnWindow:
    """The figures of one tenth of the tasks."""

    done: int
    """Tasks that were finished so far."""
    per_second: float
    claim_ms: float
    """Median time of a claim of `BATCH_SIZE` tasks."""
    mib_by_table: dict[str, float]
    """Size of each hot table with its indexes."""
    is_transaction_open: bool


def run(tasks: int, progress: Progress) -> list[ChurnWindow]:
    """Pass tasks through a new database."""
    with postgres_server() as server:
        server.reset()
        return asyncio.run(_measure(server.url, tasks, progress))


async def _measure(url: str, tasks: int, progress: Progress) -> list[ChurnWindow]:
    import asyncpg

    store = PostgresTaskStore(url)
    await store.open()
    other_client = await asyncpg.connect(url)
    windows: list[ChurnWindow] = []
    try:
        tomorrow = int(time.time() * 1000) + DAY_MS
        for first in range(0, BACKLOG, BATCH_SIZE):
            await store.add(_build_batch(first, tomorrow))
        for number in range(1, WINDOWS + 1):
            progress(f"churn: {(number - 1) * tasks // WINDOWS:,} of {tasks:,} tasks")
            is_last = number == WINDOWS
            if is_last:
                await other_client.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                await other_client.execute("SELECT count(*) FROM tarry.live")
            started = time.perf_counter()
            starts = range(0, tasks // WINDOWS, BATCH_SIZE)
            claims = [await _pass_batch(store, first) for first in starts]
            elapsed = time.perf_counter() - started
            sizes = {
                table: await store.database.fetch_value(_SIZE, table) / 2**20
                for table in HOT_TABLES
            }
            done = number * tasks // WINDOWS
            windows.append(
                ChurnWindow(done, tasks / WINDOWS / elapsed, median(claims), sizes, is_last)
            )
    finally:
        await other_client.close()
        await store.close()
    return windows


async def _pass_batch(store: PostgresTaskStore, first: int) -> float:
    """Add, claim, finish and delete tasks; return the milliseconds of the first claim."""
    new_tasks = _build_batch(first, 0)
    await _retry(lambda: store.add(new_tasks))

    def claim() -> Awaitable[ClaimResult]:
        return store.claim(_TERMS, limit=BATCH_SIZE, per_lane=BATCH_SIZE)

    started = time.perf_counter()
    claimed = await _retry(claim)
    claim_ms = 1000 * (time.perf_counter() - started)
    while claimed.tasks:
        results = [
            _build_result(task, is_retried=task.attempts == 0 and number % 5 == 0)
            for number, task in enumerate(claimed.tasks)
        ]
        await _retry(partial(store.finish, results))
        claimed = await _retry(claim)
    while (await _retry(lambda: store.sweep(_NOTHING_KEPT, BATCH_SIZE))).has_more:
        pass
    return claim_ms


async def _retry(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call that times out because the machine is suspended or very busy."""
    for _ in range(_MAX_TRIES - 1):
        with suppress(StoreUnavailable):
            return await call()
    return await call()


_CONTENT = Codec().pack(TaskContent(url="https://example.com/", headers={}, body=b"", body_size=0))


def _build_batch(first: int, due_ms: int) -> list[NewTask]:
    return [NewTask(_build_task(first + number, due_ms)) for number in range(BATCH_SIZE)]


def _build_task(number: int, due_ms: int) -> Task:
    task_id, tenant = str(uuid7()), f"tenant-{number % TENANTS}"
    return Task(
        id=task_id,
        tenant=tenant,
        lane=f"{tenant}/https://host-{number % LANES}.example",
        key=task_id,
        fingerprint=b"",
        packed_content=_CONTENT,
        next_attempt_at=due_ms,
    )


def _build_result(task: Task, *, is_retried: bool) -> TaskResult:
    outcome = "http_5xx" if is_retried else "success"
    attempt = AttemptRecord(
        number=task.attempts + 1,
        scheduled_at=task.next_attempt_at,
        started_at=task.next_attempt_at,
        outcome=outcome,
        worker=task.worker,
    )
    return TaskResult(
        task=task,
        attempt=attempt,
        status=Status.PENDING if is_retried else Status.SUCCEEDED,
        next_attempt_at=task.next_attempt_at,
        last_outcome_kind=outcome,
    )


def table_lines(windows: list[ChurnWindow]) -> Iterator[str]:
    """Yield the lines of the table."""
    titles = ("tasks/s", "claim ms", *HOT_TABLES)
    yield f"\n{'churn, tasks':>14}" + "".join(f"{title:>11}" for title in titles) + "  (MiB)"
    for window in windows:
        cells = (
            f"{window.per_second:,.0f}", f"{window.claim_ms:.1f}",
            *(f"{size:.1f}" for size in window.mib_by_table.values()),
        )  # fmt: skip
        note = "  with an open transaction" if window.is_transaction_open else ""
        yield f"{window.done:>14,}" + "".join(f"{cell:>11}" for cell in cells) + note


def check_limits(windows: list[ChurnWindow]) -> list[LimitCheck]:
    """Compare the second half of the tasks with the first, and the open transaction with both."""
    usual = [window for window in windows if not window.is_transaction_open]
    middle = len(usual) // 2
    first, second = (
        max(sum(window.mib_by_table.values()) for window in part)
        for part in (usual[:middle], usual[middle:])
    )
    claim_ratio = windows[-1].claim_ms / median(window.claim_ms for window in usual)
    return [
        LimitCheck("x size of hot tables", second / first, maximum=MAX_GROWTH),
        LimitCheck("x claim ms, open transaction", claim_ratio, maximum=MAX_CLAIM_RATIO),
    ]
