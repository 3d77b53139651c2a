"""Lag of many tenants before and while another tenant has a large number of due tasks.

All tenants have the same number of lanes (queues of one downstream). The tasks of all tenants but
the last fall due at a steady rate. In the middle of the run, all tasks of the last tenant fall due.
Their targets respond at once, so that the service is busy until the end.

The lag of an attempt is its start minus its `nextAttemptAt`, both from the attempt log. The p99 of
windows of five seconds is computed, and the medians of the windows before and after the middle are
compared.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from ipaddress import IPv4Address
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.service import backlog, tarry_server
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from benchmarks.service.scale import running_store
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tarry.service.model import Task

TENANTS, LANES_PER_TENANT = 20, 50
ATTEMPTS_PER_SECOND = 200
PHASE_S = 20.0
"""Seconds before the flood, and of the flood."""
FLOOD_TASKS_PER_SECOND = 9_000
"""Tasks of the flood for each second of its duration: more than the service can deliver."""
MAX_RATIO = 1.5
MIN_COMPARED_MS = 5.0
"""If the lag before the flood is shorter, the ratio is relative to this value: a ratio of shorter
lags would show the scheduler of the operating system."""
FILL_RATE = 2_500
"""Tasks per second that all engines can add on a slow machine; the run begins after this time."""
END_S = 3.0
"""How long the service runs after the last task of the stream is due."""
_WINDOW_ATTEMPTS = 5 * ATTEMPTS_PER_SECOND
_FIRST_ADDRESS = int(IPv4Address("127.1.0.0"))


@dataclass(frozen=True, slots=True)
class FairnessResult:
    """Results of a run."""

    engine: str
    lags_ms: list[float]
    """Lags before the flood."""
    flood_lags_ms: list[float]
    """Lags during the flood."""
    flood_per_s: float
    """Attempts per second of the flooding tenant."""
    steal_share: float
    """Share of processor time that the host gave to other machines meanwhile."""

    @property
    def ratio(self) -> float:
        return p99_ms(self.flood_lags_ms) / max(p99_ms(self.lags_ms), MIN_COMPARED_MS)


def p99_ms(lags_ms: list[float]) -> float:
    """Return the median over the windows of their p99."""
    return median(backlog.quantiles_by_window(lags_ms, _WINDOW_ATTEMPTS, 0.99))


def run(engine: str, seconds: float, progress: backlog.Progress) -> FairnessResult:
    """Fill a store, and run the service on it for `seconds` before and during the flood."""
    with (
        backlog.temporary_folder() as home,
        backlog.temporary_folder() as store_folder,
        running_target(home) as target,
        running_store(engine, store_folder) as (url, _),
    ):
        count = int(ATTEMPTS_PER_SECOND * 2 * seconds)
        flood_count = int(FLOOD_TASKS_PER_SECOND * seconds)
        fill_s = (flood_count + count) / FILL_RATE
        start = time.time() + fill_s + backlog.START_LEAD_S
        flood_at = start + seconds
        flood = _flood_tasks(target, range(count, count + flood_count), int(flood_at * 1000))
        asyncio.run(backlog.fill_store(url, flood, flood_count, progress))
        stream = list(_stream_tasks(target, count, int(start * 1000)))
        asyncio.run(backlog.fill_store(url, iter(stream), count, progress))
        _sleep_until(start - backlog.START_LEAD_S)
        progress(f"fairness, {engine}: {count:,} attempts at {ATTEMPTS_PER_SECOND}/s")
        flood_per_s, steal_share = _serve(home, url, target, start, seconds)
        lags = asyncio.run(backlog.read_lags(url, stream))
        if len(lags) != count:
            raise BenchmarkError(f"{len(lags)} instead of {count} attempts were made in time")
        return FairnessResult(
            engine, lags[: count // 2], lags[count // 2 :], flood_per_s, steal_share
        )


def _stream_tasks(target: Target, count: int, start_ms: int) -> Iterator[Task]:
    """Yield tasks of all tenants but the last, in turn, for their lanes in turn."""
    for i in range(count):
        lane, tenant = divmod(i, TENANTS - 1)
        due_ms = start_ms + 1000 * i // ATTEMPTS_PER_SECOND
        yield _build_task(target, i, tenant, lane % LANES_PER_TENANT, due_ms)


def _flood_tasks(target: Target, numbers: range, due_ms: int) -> Iterator[Task]:
    for i in numbers:
        yield _build_task(target, i, TENANTS - 1, i % LANES_PER_TENANT, due_ms)


def _build_task(target: Target, number: int, tenant: int, lane: int, due_ms: int) -> Task:
    address = IPv4Address(_FIRST_ADDRESS + 256 * tenant + lane + 1)
    url = f"{target.url.replace('127.0.0.1', str(address))}/ok/{number}"
    return backlog.build_task(url, due_ms, f"tenant-{tenant}")


def _serve(
    folder: Path, url: str, target: Target, start: float, seconds: float
) -> tuple[float, float]:
    """Run the service; return the attempts per second of the flood, and the steal time."""
    port, flood_at, end = free_port(), start + seconds, start + 2 * seconds
    with ProcessGroup(tarry_server.environ(folder, port, url), folder) as group:
        process = psutil.Process(tarry_server.start(group, port))
        if time.time() > start:
            raise BenchmarkError("the service was not ready in time; try again")
        psutil.cpu_times_percent()  # starts the interval that the call below measures
        _sleep_until(flood_at)
        before = target.stats()["done"]
        _sleep_until(end)
        steal_share = psutil.cpu_times_percent().steal / 100
        flooded = target.stats()["done"] - before - ATTEMPTS_PER_SECOND * seconds
        group.check()
        if flooded > 0.95 * FLOOD_TASKS_PER_SECOND * seconds:
            raise BenchmarkError("the flood ended too early: increase FLOOD_TASKS_PER_SECOND")
        time.sleep(END_S)
        process.terminate()  # at shutdown, the service stores the results of finished attempts
        process.wait()
    return flooded / seconds, steal_share


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.time()))


def table_lines(results: list[FairnessResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    attempts = sum(len(result.lags_ms) for result in results)
    yield f"\nfairness, lag of {attempts:,} attempts at {ATTEMPTS_PER_SECOND}/s (ms)"
    for result in results:
        for name, lags in (("before", result.lags_ms), ("flood", result.flood_lags_ms)):
            shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
            cells = "".join(f"{head:>7} {quantile(lags, q):.2f}" for head, q in shares.items())
            yield f"{result.engine:10}{name:8}{cells}   p99 of windows {p99_ms(lags):g}"
        yield f"{result.engine:10}flood of {result.flood_per_s:,.0f} attempts per second"
    steal_share = max(result.steal_share for result in results)
    yield f"the host gave up to {steal_share:.1%} of processor time to other machines"


def check_limits(results: list[FairnessResult]) -> list[LimitCheck]:
    return [
        LimitCheck(f"{result.engine}: x lag p99", result.ratio, maximum=MAX_RATIO)
        for result in results
    ]
