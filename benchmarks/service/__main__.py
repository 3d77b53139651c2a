"""Measure the service, print the tables, and compare its figures with the limits (marks)."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from functools import cache

from benchmarks.service import backlog, ingest, job
from benchmarks.service.candidates import CANDIDATES
from benchmarks.service.processes import Failed
from benchmarks.service.report import Report

PARTS = ("job", "lag", "memory", "ingest")


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
    parser.add_argument("--quick", action="store_true", help="less of everything: to try it out")
    parser.add_argument("--n", type=parse_positive, help="tasks of the job (5,000)")
    parser.add_argument("--rounds", type=parse_positive, help="rounds of the job (5)")
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, metavar="NAME", help=", ".join(CANDIDATES)
    )
    return parser.parse_args()


def main() -> None:
    """Run the benchmarks that the command line selects."""
    args = parse_arguments()
    parts = PARTS if args.part == "all" else (args.part,)
    quick = args.quick
    seconds = 5.0 if quick else 30.0
    few, many = (1_000, 20_000) if quick else (backlog.FEW, backlog.MANY)
    run_backlog = cache(lambda pending: backlog.run(pending, seconds, print_progress))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    marks = []

    if "job" in parts:
        rows = job.race(
            args.only or list(CANDIDATES),
            count=args.n or (500 if quick else 5_000),
            rounds=args.rounds or (1 if quick else 5),
            progress=print_progress,
        )
        report = Report(rows)
        print("\n".join(report.lines()))
        marks += [mark for name in rows for mark in report.marks(name)]
    if "lag" in parts:
        new_marks = backlog.lag_marks(run_backlog(many))
        print("\n".join([*backlog.lag_lines(run_backlog(many)), *map(str, new_marks)]))
        marks += new_marks
    if "memory" in parts:
        new_marks = backlog.memory_marks(run_backlog(few), run_backlog(many))
        print(
            "\n".join(
                [*backlog.memory_lines(run_backlog(few), run_backlog(many)), *map(str, new_marks)]
            )
        )
        marks += new_marks
    if "ingest" in parts:
        result = ingest.run(seconds, print_progress)
        new_marks = ingest.marks(result)
        print("\n".join([*ingest.lines(result), *map(str, new_marks)]))
        marks += new_marks

    missed = sum(not mark.met for mark in marks)
    print(f"\n{len(marks) - missed} of {len(marks)} marks met")


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # exit through `finally` blocks, which end the started processes
    try:
        main()
    except Failed as failed:
        sys.exit(f"\n{failed}")
