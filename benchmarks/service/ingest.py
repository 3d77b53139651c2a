"""Latency of adding a task, in four situations.

* stream: 1,000 new tasks per second, which are all delivered at once;
* processes: the same stream for two and four processes that share one SQLite file;
* bulk: 50 single tasks per second, while other clients send batches without a pause;
* overdue: 50 single tasks per second, after a start with many overdue tasks in the store.

POSTs are sent on a fixed schedule that does not depend on earlier responses, and the time of a POST
counts from its scheduled start. So the figures include stalls of the service that delay POSTs.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from benchmarks.service import backlog, tarry_server
from benchmarks.service.client import Connections
from benchmarks.service.event_readers import EventCounts, running_event_readers
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.peers.common import BODY, HEADERS
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TASKS_PER_SECOND = 1_000
SINGLE_TASKS_PER_SECOND = 50
BULK_CLIENTS, BULK_BATCH_SIZE = 4, 1_000
OVERDUE_TASKS = 300_000
PROCESS_COUNTS = (2, 4)
MAX_P99_MS = 50.0  # of single tasks, and of the stream with several processes
CONNECTIONS = 256
SINGLE_TASKS_CONNECTIONS = 16  # the service accepts about one new connection every 10 ms when busy
WARM_UP_S = 2.0
_JSON = {"Content-Type": "application/json"}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class IngestResult:
    """Results of a run."""

    times_ms: list[float]
    """The time of each POST."""
    deliveries_per_second: float
    """The rate of deliveries while POSTs were sent."""
    event_counts: EventCounts
    """The events that readers of `/events` received in this time."""


@dataclass(frozen=True, slots=True)
class SingleTasksResult:
    """Results of a run with single tasks during other work."""

    times_ms: list[float]
    """The time of each POST."""
    other_tasks_per_second: float
    """The rate of the other work: tasks added in batches, or overdue tasks delivered."""


def run(seconds: float, progress: Callable[[str], None], *, event_readers: int = 0) -> IngestResult:
    """Run the service under a steady stream of new tasks."""
    readers = f", {event_readers} readers of /events" if event_readers else ""
    progress(f"ingest: {TASKS_PER_SECOND}/s for {seconds:g} s{readers}")
    with _running_service(0, progress) as (group, port, target):
        with running_event_readers(group, port, event_readers) as event_counts:
            measured = uvloop.run(_measure(tarry_server.address(port), target, seconds))
        return IngestResult(*measured, event_counts)


def run_processes(
    processes: int, seconds: float, progress: Callable[[str], None]
) -> tuple[list[float], float]:
    """Send the stream to several processes; return the ms of each POST, and deliveries/s."""
    progress(f"ingest: {processes} processes, {TASKS_PER_SECOND}/s for {seconds:g} s")
    with _running_service(0, progress, processes) as (_, port, target):
        return uvloop.run(_measure(tarry_server.address(port), target, seconds))


def run_bulk(seconds: float, progress: Callable[[str], None]) -> SingleTasksResult:
    """Add single tasks while other clients add batches."""
    progress(f"ingest: during batches of {BULK_BATCH_SIZE:,} for {seconds:g} s")
    with _running_service(0, progress) as (_, port, target):
        address = tarry_server.address(port)
        return uvloop.run(_measure_next_to_bulk(address, target, seconds))


def run_overdue(overdue: int, seconds: float, progress: Callable[[str], None]) -> SingleTasksResult:
    """Add single tasks after a start with this number of overdue tasks."""
    with _running_service(overdue, progress) as (_, port, target):
        progress(f"ingest: after a start with {overdue:,} overdue tasks, for {seconds:g} s")
        address = tarry_server.address(port)
        return uvloop.run(_measure_after_start(address, target, seconds))


@contextmanager
def _running_service(
    overdue: int, progress: Callable[[str], None], processes: int = 1
) -> Iterator[tuple[ProcessGroup, int, Target]]:
    """Run the service on a store with overdue tasks; yield its process group, port and target."""
    with (
        tempfile.TemporaryDirectory(prefix="tarry-bench-") as home,
        running_target(Path(home)) as target,
    ):
        folder, port = Path(home), free_port()
        if overdue:
            now = int(time.time() * 1000)
            tasks = (backlog.build_task(f"{target.url}/ok/0", now) for _ in range(overdue))
            asyncio.run(
                backlog.fill_store(tarry_server.store_url(folder), tasks, overdue, progress)
            )
        with ProcessGroup(tarry_server.environ(folder, port), folder) as group:
            tarry_server.start(group, port, processes)
            yield group, port, target


async def _measure(address: str, target: Target, seconds: float) -> tuple[list[float], float]:
    """Return the time of each POST in milliseconds, and the number of deliveries per second."""
    connections = await Connections.open(address, CONNECTIONS, _JSON)
    await post_tasks(connections, target.url, WARM_UP_S)
    before = target.stats()["requests"]
    started = time.monotonic()
    times = await post_tasks(connections, target.url, seconds)
    deliveries_per_second = (target.stats()["requests"] - before) / (time.monotonic() - started)
    connections.close()
    return times, deliveries_per_second


async def _measure_next_to_bulk(address: str, target: Target, seconds: float) -> SingleTasksResult:
    connections = await Connections.open(address, SINGLE_TASKS_CONNECTIONS, _JSON)
    bulk_headers = {**_JSON, "Prefer": "return=minimal"}
    bulk_connections = await Connections.open(address, BULK_CLIENTS, bulk_headers)
    task = {**_task_document(target.url, 0), "delayMs": backlog.DAY_MS}
    batch = _encode({"tasks": [task] * BULK_BATCH_SIZE})
    batch_count = 0

    async def post_batches() -> None:
        nonlocal batch_count
        while True:
            status = await bulk_connections.post("/retry-tasks/batch", batch)
            if status != 200:
                raise BenchmarkError(f"the response to a batch has status {status}")
            batch_count += 1

    clients = [asyncio.create_task(post_batches()) for _ in range(BULK_CLIENTS)]
    await post_tasks(connections, target.url, WARM_UP_S, SINGLE_TASKS_PER_SECOND)
    before, started = batch_count, time.monotonic()
    times = await post_tasks(connections, target.url, seconds, SINGLE_TASKS_PER_SECOND)
    batches_per_second = (batch_count - before) / (time.monotonic() - started)
    for client in clients:
        if client.done():
            client.result()  # raises the error of the client
        client.cancel()
    connections.close()
    bulk_connections.close()
    return SingleTasksResult(times, BULK_BATCH_SIZE * batches_per_second)


async def _measure_after_start(address: str, target: Target, seconds: float) -> SingleTasksResult:
    connections = await Connections.open(address, SINGLE_TASKS_CONNECTIONS, _JSON)
    before, started = target.stats()["requests"], time.monotonic()
    times = await post_tasks(connections, target.url, seconds, SINGLE_TASKS_PER_SECOND)
    deliveries = target.stats()["requests"] - before - len(times)
    deliveries_per_second = deliveries / (time.monotonic() - started)
    connections.close()
    return SingleTasksResult(times, deliveries_per_second)


def _task_document(target: str, task: int) -> dict[str, object]:
    return {"targetUrl": f"{target}/ok/{task}", "headers": HEADERS, "body": BODY}


async def post_tasks(
    connections: Connections, target: str, seconds: float, rate: float = TASKS_PER_SECOND
) -> list[float]:
    """Send single tasks at a rate; return the time of each POST in milliseconds."""
    started = time.monotonic()
    times: list[float] = []

    async def post(task: int, due: float) -> None:
        status = await connections.post("/retry-tasks", _encode(_task_document(target, task)))
        times.append(1e3 * (time.monotonic() - due))
        if status != 201:
            raise BenchmarkError(f"the response to a POST has status {status}")

    async with asyncio.TaskGroup() as posts:
        for task in range(int(rate * seconds)):
            due = started + task / rate
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            posts.create_task(post(task, due))
    return times


def table_lines(result: IngestResult) -> Iterator[str]:
    """Yield the lines of the table."""
    posts, rate = len(result.times_ms), result.deliveries_per_second
    yield f"\ningest, {posts:,} POSTs at {TASKS_PER_SECOND}/s, {rate:,.0f} deliveries/s (ms)"
    yield _quantile_line(result.times_ms)


def processes_lines(
    processes: int, times_ms: list[float], deliveries_per_second: float
) -> Iterator[str]:
    """Yield the lines of the table for a run with several processes."""
    posts, rate = f"{len(times_ms):,} POSTs at {TASKS_PER_SECOND}/s", deliveries_per_second
    yield f"\ningest, {processes} processes, {posts}, {rate:,.0f} deliveries/s (ms)"
    yield _quantile_line(times_ms)


def single_tasks_lines(name: str, result: SingleTasksResult) -> Iterator[str]:
    """Yield the lines of the table for single tasks during other work."""
    rate = result.other_tasks_per_second
    yield f"\ningest, single tasks, {name} at {rate:,.0f} tasks/s (ms)"
    yield _quantile_line(result.times_ms)


def _quantile_line(times_ms: list[float]) -> str:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    cells = "".join(f"{head:>7} {quantile(times_ms, q):.2f}" for head, q in shares.items())
    return f"{'POST':16}{cells}"


def check_limits(result: IngestResult) -> list[LimitCheck]:
    """Return the check of the number of deliveries per second; a POST has no limit here."""
    return [
        LimitCheck("deliveries/s", result.deliveries_per_second, minimum=0.98 * TASKS_PER_SECOND)
    ]


def check_processes(processes: int, times_ms: list[float]) -> list[LimitCheck]:
    """Return the check of the p99 of the stream with several processes."""
    name = f"POST p99 ms, {processes} processes"
    return [LimitCheck(name, quantile(times_ms, 0.99), maximum=MAX_P99_MS)]


def check_single_tasks(name: str, result: SingleTasksResult) -> list[LimitCheck]:
    """Return the check of the p99 of single tasks during other work."""
    return [LimitCheck(f"POST p99 ms, {name}", quantile(result.times_ms, 0.99), maximum=MAX_P99_MS)]
