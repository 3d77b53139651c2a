"""Latency of adding a task, at 1,000 new tasks per second, which are all delivered at once.

POSTs are sent on a fixed schedule that does not depend on earlier responses, and the time of a POST
counts from its scheduled start. So the figures include stalls of the service that delay POSTs.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from benchmarks.service import tarry_server
from benchmarks.service.client import Connections
from benchmarks.service.event_readers import EventCounts, running_event_readers
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.peers.common import BODY, HEADERS
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TASKS_PER_SECOND = 1_000
CONNECTIONS = 256
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class IngestResult:
    """Results of a run."""

    times_ms: list[float]
    """The time of each POST."""
    deliveries_per_second: float
    """The rate of deliveries while POSTs were sent."""
    event_counts: EventCounts
    """What readers of `/events` have received meanwhile."""


def run(seconds: float, progress: Callable[[str], None], *, event_readers: int = 0) -> IngestResult:
    """Run the service under a steady stream of new tasks."""
    with (
        tempfile.TemporaryDirectory(prefix="tarry-bench-") as home,
        running_target(Path(home)) as target,
    ):
        folder, port = Path(home), free_port()
        with ProcessGroup(tarry_server.environ(folder, port), folder) as group:
            tarry_server.start(group, port)
            readers = f", {event_readers} readers of /events" if event_readers else ""
            progress(f"ingest: {TASKS_PER_SECOND}/s for {seconds:g} s{readers}")
            with running_event_readers(group, port, event_readers) as event_counts:
                measured = uvloop.run(_measure(tarry_server.address(port), target, seconds))
            return IngestResult(*measured, event_counts)


async def _measure(address: str, target: Target, seconds: float) -> tuple[list[float], float]:
    """Return the time of each POST in milliseconds, and the number of deliveries per second."""
    connections = await Connections.open(address, CONNECTIONS, {"Content-Type": "application/json"})
    await _post_tasks(connections, target.url, WARM_UP_S)
    before = target.stats()["requests"]
    started = time.monotonic()
    times = await _post_tasks(connections, target.url, seconds)
    deliveries_per_second = (target.stats()["requests"] - before) / (time.monotonic() - started)
    connections.close()
    return times, deliveries_per_second


async def _post_tasks(connections: Connections, target: str, seconds: float) -> list[float]:
    encode = msgspec.json.Encoder().encode
    started = time.monotonic()
    times: list[float] = []

    async def post(task: int, due: float) -> None:
        body = {"targetUrl": f"{target}/ok/{task}", "headers": HEADERS, "body": BODY}
        status = await connections.post("/retry-tasks", encode(body))
        times.append(1e3 * (time.monotonic() - due))
        if status != 201:
            raise BenchmarkError(f"the response to a POST has status {status}")

    async with asyncio.TaskGroup() as posts:
        for task in range(int(TASKS_PER_SECOND * seconds)):
            due = started + task / TASKS_PER_SECOND
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            posts.create_task(post(task, due))
    return times


def table_lines(result: IngestResult) -> Iterator[str]:
    """Yield the lines of the table."""
    posts, rate = len(result.times_ms), result.deliveries_per_second
    yield f"\ningest, {posts:,} POSTs at {TASKS_PER_SECOND}/s, {rate:,.0f} deliveries/s (ms)"
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    cells = "".join(f"{head:>7} {quantile(result.times_ms, q):.2f}" for head, q in shares.items())
    yield f"{'POST':16}{cells}"


def check_limits(result: IngestResult) -> list[LimitCheck]:
    """Return the check that deliveries keep up; the time of a POST has no limit."""
    return [
        LimitCheck("deliveries/s", result.deliveries_per_second, minimum=0.98 * TASKS_PER_SECOND)
    ]
