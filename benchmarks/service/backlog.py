"""Lag and memory of the service with a large backlog, while a stream of tasks falls due.

The store is filled directly, before the service starts: with the backlog, which is due tomorrow,
and with the stream, which is due at a steady rate. All tasks are in one lane. The lag of an attempt
is its start minus its `nextAttemptAt`, both from the attempt log; the arrival times at the target
are also reported. While the host of a virtual machine gives the processors to other machines, all
attempts are late. Therefore the lag is computed for windows of attempts, and the median over the
windows is compared with the limit.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from uuid_utils import uuid7

from benchmarks.service import tarry_server
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.peers.common import BODY, HEADERS
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from benchmarks.service.target import Target, running_target
from tarry.service.app import make_store
from tarry.service.delivery.targets import parse_target
from tarry.service.encryption import Codec
from tarry.service.model import Task, TaskContent
from tarry.service.store import NewTask

ATTEMPTS_PER_SECOND = 500
"""The rate of the stream."""
SMALL_BACKLOG, LARGE_BACKLOG = 10_000, 1_000_000
"""Tasks in the backlog, for the comparison of memory."""
WINDOW_ATTEMPTS = 5 * ATTEMPTS_PER_SECOND
"""Number of attempts in a window of five seconds."""
START_LEAD_S = 12.0
"""Seconds until the first task of the stream is due, in which the service starts."""
DAY_MS = 86_400_000
TENANT = "default"
_BATCH_SIZE = 1_000

Progress = Callable[[str], None]


class ServiceRun(NamedTuple):
    """Figures of the service while the stream ran."""

    start_s: float
    """Time from its start until it was ready."""
    resident_mib: float
    """Maximum resident memory."""
    steal_share: float
    """Share of processor time that the host gave to other machines meanwhile."""


@dataclass(frozen=True, slots=True)
class BacklogResult:
    """Results of a run with a backlog of `pending` tasks."""

    pending: int
    lags_ms: list[float]
    """Start of each attempt minus its `nextAttemptAt`, from the attempt log."""
    arrival_lags_ms: list[float]
    """Arrival of each request at the target minus its `nextAttemptAt`."""
    service: ServiceRun


def run(pending: int, seconds: float, progress: Progress) -> BacklogResult:
    """Fill a store, run the service on it until the stream is done, and read the log."""
    with temporary_folder() as folder, running_target(folder) as target:
        url = tarry_server.store_url(folder)
        asyncio.run(fill_store(url, _backlog_tasks(target, pending), pending, progress))
        count = int(ATTEMPTS_PER_SECOND * seconds)
        stream = add_stream(url, target, count, ATTEMPTS_PER_SECOND, progress)
        progress(f"backlog of {pending:,}: {count:,} attempts at {ATTEMPTS_PER_SECOND}/s")
        service = serve_stream(folder, url, target, stream)
        requests = target.log()
        arrival_lags = [
            requests[i].arrived_at - task.next_attempt_at for i, task in enumerate(stream)
        ]
        lags = asyncio.run(read_lags(url, stream))
        return BacklogResult(pending, lags, arrival_lags, service)


def add_stream(url: str, target: Target, count: int, rate: int, progress: Progress) -> list[Task]:
    """Add tasks that are due at `rate` per second, the first after `START_LEAD_S`; return them."""
    start = int((time.time() + START_LEAD_S) * 1000)
    stream = [build_task(f"{target.url}/ok/{i}", start + 1000 * i // rate) for i in range(count)]
    asyncio.run(fill_store(url, iter(stream), count, progress))
    return stream


def serve_stream(folder: Path, url: str, target: Target, stream: list[Task]) -> ServiceRun:
    """Run the service on the store at `url` until the stream is done; its log is in `folder`."""
    start, end, count = stream[0].next_attempt_at, stream[-1].next_attempt_at, len(stream)
    port, max_resident_bytes = free_port(), 0
    with ProcessGroup(tarry_server.environ(folder, port, url), folder) as group:
        started = time.perf_counter()
        process = psutil.Process(tarry_server.start(group, port))
        start_s = time.perf_counter() - started
        if time.time() * 1000 > start:
            raise BenchmarkError(
                f"the service took longer than {START_LEAD_S:g} s to start; try again"
            )
        deadline = end / 1000 + 60
        psutil.cpu_times_percent()  # starts the interval that the call below measures
        while target.stats()["done"] < count:
            group.check()
            if time.time() > deadline:
                raise BenchmarkError(
                    f"{target.stats()['done']} of {count} done: {group.log_tail()}"
                )
            max_resident_bytes = max(max_resident_bytes, resident_bytes(process))
            time.sleep(0.5)
        steal_share = psutil.cpu_times_percent().steal / 100
        process.terminate()  # at shutdown, the service stores the results of finished attempts
        process.wait()
    return ServiceRun(start_s, max_resident_bytes / 2**20, steal_share)


def _backlog_tasks(target: Target, count: int) -> Iterator[Task]:
    tomorrow = int(time.time() * 1000) + DAY_MS
    return (build_task(f"{target.url}/ok/0", tomorrow + i * DAY_MS // count) for i in range(count))


def build_task(url: str, due_ms: int, tenant: str = TENANT) -> Task:
    """Return a task that is due at `due_ms`, to be added to a store."""
    task_id = str(uuid7())
    body = BODY.encode()
    content = TaskContent(url=url, headers=HEADERS, body=body, body_size=len(body))
    return Task(
        id=task_id,
        tenant=tenant,
        lane=_lane_name(tenant, url),
        key=task_id,
        fingerprint=b"",
        packed_content=Codec().pack(content),
        next_attempt_at=due_ms,
    )


@cache
def _lane_name(tenant: str, url: str) -> str:
    return f"{tenant}/{parse_target(url).endpoint}"


async def fill_store(url: str, tasks: Iterator[Task], count: int, progress: Progress) -> None:
    """Add `count` tasks to the store at `url`, while no service uses it."""
    store = make_store(url)
    await store.open()
    for done in range(0, count, _BATCH_SIZE):
        if done % 50_000 == 0:
            progress(f"backlog: {done:,} of {count:,} tasks written")
        await store.add([NewTask(task) for task in islice(tasks, _BATCH_SIZE)])
    await store.close()


async def read_lags(url: str, tasks: list[Task]) -> list[float]:
    """Return the start of each attempt of these tasks minus its `nextAttemptAt`, in ms."""
    store = make_store(url)
    await store.open()
    logs = [await store.list_attempts(task.tenant, task.id) for task in tasks]
    await store.close()
    return [float(attempt.started_at - attempt.scheduled_at) for log in logs for attempt in log]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tarry-bench-") as folder:
        yield Path(folder)


def lag_lines(result: BacklogResult) -> Iterator[str]:
    """Yield the lines of the lag table."""
    attempts, pending = len(result.lags_ms), result.pending
    rate = f"{ATTEMPTS_PER_SECOND}/s"
    yield f"\nlag, {attempts:,} attempts at {rate} with {pending:,} tasks pending (ms)"
    for name, figures in (("started", result.lags_ms), ("arrived", result.arrival_lags_ms)):
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        cells = "".join(f"{head:>7} {quantile(figures, q):.2f}" for head, q in shares.items())
        yield f"{name:16}{cells}"
    p99_by_window = ", ".join(f"{p99:g}" for p99 in _quantiles_by_window(result, 0.99))
    yield f"started, p99 of each five seconds: {p99_by_window}"
    yield f"the host gave {result.service.steal_share:.1%} of processor time to other machines"


def check_lag(result: BacklogResult) -> list[LimitCheck]:
    return [
        LimitCheck("lag p50 ms", median(_quantiles_by_window(result, 0.5)), maximum=2.0),
        LimitCheck("lag p99 ms", median(_quantiles_by_window(result, 0.99)), maximum=5.0),
    ]


def _quantiles_by_window(result: BacklogResult, share: float) -> list[float]:
    return quantiles_by_window(result.lags_ms, WINDOW_ATTEMPTS, share)


def quantiles_by_window(figures: list[float], size: int, share: float) -> list[float]:
    """Return the quantile of each window of `size` figures."""
    starts = range(0, len(figures), size)
    return [quantile(figures[i : i + size], share) for i in starts]


def resident_bytes(process: psutil.Process) -> int:
    """Return the resident bytes of a process and its descendants."""
    processes = (process, *process.children(recursive=True))
    return sum(each.memory_info().rss for each in processes)


def memory_lines(small: BacklogResult, large: BacklogResult) -> Iterator[str]:
    """Yield the lines of the memory table."""
    yield "\nmemory, resident while the stream ran (MiB)"
    for result in (small, large):
        yield f"{result.pending:>13,} pending  {result.service.resident_mib:7.1f}"


def check_memory(small: BacklogResult, large: BacklogResult) -> list[LimitCheck]:
    ratio = large.service.resident_mib / small.service.resident_mib
    return [LimitCheck("x memory", ratio, minimum=0.8, maximum=1.2)]
