"""Lag of a tenant with a healthy target, alone and while the targets of another tenant fail.

The first tenant has tasks that fall due at a steady rate, for a target that responds at once. When
the service starts, the other tenant has overdue tasks for

* hanging: many hosts that accept connections and never respond;
* dead: one host that refuses connections;
* poison: one host that responds with 503 to all requests.

The lag of an attempt is its start minus its `nextAttemptAt`, both from the attempt log, and the
median over windows of five seconds is compared with the limits, as in `backlog`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.service import backlog, tarry_server
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.processes import free_port
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.service.model import Task

ATTEMPTS_PER_SECOND = 200
OTHER_TENANT = "other"
HANGING_HOSTS, TASKS_PER_HANGING_HOST = 1_000, 4
DEAD_TASKS = 200_000
POISON_TASKS = 10_000
MAX_P99_MS = 50.0
MAX_RATIO = 1.5
MIN_COMPARED_MS = 5.0
"""If the lag alone is shorter, the ratio is relative to this value: a ratio of shorter lags would
show the scheduler of the operating system."""
_WINDOW_ATTEMPTS = 5 * ATTEMPTS_PER_SECOND
_HOSTS_PER_NETWORK = 250


@dataclass(frozen=True, slots=True)
class NeighboursResult:
    """Results of a run."""

    neighbour: str
    """How the targets of the other tenant fail, or "alone"."""
    lags_ms: list[float]
    """Lags of the tenant with the healthy target."""
    steal_share: float
    """Share of processor time that the host gave to other machines meanwhile."""

    @property
    def p99_ms(self) -> float:
        return median(backlog.quantiles_by_window(self.lags_ms, _WINDOW_ATTEMPTS, 0.99))


def run_all(seconds: float, progress: backlog.Progress, *, quick: bool) -> list[NeighboursResult]:
    """Run the first tenant alone, and with each kind of failing targets of the other tenant."""
    divisor = 10 if quick else 1
    counts = {
        "alone": 0,
        "hanging": HANGING_HOSTS * TASKS_PER_HANGING_HOST // divisor,
        "dead": DEAD_TASKS // divisor,
        "poison": POISON_TASKS // divisor,
    }
    return [_run(neighbour, count, seconds, progress) for neighbour, count in counts.items()]


def _run(
    neighbour: str, other_count: int, seconds: float, progress: backlog.Progress
) -> NeighboursResult:
    with (
        backlog.temporary_folder() as folder,
        running_target(folder) as target,
        _silent_port() as silent_port,
    ):
        url = tarry_server.store_url(folder)
        if other_count:
            tasks = _other_tasks(neighbour, other_count, target, silent_port)
            asyncio.run(backlog.fill_store(url, tasks, other_count, progress))
        count = int(ATTEMPTS_PER_SECOND * seconds)
        stream = backlog.add_stream(url, target, count, ATTEMPTS_PER_SECOND, progress)
        progress(f"neighbours, {neighbour}: {count:,} attempts at {ATTEMPTS_PER_SECOND}/s")
        service = backlog.serve_stream(folder, url, target, stream)
        lags = asyncio.run(backlog.read_lags(url, stream))
        return NeighboursResult(neighbour, lags, service.steal_share)


def _other_tasks(neighbour: str, count: int, target: Target, silent_port: int) -> Iterator[Task]:
    """Yield overdue tasks of the other tenant."""
    now = int(time.time() * 1000)
    dead_port = free_port()
    for i in range(count):
        if neighbour == "hanging":
            host = i // TASKS_PER_HANGING_HOST
            name = f"127.1.{host // _HOSTS_PER_NETWORK}.{host % _HOSTS_PER_NETWORK + 1}"
            url = f"http://{name}:{silent_port}/"
        elif neighbour == "dead":
            url = f"http://127.0.0.1:{dead_port}/"
        else:
            url = f"{target.url}/busy"
        yield backlog.build_task(url, now, OTHER_TENANT)


@contextmanager
def _silent_port() -> Iterator[int]:
    """Listen on a port of all loopback addresses, but never accept a connection.

    The kernel establishes the connections of clients, which then wait for a response. Once its
    queue of connections is full, clients wait for the connection itself.
    """
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))  # noqa: S104 - all addresses of 127.0.0.0/8
        listener.listen(4096)
        yield listener.getsockname()[1]


def table_lines(results: list[NeighboursResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    attempts = len(results[0].lags_ms)
    yield f"\nneighbours, lag of {attempts:,} attempts at {ATTEMPTS_PER_SECOND}/s (ms)"
    for result in results:
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        cells = "".join(
            f"{head:>7} {quantile(result.lags_ms, share):.2f}" for head, share in shares.items()
        )
        yield f"{result.neighbour:16}{cells}   p99 of windows {result.p99_ms:g}"
    steal_share = max(result.steal_share for result in results)
    yield f"the host gave up to {steal_share:.1%} of processor time to other machines"


def check_limits(results: list[NeighboursResult]) -> list[LimitCheck]:
    """Return the checks of the lag in each run with another tenant, and of its ratio to alone."""
    alone, *others = results
    base_ms = max(alone.p99_ms, MIN_COMPARED_MS)
    checks = []
    for result in others:
        name, p99_ms = result.neighbour, result.p99_ms
        checks += [
            LimitCheck(f"lag p99 ms, {name}", p99_ms, maximum=MAX_P99_MS),
            LimitCheck(f"x lag p99, {name}", p99_ms / base_ms, maximum=MAX_RATIO),
        ]
    return checks
