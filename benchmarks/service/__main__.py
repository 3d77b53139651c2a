"""Measure the service, print the tables, and compare its figures with their limits."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.service import (
    backlog,
    churn,
    dashboard,
    events,
    fairness,
    hosts,
    ingest,
    job,
    neighbours,
    recovery,
    scale,
    workers,
)
from benchmarks.service.candidates import CANDIDATES
from benchmarks.service.processes import BenchmarkError
from benchmarks.service.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.service.limits import LimitCheck

PARTS = (
    *("job", "lag", "memory", "ingest", "events", "hosts", "neighbours", "recovery"),
    *("scale", "workers", "fairness", "churn", "dashboard"),
)


def print_progress(text: str) -> None:
    """Overwrite the line on a terminal; without a terminal, print a line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def parse_positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service", description="Compare the service with its peers."
    )
    parser.add_argument("part", nargs="?", choices=(*PARTS, "all"), default="all")
    parser.add_argument(
        "--quick", action="store_true", help="fewer tasks, rounds and seconds, for a trial run"
    )
    parser.add_argument(
        "--n", type=parse_positive, help="number of tasks of the job (5,000), workers or churn"
    )
    parser.add_argument(
        "--rounds", type=parse_positive,
        help="number of rounds of the job (5) or workers (3), or loads of each dashboard page (5)",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, metavar="NAME", help=", ".join(CANDIDATES)
    )
    parser.add_argument(
        "--engines", nargs="+", choices=scale.ENGINES, default=scale.ENGINES, metavar="NAME",
        help=f"stores of the parts scale, workers and fairness: {', '.join(scale.ENGINES)}",
    )  # fmt: skip
    parser.add_argument(
        "--pending", nargs="+", type=parse_positive, metavar="N",
        help="tasks in the backlogs of the part scale (10,000 and 1,000,000), or in the store of "
        "the part dashboard (1,000,000)",
    )  # fmt: skip
    parser.add_argument("--lanes", type=parse_positive, help="lanes of the part dashboard (10,000)")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="folder in which the part scale keeps its stores, for another run",
    )  # fmt: skip
    parser.add_argument(
        "--fill-only", action="store_true", help="part scale: fill the stores in --data"
    )
    parser.add_argument(
        "--processes", nargs="+", type=parse_positive, default=workers.PROCESS_COUNTS, metavar="N",
        help="numbers of processes of the part workers (1 2 4)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.fill_only and args.data is None:
        parser.error("--fill-only needs --data")
    return args


def print_part(lines: Iterable[str], checks: list[LimitCheck]) -> list[LimitCheck]:
    """Print the table and the checks of a part; return the checks."""
    print("\n".join([*lines, *map(str, checks)]))
    return checks


def measure_ingest(seconds: float, *, quick: bool) -> list[LimitCheck]:
    """Run the part ingest; return its checks."""
    result = ingest.run(seconds, print_progress)
    checks = print_part(ingest.table_lines(result), ingest.check_limits(result))
    for processes in ingest.PROCESS_COUNTS:
        times_ms, rate = ingest.run_processes(processes, seconds, print_progress)
        lines = ingest.processes_lines(processes, times_ms, rate)
        checks += print_part(lines, ingest.check_processes(processes, times_ms))
    overdue = 20_000 if quick else ingest.OVERDUE_TASKS
    for name, single_tasks in (
        ("during batches", ingest.run_bulk(seconds, print_progress)),
        ("overdue backlog", ingest.run_overdue(overdue, seconds, print_progress)),
    ):
        lines = ingest.single_tasks_lines(name, single_tasks)
        checks += print_part(lines, ingest.check_single_tasks(name, single_tasks))
    return checks


def measure_stores(args: argparse.Namespace, parts: Sequence[str]) -> list[LimitCheck]:
    """Run the parts that compare stores; return their checks."""
    checks = []
    if "scale" in parts:
        counts = args.pending or ((1_000, 20_000) if args.quick else scale.PENDING_COUNTS)
        if args.fill_only:
            for engine, pending in product(args.engines, counts):
                scale.fill(engine, pending, args.data, print_progress)
        else:
            results = [
                result
                for engine in args.engines
                for result in scale.run(engine, counts, args.data, print_progress)
            ]
            checks += print_part(scale.table_lines(results), scale.check_limits(results))
    if "workers" in parts:
        rows = workers.run(
            args.engines,
            args.processes,
            tasks=args.n or (500 if args.quick else workers.TASKS),
            rounds=args.rounds or (1 if args.quick else workers.ROUNDS),
            progress=print_progress,
        )
        checks += print_part(workers.table_lines(rows), workers.check_limits(rows))
    if "fairness" in parts:
        phase_s = 5.0 if args.quick else fairness.PHASE_S
        results = [fairness.run(engine, phase_s, print_progress) for engine in args.engines]
        checks += print_part(fairness.table_lines(results), fairness.check_limits(results))
    if "churn" in parts:
        windows = churn.run(args.n or (100_000 if args.quick else churn.TASKS), print_progress)
        checks += print_part(churn.table_lines(windows), churn.check_limits(windows))
    return checks


def measure_dashboard(args: argparse.Namespace) -> list[LimitCheck]:
    """Run the part dashboard; return its checks."""
    lanes = args.lanes or (100 if args.quick else dashboard.LANES)
    rounds = args.rounds or (1 if args.quick else dashboard.ROUNDS)
    results = [
        result
        for tasks in args.pending or [10_000 if args.quick else dashboard.TASKS]
        for result in dashboard.run(tasks, lanes, rounds, print_progress)
    ]
    return print_part(dashboard.table_lines(results, lanes), dashboard.check_limits(results))


def main() -> None:
    """Run the benchmarks that the command line selects."""
    args = parse_arguments()
    parts = PARTS if args.part == "all" else (args.part,)
    quick = args.quick
    seconds = 5.0 if quick else 30.0
    small, large = (1_000, 20_000) if quick else (backlog.SMALL_BACKLOG, backlog.LARGE_BACKLOG)
    run_backlog = cache(lambda pending: backlog.run(pending, seconds, print_progress))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    checks = []

    if "job" in parts:
        rows = job.measure_candidates(
            args.only or list(CANDIDATES),
            count=args.n or (500 if quick else 5_000),
            rounds=args.rounds or (1 if quick else 5),
            progress=print_progress,
        )
        report = Report(rows)
        print("\n".join(report.table_lines()))
        checks += [check for name in rows for check in report.check_limits(name)]
    if "lag" in parts:
        result = run_backlog(large)
        checks += print_part(backlog.lag_lines(result), backlog.check_lag(result))
    if "memory" in parts:
        results = run_backlog(small), run_backlog(large)
        checks += print_part(backlog.memory_lines(*results), backlog.check_memory(*results))
    if "ingest" in parts:
        checks += measure_ingest(seconds, quick=quick)
    if "events" in parts:
        result = events.run(seconds, print_progress)
        checks += print_part(events.table_lines(result), events.check_limits(result))

    if "hosts" in parts:
        counts, tasks = ((1, 100, 1_000), 5_000) if quick else (hosts.HOST_COUNTS, hosts.TASKS)
        results = [hosts.run(count, tasks, print_progress) for count in counts]
        limit_checks = hosts.check_limits(results[1], results[-1])
        checks += print_part(hosts.table_lines(results), limit_checks)
    if "neighbours" in parts:
        neighbour_results = neighbours.run_all(seconds, print_progress, quick=quick)
        lines = neighbours.table_lines(neighbour_results)
        checks += print_part(lines, neighbours.check_limits(neighbour_results))
        posts = neighbours.run_posts(seconds, print_progress)
        checks += print_part(neighbours.posts_lines(posts), neighbours.check_posts(posts))
    if "recovery" in parts:
        scenarios = recovery.QUICK_SCENARIOS if quick else recovery.SCENARIOS
        down_s = 5.0 if quick else recovery.DOWN_S
        recoveries = [recovery.run(scenario, down_s, print_progress) for scenario in scenarios]
        lines = recovery.table_lines(recoveries)
        checks += print_part(lines, recovery.check_limits(recoveries))

    checks += measure_stores(args, parts)
    if "dashboard" in parts:
        checks += measure_dashboard(args)
    missed = sum(not check.met for check in checks)
    print(f"\n{len(checks) - missed} of {len(checks)} limits met")


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # exit through `finally` blocks, which end the started processes
    try:
        main()
    except BenchmarkError as error:
        sys.exit(f"\n{error}")
