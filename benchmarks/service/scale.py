"""Measure the cost of a claim, size, start time and memory with a large backlog.

The backlog is due tomorrow, and divided among many lanes and tenants. Then a few tasks that are due
now are added, claimed and finished, many times. The store is called in this process, without the
service, so that only the store is measured. The stores of an engine take turns, because the speed
of a machine may change by a factor of two within minutes. At last the service runs on each store
while a stream of tasks falls due. Neither the cost of a claim nor the memory of the service may
grow with the backlog.

Filling a store takes long. With `--data`, the stores stay in a folder, and a later run measures
them again: only tasks that are missing are added.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import isnan, nan
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.service import tarry_server
from benchmarks.service.backlog import (
    DAY_MS,
    ServiceRun,
    add_stream,
    build_task,
    read_lags,
    serve_stream,
    temporary_folder,
)
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.processes import BenchmarkError, cpu_seconds
from benchmarks.service.servers import postgres_server, redis_server
from benchmarks.service.target import running_target
from tarry.errors import StoreUnavailable
from tarry.service.app import make_store
from tarry.service.model import AttemptRecord, Status, Task
from tarry.service.store import LeaseTerms, NewTask, Store, TaskResult

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ("sqlite", "postgres", "redis")
PENDING_COUNTS = (10_000, 1_000_000)
TENANTS, LANES_PER_TENANT = 20, 50
ROUNDS, TASKS_PER_ROUND = 300, 20
_ROUNDS_PER_TURN = 10
ATTEMPTS_PER_SECOND, STREAM_S = 200, 10
MAX_RATIO, MAX_START_S = 1.5, 5.0
_BATCH_SIZE = 2_000
_MAX_ADD_TRIES = 10
_EMPTY_BYTES = "empty-bytes"
"""A file with the size of the store before it was filled."""
_TERMS = LeaseTerms("benchmark", 60_000, 1_000)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """The figures of an engine with a backlog of `pending` tasks."""

    engine: str
    pending: int
    added_per_s: float
    """NaN if the store was filled by an earlier run."""
    bytes_per_task: float
    open_s: float
    """Time to open the store, until the first claim has returned."""
    add_ms: float
    """Median time to add `TASKS_PER_ROUND` tasks; likewise to claim and to finish them."""
    claim_ms: float
    claim_p99_ms: float
    finish_ms: float
    cpu_ms: float
    """Processor time of a round, of this process and the server: it varies less than times."""
    service: ServiceRun
    lag_p99_ms: float
    """Start of an attempt minus its `nextAttemptAt`, for the attempts of the stream."""


def fill(engine: str, pending: int, data: Path, progress: Progress) -> None:
    """Fill the store in a folder of `data` with `pending` tasks, for a later run."""
    with _running_store_in(data, engine, pending) as (url, _, folder):
        asyncio.run(_fill(engine, url, folder, pending, progress))


def run(
    engine: str, pending_counts: Sequence[int], data: Path | None, progress: Progress
) -> list[ScaleResult]:
    """Fill a store for each number of tasks, unless an earlier run has, and measure them."""
    with ExitStack() as stack:
        backlogs: list[_Backlog] = []
        for pending in pending_counts:
            running = stack.enter_context(_running_store_in(data, engine, pending))
            url, server_pid, folder = running
            added_per_s = asyncio.run(_fill(engine, url, folder, pending, progress))
            size = asyncio.run(_stored_bytes(engine, url, folder))
            size -= int((folder / _EMPTY_BYTES).read_text())
            backlogs.append(_Backlog(pending, url, server_pid, added_per_s, size / pending))
        progress(f"scale, {engine}: {ROUNDS} claims with each backlog")
        asyncio.run(_measure_stores(backlogs))
        return [_build_result(engine, backlog, progress) for backlog in backlogs]


@dataclass(slots=True)
class _Backlog:
    """A store that was filled, and its measurements."""

    pending: int
    url: str
    server_pid: int | None
    added_per_s: float
    bytes_per_task: float
    open_s: float = 0.0
    cpu_s: float = 0.0
    rounds: list[tuple[float, float, float]] = field(default_factory=list)
    """The milliseconds of the steps of each round."""


def _build_result(engine: str, backlog: _Backlog, progress: Progress) -> ScaleResult:
    """Run the service on a store that was measured, and return all figures."""
    adds, claims, finishes = zip(*backlog.rounds, strict=True)
    service, lags = _measure_service(backlog.url, progress)
    return ScaleResult(
        engine, backlog.pending, backlog.added_per_s, backlog.bytes_per_task, backlog.open_s,
        median(adds), median(claims), quantile(list(claims), 0.99), median(finishes),
        1000 * backlog.cpu_s / ROUNDS, service, quantile(lags, 0.99),
    )  # fmt: skip


@contextmanager
def _running_store_in(
    data: Path | None, engine: str, pending: int
) -> Iterator[tuple[str, int | None, Path]]:
    """Yield the URL, server and folder of a store in a folder of `data`.

    None: in a temporary folder.
    """
    with ExitStack() as stack:
        if data is None:
            folder = stack.enter_context(temporary_folder())
        else:
            folder = data.resolve() / f"{engine}-{pending}"
            folder.mkdir(parents=True, exist_ok=True)
        yield *stack.enter_context(running_store(engine, folder)), folder


@contextmanager
def running_store(engine: str, folder: Path) -> Iterator[tuple[str, int | None]]:
    """Run the server of an engine, if it needs one; yield the URL of the store, and its process id.

    The store is in `folder`.
    """
    if engine == "sqlite":
        yield tarry_server.store_url(folder), None
    else:
        run_server = postgres_server if engine == "postgres" else redis_server
        with run_server(folder) as server:
            yield server.url, server.pid


async def _fill(engine: str, url: str, folder: Path, pending: int, progress: Progress) -> float:
    """Add tasks until the store has `pending` tasks; return the number of added tasks per second.

    NaN if the store has enough tasks already.
    """
    marker = folder / _EMPTY_BYTES
    async with _open_store(url) as store:
        if not marker.exists():
            marker.write_text(str(await _stored_bytes(engine, url, folder)))
        existing = (await store.counters()).task_counts.get(Status.PENDING, 0)
        tasks = _backlog_tasks(pending, existing)
        started = time.perf_counter()
        for done in range(existing, pending, _BATCH_SIZE):
            if (done - existing) % 50_000 == 0:
                progress(f"scale, {engine}: {done:,} of {pending:,} tasks written")
            await _add(store, [NewTask(task) for task in islice(tasks, _BATCH_SIZE)])
    return (pending - existing) / (time.perf_counter() - started) if pending > existing else nan


async def _add(store: Store, tasks: list[NewTask]) -> None:
    """Add tasks, also if the store is unavailable for a while: `add` may be repeated."""
    for _ in range(_MAX_ADD_TRIES):
        with suppress(StoreUnavailable):
            await store.add(tasks)
            return
        await asyncio.sleep(1)
    raise BenchmarkError(f"the store was unavailable {_MAX_ADD_TRIES} times in a row")


async def _measure_stores(backlogs: Sequence[_Backlog]) -> None:
    """Measure how long it takes to open the stores, and run the rounds on each store in turn."""
    async with AsyncExitStack() as stack:
        stores: list[Store] = []
        for backlog in backlogs:
            started = time.perf_counter()
            stores.append(await stack.enter_async_context(_open_store(backlog.url)))
            await stores[-1].claim(_TERMS, limit=100, per_lane=100)
            backlog.open_s = time.perf_counter() - started
        for first in range(0, ROUNDS, _ROUNDS_PER_TURN):
            for store, backlog in zip(stores, backlogs, strict=True):
                cpu_before = _cpu_seconds(backlog.server_pid)
                for number in range(first, first + _ROUNDS_PER_TURN):
                    backlog.rounds.append(await _run_round(store, number))
                backlog.cpu_s += _cpu_seconds(backlog.server_pid) - cpu_before


def _cpu_seconds(server_pid: int | None) -> float:
    """Return the processor time of this process and the server."""
    return time.process_time() + (0.0 if server_pid is None else cpu_seconds(server_pid))


async def _run_round(store: Store, number: int) -> tuple[float, float, float]:
    """Add, claim and finish tasks of the next lanes; return the milliseconds of each step."""
    now, first = int(time.time() * 1000), number * TASKS_PER_ROUND
    new = [NewTask(_build_task(first + i, now)) for i in range(TASKS_PER_ROUND)]
    times = [time.perf_counter()]
    await store.add(new)
    times.append(time.perf_counter())
    claim = await store.claim(_TERMS, limit=2 * TASKS_PER_ROUND, per_lane=100)
    times.append(time.perf_counter())
    if len(claim.tasks) != TASKS_PER_ROUND:
        raise RuntimeError(f"{len(claim.tasks)} tasks were claimed instead of {TASKS_PER_ROUND}")
    await store.finish([_build_task_result(task) for task in claim.tasks])
    times.append(time.perf_counter())
    add_ms, claim_ms, finish_ms = (1000 * (end - start) for start, end in pairwise(times))
    return add_ms, claim_ms, finish_ms


def _measure_service(url: str, progress: Progress) -> tuple[ServiceRun, list[float]]:
    """Run the service on the store while a stream of tasks falls due; return also their lags."""
    with temporary_folder() as folder, running_target(folder) as target:
        count = ATTEMPTS_PER_SECOND * STREAM_S
        stream = add_stream(url, target, count, ATTEMPTS_PER_SECOND, progress)
        service = serve_stream(folder, url, target, stream)
        return service, asyncio.run(read_lags(url, stream))


def _backlog_tasks(count: int, first: int) -> Iterator[Task]:
    tomorrow = int(time.time() * 1000) + DAY_MS
    return (_build_task(i, tomorrow + i * DAY_MS // count) for i in range(first, count))


def _build_task(number: int, due_ms: int) -> Task:
    lane, tenant = divmod(number, TENANTS)
    host = f"host-{lane % LANES_PER_TENANT}.example"
    return build_task(f"https://{host}/", due_ms, f"tenant-{tenant}")


def _build_task_result(task: Task) -> TaskResult:
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
    """Yield the lines of the tables of the stores and of the service."""
    titles = (
        *("pending", "added/s", "bytes/task", "open s"),
        *("add ms", "claim ms", "p99", "finish", "CPU ms"),
    )
    yield f"\n{'scale':10}" + "".join(f"{title:>12}" for title in titles)
    for result in results:
        cells = (
            f"{result.pending:,}",
            "" if isnan(result.added_per_s) else f"{result.added_per_s:,.0f}",
            f"{result.bytes_per_task:,.0f}", f"{result.open_s:.2f}",
            f"{result.add_ms:.2f}", f"{result.claim_ms:.2f}",
            f"{result.claim_p99_ms:.2f}", f"{result.finish_ms:.2f}", f"{result.cpu_ms:.2f}",
        )  # fmt: skip
        yield f"{result.engine:10}" + "".join(f"{cell:>12}" for cell in cells)
    titles = ("pending", "start s", "memory MiB", "lag p99 ms")
    yield f"\n{'service':10}" + "".join(f"{title:>12}" for title in titles)
    for result in results:
        service = result.service
        cells = (
            f"{result.pending:,}", f"{service.start_s:.2f}", f"{service.resident_mib:.1f}",
            f"{result.lag_p99_ms:g}",
        )  # fmt: skip
        yield f"{result.engine:10}" + "".join(f"{cell:>12}" for cell in cells)


def check_limits(results: list[ScaleResult]) -> list[LimitCheck]:
    """Compare each engine's largest backlog with its smallest."""
    checks: list[LimitCheck] = []
    for engine in dict.fromkeys(result.engine for result in results):
        ordered = sorted(
            (result for result in results if result.engine == engine), key=lambda r: r.pending
        )
        small, large = ordered[0], ordered[-1]
        memory_ratio = large.service.resident_mib / small.service.resident_mib
        checks += (
            LimitCheck(f"{engine}: x claim ms", large.claim_ms / small.claim_ms, maximum=MAX_RATIO),
            LimitCheck(f"{engine}: x memory", memory_ratio, maximum=MAX_RATIO),
            LimitCheck(f"{engine}: start s", large.service.start_s, maximum=MAX_START_S),
        )
    return checks
