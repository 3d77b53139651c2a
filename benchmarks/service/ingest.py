"""Latency of adding a task while deliveries run, at 1,000 new tasks per second, all due at once.

POSTs are sent on a fixed schedule that does not depend on earlier responses, and the time of a POST
counts from its scheduled start. So the figures show stalls of the service even if they delay POSTs.
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

from benchmarks.service import served
from benchmarks.service.client import Connections
from benchmarks.service.marks import Mark, quantile
from benchmarks.service.peers.common import BODY, HEADERS
from benchmarks.service.processes import Failed, Group, free_port
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RATE = 1_000
CONNECTIONS = 256
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Ingest:
    """Results of a run."""

    times: list[float]
    """Milliseconds of each POST."""
    delivered: float
    """Deliveries per second while POSTs were sent."""


def run(seconds: float, progress: Callable[[str], None]) -> Ingest:
    """Run the service under a steady stream of new tasks."""
    with (
        tempfile.TemporaryDirectory(prefix="tarry-bench-") as home,
        running_target(Path(home)) as target,
    ):
        folder, port = Path(home), free_port()
        with Group(served.environ(folder, port), folder) as group:
            served.start(group, port)
            progress(f"ingest: {RATE}/s for {seconds:g} s")
            return uvloop.run(_measure(served.address(port), target, seconds))


async def _measure(address: str, target: Target, seconds: float) -> Ingest:
    connections = await Connections.open(address, CONNECTIONS, {"Content-Type": "application/json"})
    await _stream(connections, target.url, WARM_UP_S)
    before = target.stats()["requests"]
    started = time.monotonic()
    times = await _stream(connections, target.url, seconds)
    delivered = (target.stats()["requests"] - before) / (time.monotonic() - started)
    connections.close()
    return Ingest(times, delivered)


async def _stream(connections: Connections, target: str, seconds: float) -> list[float]:
    encode = msgspec.json.Encoder().encode
    started = time.monotonic()
    times: list[float] = []

    async def post(task: int, due: float) -> None:
        body = {"targetUrl": f"{target}/ok/{task}", "headers": HEADERS, "body": BODY}
        status = await connections.post("/retry-tasks", encode(body))
        times.append(1e3 * (time.monotonic() - due))
        if status != 201:
            raise Failed(f"a POST was answered {status}")

    async with asyncio.TaskGroup() as posts:
        for task in range(int(RATE * seconds)):
            due = started + task / RATE
            if (early := due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            posts.create_task(post(task, due))
    return times


def lines(result: Ingest) -> Iterator[str]:
    """Yield the lines of the table."""
    posts, delivered = len(result.times), result.delivered
    yield f"\ningest, {posts:,} POSTs at {RATE}/s, {delivered:,.0f} deliveries/s (ms)"
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    cells = "".join(f"{head:>7} {quantile(result.times, q):.2f}" for head, q in shares.items())
    yield f"{'POST':16}{cells}"


def marks(result: Ingest) -> list[Mark]:
    """Return the mark for deliveries, which must keep up. The time of a POST has no limit."""
    return [Mark("deliveries/s", result.delivered, least=0.98 * RATE)]
