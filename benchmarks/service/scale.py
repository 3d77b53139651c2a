"""Measure the cost of a claim, the size and the start time of a store with a backlog.

The backlog is due tomorrow, and divided among many lanes and tenants. Then a few tasks that are due
now are added, claimed and finished, many times. The store is called in this process, without the
service, so that only the store is measured. The cost of a claim must not grow with the backlog.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.service.backlog import DAY_MS, build_task, temporary_folder
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.servers import postgres_server, redis_server
from tarry.service.app import make_store
from tarry.service.model import AttemptRecord, Status, Task
from tarry.service.store import LeaseTerms, NewTask, Store, TaskResult

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ("sqlite", "postgres", "redis")
PENDING_COUNTS = (10_000, 1_000_000)
TENANTS, LANES_PER_TENANT = 20, 50
ROUNDS, TASKS_PER_ROUND = 300, 20
MAX_CLAIM_RATIO, MAX_START_S = 1.5, 5.0
_BATCH_SIZE = 1_000
_TERMS = LeaseTerms("benchmark", 60_000, 1_000)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """The figures of an engine with a backlog of `pending` tasks."""

    engine: str
    pending: int
    added_per_s: float
    bytes_per_task: float
    start_s: float
    """Time to open the store, until the first claim has returned."""
    add_ms: float
    """Median time to add `TASKS_PER_ROUND` tasks; likewise to claim and to finish them."""
    claim_ms: float
    claim_p99_ms: float
    finish_ms: float


def run(engine: str, pending: int, progress: Progress) -> ScaleResult:
    """Fill a store of this engine with `pending` tasks, and measure it."""
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        if engine == "sqlite":
            url = f"sqlite:{folder / 'tarry.db'}"
        else:
            run_server = postgres_server if engine == "postgres" else redis_server
            server = stack.enter_context(run_server())
            server.reset()
            url = server.url
        return asyncio.run(_measure(engine, url, folder, pending, progress))


async def _measure(
    engine: str, url: str, folder: Path, pending: int, progress: Progress
) -> ScaleResult:
    size_before = await _stored_bytes(engine, url, folder)
    started = time.perf_counter()
    async with _open_store(url) as store:
        tasks = _backlog_tasks(pending)
        for done in range(0, pending, _BATCH_SIZE):
            if done % 50_000 == 0:
                progress(f"scale, {engine}: {done:,} of {pending:,} tasks written")
            await store.add([NewTask(task) for task in islice(tasks, _BATCH_SIZE)])
    added_per_s = pending / (time.perf_counter() - started)
    size = await _stored_bytes(engine, url, folder) - size_before
    progress(f"scale, {engine}: {ROUNDS} claims with {pending:,} tasks")
    started = time.perf_counter()
    async with _open_store(url) as store:
        await store.claim(_TERMS, limit=100, per_lane=100)
        start_s = time.perf_counter() - started
        rounds = [await _run_round(store) for _ in range(ROUNDS)]
    adds, claims, finishes = zip(*rounds, strict=True)
    return ScaleResult(
        engine, pending, added_per_s, size / pending, start_s,
        median(adds), median(claims), quantile(list(claims), 0.99), median(finishes),
    )  # fmt: skip


async def _run_round(store: Store) -> tuple[float, float, float]:
    """Add, claim and finish tasks; return the milliseconds of each step."""
    now = int(time.time() * 1000)
    new = [NewTask(_build_task(number, now)) for number in range(TASKS_PER_ROUND)]
    times = [time.perf_counter()]
    await store.add(new)
    times.append(time.perf_counter())
    claim = await store.claim(_TERMS, limit=2 * TASKS_PER_ROUND, per_lane=100)
    times.append(time.perf_counter())
    if len(claim.tasks) != TASKS_PER_ROUND:
        raise RuntimeError(f"{len(claim.tasks)} tasks were claimed instead of {TASKS_PER_ROUND}")
    await store.finish([_build_result(task) for task in claim.tasks])
    times.append(time.perf_counter())
    add_ms, claim_ms, finish_ms = (1000 * (end - start) for start, end in pairwise(times))
    return add_ms, claim_ms, finish_ms


def _backlog_tasks(count: int) -> Iterator[Task]:
    tomorrow = int(time.time() * 1000) + DAY_MS
    return (_build_task(i, tomorrow + i * DAY_MS // count) for i in range(count))


def _build_task(number: int, due_ms: int) -> Task:
    lane, tenant = divmod(number, TENANTS)
    host = f"host-{lane % LANES_PER_TENANT}.example"
    return build_task(f"https://{host}/", due_ms, f"tenant-{tenant}")


def _build_result(task: Task) -> TaskResult:
    attempt = AttemptRecord(
        number=task.attempts + 1,
        scheduled_at=task.next_attempt_at,
        started_at=task.next_attempt_at,
        outcome="success",
        worker=task.worker,
    )
    return TaskResult(
        task=task, attempt=attempt, status=Status.SUCCEEDED, last_outcome_kind="success"
    )


@asynccontextmanager
async def _open_store(url: str) -> AsyncIterator[Store]:
    store = make_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def _stored_bytes(engine: str, url: str, folder: Path) -> int:
    """Return the size of the data: of the files, of the database, or of Redis in memory."""
    if engine == "postgres":
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval("SELECT pg_database_size(current_database())")
        finally:
            await connection.close()
    if engine == "redis":
        import redis.asyncio

        async with redis.asyncio.from_url(url) as client:
            return (await client.info("memory"))["used_memory"]
    return _folder_bytes(folder)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def table_lines(results: list[ScaleResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    titles = ("pending", "added/s", "bytes/task", "start s", "add ms", "claim ms", "p99", "finish")
    yield f"\n{'scale':10}" + "".join(f"{title:>12}" for title in titles)
    for result in results:
        cells = (
            f"{result.pending:,}", f"{result.added_per_s:,.0f}", f"{result.bytes_per_task:,.0f}",
            f"{result.start_s:.2f}", f"{result.add_ms:.2f}", f"{result.claim_ms:.2f}",
            f"{result.claim_p99_ms:.2f}", f"{result.finish_ms:.2f}",
        )  # fmt: skip
        yield f"{result.engine:10}" + "".join(f"{cell:>12}" for cell in cells)


def check_limits(results: list[ScaleResult]) -> list[LimitCheck]:
    """Compare each engine's largest backlog with its smallest."""
    checks: list[LimitCheck] = []
    for engine in dict.fromkeys(result.engine for result in results):
        ordered = sorted(
            (result for result in results if result.engine == engine), key=lambda r: r.pending
        )
        ratio = ordered[-1].claim_ms / ordered[0].claim_ms
        checks += (
            LimitCheck(f"{engine}: x claim ms", ratio, maximum=MAX_CLAIM_RATIO),
            LimitCheck(f"{engine}: start s", ordered[-1].start_s, maximum=MAX_START_S),
        )
    return checks
