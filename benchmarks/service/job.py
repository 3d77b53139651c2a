"""The job: many tasks of one POST each, of which one in five fails once, until all succeed.

In a run of a candidate, its processes start, do a small job to warm up, and idle for a moment. Then
the time is measured from the first enqueue to the last success at the target. Processor time is
that of the workers, the enqueuing process, and the broker or database, until shortly after the last
success. The gap of a task is the time from its failed attempt to the next attempt.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.service import tarry_server
from benchmarks.service.candidates import CANDIDATES, Candidate, install_node_peers, runs_on_node
from benchmarks.service.limits import quantile
from benchmarks.service.processes import (
    BenchmarkError,
    Enqueuer,
    ProcessGroup,
    cpu_seconds,
    free_port,
)
from benchmarks.service.servers import Server, postgres_server, redis_server
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE_S = 1.0
FINAL_WRITES_S = 0.2  # in which writes after the last success still count for the job
ORDER_SEED = 7
STEP_TIMEOUT_S = 120.0
"""Timeout of a step, long enough for the slowest candidate."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one candidate."""

    rate: float
    """Tasks per second."""
    cpu: float
    """Milliseconds of processor time per task, of all processes."""
    enqueuer_cpu: float
    """The part of `cpu` that the enqueuing process used."""
    server_cpu: float
    """The part of `cpu` that Redis or PostgreSQL used."""
    gap_p50: float
    """Milliseconds from a failed attempt to the next attempt; also the next value."""
    gap_p99: float
    duplicates: int


@dataclass(slots=True)
class Row:
    """The runs of a candidate, one per round; or the error that dropped it."""

    runs: list[Run] = field(default_factory=list)
    error: str = ""

    def median(self, figure: str) -> float:
        return median(getattr(run, figure) for run in self.runs)

    def ratio(self, other: Row, figure: str) -> float:
        """Return the median over the rounds of this row's figure divided by the other row's."""
        pairs = zip(self.runs, other.runs, strict=True)
        return median(getattr(run, figure) / getattr(other_run, figure) for run, other_run in pairs)


class Job:
    """Starts the servers and the target, and runs candidates one after another."""

    def __init__(
        self, stack: ExitStack, needed_servers: set[str], node_environ: dict[str, str]
    ) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tarry-bench-")))
        self._target: Target = stack.enter_context(running_target(folder))
        self._servers: dict[str, Server] = {}
        self._node_environ = node_environ
        for name, run_server in (("redis", redis_server), ("postgres", postgres_server)):
            if name in needed_servers:
                self._servers[name] = stack.enter_context(run_server())

    def run(self, candidate: Candidate, count: int) -> Run:
        """Run the job once with a candidate."""
        server = self._servers.get(candidate.server)
        if server is not None:
            server.reset()
        with tempfile.TemporaryDirectory(prefix="tarry-bench-") as home:
            folder = Path(home)
            environ = self._environ(candidate, folder)
            if server is not None:
                environ["TARRY_STORE"] = server.url
            with ProcessGroup(environ, folder) as group:
                return self._measure(candidate, count, group, server, environ["TARRY_PORT"])

    def _environ(self, candidate: Candidate, folder: Path) -> dict[str, str]:
        packages = {"PYTHONPATH": str(candidate.packages)} if candidate.packages else {}
        servers = {f"BENCH_{name.upper()}": server.url for name, server in self._servers.items()}
        return {
            **servers,
            **packages,
            **self._node_environ,
            **tarry_server.environ(folder, free_port()),
            "BENCH_TARGET": self._target.url,
            "BENCH_FOLDER": str(folder),
        }

    def _measure(
        self,
        candidate: Candidate,
        count: int,
        group: ProcessGroup,
        server: Server | None,
        port: str,
    ) -> Run:
        if candidate.set_up:
            group.run(candidate.set_up)
        pids = [group.start(command).pid for command in candidate.workers]
        server_pids = [] if server is None else [server.pid]
        if candidate.processes > 1:
            tarry_server.wait_until_ready(port, group.check, candidate.processes)
        enqueuer = Enqueuer(group, candidate.enqueuer, STEP_TIMEOUT_S)
        self._target.reset()
        enqueuer.enqueue(candidate.warm_up_tasks)
        self._wait_until_done(candidate.warm_up_tasks, group)
        time.sleep(IDLE_S)
        self._target.reset()

        cpu_before, server_before = _sum_cpu(pids), _sum_cpu(server_pids)
        started, enqueuer_cpu = enqueuer.enqueue(count)
        self._wait_until_done(count, group)
        time.sleep(FINAL_WRITES_S)
        server_cpu = _sum_cpu(server_pids) - server_before
        cpu = _sum_cpu(pids) - cpu_before + server_cpu + enqueuer_cpu
        stats = self._target.stats()
        gaps = [task.gap_ms for task in self._target.log().values() if task.gap_ms is not None]
        if stats["bad"]:
            raise BenchmarkError(f"{stats['bad']} requests to the target were invalid")
        return Run(
            rate=count / (stats["last_done"] - started),
            cpu=1e3 * cpu / count,
            enqueuer_cpu=1e3 * enqueuer_cpu / count,
            server_cpu=1e3 * server_cpu / count,
            gap_p50=quantile(gaps, 0.5),
            gap_p99=quantile(gaps, 0.99),
            duplicates=int(stats["duplicates"]),
        )

    def _wait_until_done(self, count: int, group: ProcessGroup) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while (done := self._target.stats()["done"]) < count:
            group.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"{done} of {count} tasks done; end of the log:\n{group.log_tail()}"
                )
            time.sleep(0.02)


def _sum_cpu(pids: list[int]) -> float:
    return sum(map(cpu_seconds, pids))


def measure_candidates(
    names: list[str], *, count: int, rounds: int, progress: Callable[[str], None]
) -> dict[str, Row]:
    """Run all candidates in turns, in a new random order each round.

    A candidate that fails is dropped, and its row has the error.
    """
    rows = {name: Row() for name in names}
    rng = random.Random(ORDER_SEED)
    node_environ: dict[str, str] = {}
    if any(map(runs_on_node, names)):
        progress("job: installing peers on Node")
        try:
            node_environ = install_node_peers()
        except BenchmarkError as error:
            rows |= {name: Row(error=str(error)) for name in names if runs_on_node(name)}
    with ExitStack() as stack:
        progress("job: starting servers")
        needed_servers = {CANDIDATES[name].server for name in names if not rows[name].error}
        job = Job(stack, needed_servers, node_environ)
        for number in range(1, rounds + 1):
            for name in rng.sample(names, len(names)):
                if rows[name].error:
                    continue
                progress(f"job: round {number} of {rounds}, {name}")
                try:
                    rows[name].runs.append(job.run(CANDIDATES[name], count))
                except Exception as error:
                    rows[name] = Row(error=f"{type(error).__name__}: {error}")
    return rows
