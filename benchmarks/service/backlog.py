"""Lag and memory of the service with a large backlog, while a stream of tasks falls due.

The store is filled directly, before the service starts: with the backlog, which is due tomorrow,
and with the stream, which is due at a steady rate. All tasks are in one lane. The lag of an attempt
is its start minus its `nextAttemptAt`, both from the attempt log; the arrival times at the target
are also reported. If the host of a virtual machine takes the processors away for a while, the
attempts in that time are late. Therefore the lag is computed for windows of attempts, and the
median over the windows is compared with the limit.
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

import psutil
from uuid_utils import uuid7

from benchmarks.service import served
from benchmarks.service.marks import Mark, quantile
from benchmarks.service.peers.common import BODY, HEADERS
from benchmarks.service.processes import Failed, Group, free_port
from benchmarks.service.target import Target, running_target
from tarry.service.delivery.targets import parse_target
from tarry.service.encryption import Codec
from tarry.service.model import Task, TaskContent
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteStore

RATE = 500
"""Attempts per second of the stream."""
FEW, MANY = 10_000, 1_000_000
"""Tasks in the backlog, for the comparison of memory."""
WINDOW = 5 * RATE
"""Number of attempts in a window of five seconds."""
AHEAD_S = 12.0
"""Seconds until the first task of the stream is due, in which the service starts."""
TOMORROW_MS = 86_400_000
TENANT = "default"
_BATCH = 1_000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Backlog:
    """Results of a run with a backlog of `pending` tasks."""

    pending: int
    lags: list[float]
    """Lag of each attempt in milliseconds, from the attempt log."""
    arrivals: list[float]
    """Lag of each arrival at the target in milliseconds, which includes sending the request."""
    resident: float
    """Maximum resident memory of the service while the stream ran, in MiB."""
    stolen: float
    """Share of processor time that the host gave to other machines meanwhile (steal time)."""


def run(pending: int, seconds: float, progress: Progress) -> Backlog:
    """Fill a store, run the service on it until the stream is done, and read the log."""
    with _folder() as folder, running_target(folder) as target:
        path = folder / "tarry.db"
        asyncio.run(_fill(path, _backlog_tasks(target, pending), pending, progress))
        count = int(RATE * seconds)
        start = int((time.time() + AHEAD_S) * 1000)
        due = [start + 1000 * i // RATE for i in range(count)]
        stream = [_task(f"{target.url}/ok/{i}", at) for i, at in enumerate(due)]
        asyncio.run(_fill(path, iter(stream), count, progress))
        progress(f"backlog of {pending:,}: {count:,} attempts at {RATE}/s")
        resident, stolen = _serve(folder, target, start, count)
        seen = target.log()
        arrivals = [seen[i].arrived - at for i, at in enumerate(due)]
        lags = asyncio.run(_lags(path, [task.id for task in stream]))
        return Backlog(pending, lags, arrivals, resident, stolen)


def _serve(folder: Path, target: Target, start: int, count: int) -> tuple[float, float]:
    """Run the service until the stream is done; return its maximum memory and the steal time."""
    port, max_resident = free_port(), 0
    with Group(served.environ(folder, port), folder) as group:
        process = psutil.Process(served.start(group, port))
        if time.time() * 1000 > start:
            raise Failed(f"the service took longer than {AHEAD_S:g} s to start; try again")
        deadline = start / 1000 + count / RATE + 60
        psutil.cpu_times_percent()  # starts the interval that the call below measures
        while target.stats()["done"] < count:
            group.check()
            if time.time() > deadline:
                raise Failed(f"{target.stats()['done']} of {count} done: {group.log_tail()}")
            max_resident = max(max_resident, _resident(process))
            time.sleep(0.5)
        stolen = psutil.cpu_times_percent().steal / 100
        process.terminate()  # at shutdown, the service stores the results of finished attempts
        process.wait()
    return max_resident / 2**20, stolen


def _backlog_tasks(target: Target, count: int) -> Iterator[Task]:
    tomorrow = int(time.time() * 1000) + TOMORROW_MS
    return (_task(f"{target.url}/ok/0", tomorrow + i * TOMORROW_MS // count) for i in range(count))


def _task(url: str, due_ms: int) -> Task:
    task_id = str(uuid7())
    body = BODY.encode()
    content = TaskContent(url=url, headers=HEADERS, body=body, body_size=len(body))
    return Task(
        id=task_id,
        tenant=TENANT,
        lane=_lane(url),
        key=task_id,
        fingerprint=b"",
        packed_content=Codec().pack(content),
        next_attempt_at=due_ms,
    )


@cache
def _lane(url: str) -> str:
    return f"{TENANT}/{parse_target(url).endpoint}"


async def _fill(path: Path, tasks: Iterator[Task], count: int, progress: Progress) -> None:
    store = SqliteStore(path)
    await store.open()
    for done in range(0, count, _BATCH):
        if done % 50_000 == 0:
            progress(f"backlog: {done:,} of {count:,} tasks written")
        await store.add([NewTask(task) for task in islice(tasks, _BATCH)])
    await store.close()


async def _lags(path: Path, ids: list[str]) -> list[float]:
    store = SqliteStore(path)
    await store.open()
    logs = [await store.list_attempts(TENANT, task_id) for task_id in ids]
    await store.close()
    return [float(attempt.started_at - attempt.scheduled_at) for log in logs for attempt in log]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tarry-bench-") as folder:
        yield Path(folder)


def lag_lines(result: Backlog) -> Iterator[str]:
    """Yield the lines of the lag table."""
    attempts, pending = len(result.lags), result.pending
    yield f"\nlag, {attempts:,} attempts at {RATE}/s with {pending:,} tasks pending (ms)"
    for name, figures in (("started", result.lags), ("arrived", result.arrivals)):
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
        cells = "".join(f"{head:>7} {quantile(figures, q):.2f}" for head, q in shares.items())
        yield f"{name:16}{cells}"
    p99_by_window = ", ".join(f"{p99:g}" for p99 in _by_window(result, 0.99))
    yield f"started, p99 of each five seconds: {p99_by_window}"
    yield f"the host gave {result.stolen:.1%} of the processors' time to others"


def lag_marks(result: Backlog) -> list[Mark]:
    return [
        Mark("lag p50 ms", median(_by_window(result, 0.5)), most=2.0),
        Mark("lag p99 ms", median(_by_window(result, 0.99)), most=5.0),
    ]


def _by_window(result: Backlog, share: float) -> list[float]:
    begins = range(0, len(result.lags), WINDOW)
    return [quantile(result.lags[begin : begin + WINDOW], share) for begin in begins]


def _resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process and its descendants."""
    processes = (process, *process.children(recursive=True))
    return sum(each.memory_info().rss for each in processes)


def memory_lines(few: Backlog, many: Backlog) -> Iterator[str]:
    """Yield the lines of the memory table."""
    yield "\nmemory, resident while the stream ran (MiB)"
    for result in (few, many):
        yield f"{result.pending:>13,} pending  {result.resident:7.1f}"


def memory_marks(few: Backlog, many: Backlog) -> list[Mark]:
    return [Mark("x memory", many.resident / few.resident, least=0.8, most=1.2)]
