"""Rate and memory of the service with many target hosts.

The store is filled before the service starts. All tasks are due, and go to the hosts in turn. The
hosts are addresses of the loopback network, at which the same target listens. Each host has a lane
and a connection pool. With more hosts than connections, nearly every attempt opens a connection.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.service import tarry_server
from benchmarks.service.backlog import Progress, build_task, fill_store, resident_bytes
from benchmarks.service.limits import LimitCheck
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST_COUNTS = (1, 1_000, 5_000, 20_000, 50_000)
TASKS = 100_000
MAX_SECONDS = 300.0
_FIRST_ADDRESS = int(IPv4Address("127.1.0.0"))


@dataclass(frozen=True, slots=True)
class HostsResult:
    """Results of a run."""

    hosts: int
    tasks_per_second: float
    """The rate after the first tenth of the tasks."""
    resident_mib: float
    """Maximum resident memory of the service."""


def run(hosts: int, tasks: int, progress: Progress) -> HostsResult:
    """Fill a store, and run the service on it until all tasks are done."""
    with (
        tempfile.TemporaryDirectory(prefix="tarry-bench-") as home,
        running_target(Path(home)) as target,
    ):
        folder, port, due_ms = Path(home), free_port(), int(time.time() * 1000)
        urls = (f"{_host_url(target, i % hosts)}/ok/{i}" for i in range(tasks))
        new_tasks = (build_task(url, due_ms) for url in urls)
        asyncio.run(fill_store(tarry_server.store_url(folder), new_tasks, tasks, progress))
        progress(f"{hosts:,} hosts: {tasks:,} tasks")
        with ProcessGroup(tarry_server.environ(folder, port), folder) as group:
            return _measure(
                group, psutil.Process(tarry_server.start(group, port)), target, hosts, tasks
            )


def _host_url(target: Target, host: int) -> str:
    return target.url.replace("127.0.0.1", str(IPv4Address(_FIRST_ADDRESS + host)))


def _measure(
    group: ProcessGroup, process: psutil.Process, target: Target, hosts: int, tasks: int
) -> HostsResult:
    first: dict[str, float] | None = None
    max_resident_bytes, deadline = 0, time.monotonic() + MAX_SECONDS
    while (stats := target.stats())["done"] < tasks:
        group.check()
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{stats['done']} of {tasks} done: {group.log_tail()}")
        if first is None and stats["done"] >= tasks / 10:
            first = stats
        max_resident_bytes = max(max_resident_bytes, resident_bytes(process))
        time.sleep(0.1)
    if first is None:
        raise BenchmarkError("all tasks were done before the measurement began")
    rate = (stats["done"] - first["done"]) / (stats["last_done"] - first["last_done"])
    return HostsResult(hosts, rate, max_resident_bytes / 2**20)


def table_lines(results: Sequence[HostsResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "\nhosts, tasks/s and resident memory (MiB)"
    for result in results:
        yield f"{result.hosts:>7,} hosts {result.tasks_per_second:9,.0f} {result.resident_mib:9.1f}"


def check_limits(few: HostsResult, many: HostsResult) -> list[LimitCheck]:
    """Return the checks that rate and memory change little with the number of hosts."""
    return [
        LimitCheck("x rate", many.tasks_per_second / few.tasks_per_second, minimum=1 / 1.5),
        LimitCheck("x memory", many.resident_mib / few.resident_mib, maximum=1.5),
    ]
