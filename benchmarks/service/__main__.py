"""Measure the service, print the tables, and hold its figures against the marks."""

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


def progress(text: str) -> None:
    """Overwrite one line on a terminal; write lines to a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Read a number of things."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service", description="The service beside its peers."
    )
    parser.add_argument("part", nargs="?", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="less of everything: to try it out")
    parser.add_argument("--n", type=positive, help="tasks of the job (5,000)")
    parser.add_argument("--rounds", type=positive, help="rounds of the job (5)")
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, metavar="NAME", help=", ".join(CANDIDATES)
    )
    return parser.parse_args()


def main() -> None:
    """Do what the command line asks for."""
    args = parsed()
    parts = PARTS if args.part == "all" else (args.part,)
    quick = args.quick
    seconds = 5.0 if quick else 30.0
    few, many = (1_000, 20_000) if quick else (backlog.FEW, backlog.MANY)
    held = cache(lambda pending: backlog.run(pending, seconds, progress))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    marks = []

    if "job" in parts:
        rows = job.race(
            args.only or list(CANDIDATES),
            count=args.n or (500 if quick else 5_000),
            rounds=args.rounds or (1 if quick else 5),
            progress=progress,
        )
        report = Report(rows)
        print("\n".join(report.lines()))
        marks += [mark for name in rows for mark in report.marks(name)]
    if "lag" in parts:
        judged = backlog.lag_marks(held(many))
        print("\n".join([*backlog.lag_lines(held(many)), *map(str, judged)]))
        marks += judged
    if "memory" in parts:
        judged = backlog.memory_marks(held(few), held(many))
        print("\n".join([*backlog.memory_lines(held(few), held(many)), *map(str, judged)]))
        marks += judged
    if "ingest" in parts:
        result = ingest.run(seconds, progress)
        judged = ingest.marks(result)
        print("\n".join([*ingest.lines(result), *map(str, judged)]))
        marks += judged

    missed = sum(not mark.met for mark in marks)
    print(f"\n{len(marks) - missed} of {len(marks)} marks met")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all it started ends too
    try:
        main()
    except Failed as failed:
        sys.exit(f"\n{failed}")
