"""Measure, print the tables, and compare tarry's figures with their upper limits (marks).

A ratio is the median over the rounds. A wall-clock time is that of the best round, because other
load on the machine can only make a time longer.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.measure import SCENES, Row, measure_imports, measure_scene

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLES = (*SCENES, "imports")


@dataclass(frozen=True, slots=True)
class Mark:
    """A figure of tarry and its upper limit; a mark without a figure is missed."""

    table: str
    row: str
    what: str
    """The unit of the figure, or what it counts."""
    figure: float | None
    limit: float

    @property
    def met(self) -> bool:
        """Whether the figure is known and within the limit."""
        return self.figure is not None and self.figure <= self.limit

    def __str__(self) -> str:
        """Return the text for the last column of a table."""
        figure = "?" if self.figure is None else f"{self.figure:.2f}"
        return f"{'pass' if self.met else 'MISS'}: {self.what} {figure} <= {self.limit:g}"


def marks_of(table: str, rows: dict[str, Row]) -> Iterator[Mark]:
    """Yield the marks of one table."""

    def ratio(other: str) -> float | None:
        ours, theirs = rows["tarry"], rows[other]
        return ours.ratio(theirs) if ours.rounds and theirs.rounds else None

    def best(row: str, unit: float = 1.0) -> float | None:
        return min(rows[row].rounds) / unit if rows[row].rounds else None

    if table == "imports":
        for row in ("import tarry", "import tarry; tarry.retry"):
            yield Mark(table, row, "ms", best(row), 35.0)
        row_of_import = rows["import tarry"]
        loads_asyncio = row_of_import.loads_asyncio if row_of_import.rounds else None
        yield Mark(table, "import tarry", "asyncio", loads_asyncio, 0)
    elif table.endswith("failure"):
        yield Mark(table, "tarry", "x loop", ratio("loop"), 3.0)
    else:
        yield Mark(table, "tarry", "x loop", ratio("loop"), 1.6)
        yield Mark(table, "tarry", "x nopanic", ratio("nopanic"), 1.0)
    if table == "sync-success":
        row = "tarry budget+breaker"
        yield Mark(table, row, "us", best(row, 1e3), 1.0)


def table_values(table: str, rows: dict[str, Row]) -> dict[str, dict[str, object]]:
    """Return the cells of one table, by row and column title."""

    def values(row: Row) -> dict[str, object]:
        if row.error:
            return {"error": row.error}
        unit = "ms" if table == "imports" else "ns"
        cells: dict[str, object] = {
            f"best {unit}": round(min(row.rounds), 1),
            f"median {unit}": round(median(row.rounds), 1),
        }
        if table == "imports":
            return cells | {"loads asyncio": row.loads_asyncio}
        return cells | {"x loop": round(row.ratio(rows["loop"]), 2)}

    return {name: values(row) for name, row in rows.items()}


def format_cell(cell: object) -> str:
    """Return a cell as text; numbers from 100 on have no decimals."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:,.{0 if cell >= 100 else 2}f}" if isinstance(cell, float) else str(cell)


def table_lines(
    table: str, values: dict[str, dict[str, object]], marks: list[Mark]
) -> Iterator[str]:
    """Yield the lines of one table."""
    heads = max(values.values(), key=len)  # a row with an error has only one cell
    yield f"\n{table:27}" + "".join(f"{head:>14}" for head in heads) + "  marks"
    for name, row in values.items():
        cells = "".join(f"{format_cell(cell):>14}" for cell in row.values())
        row_marks = [str(mark) for mark in marks if (mark.table, mark.row) == (table, name)]
        yield f"{name:27}{cells}  {'; '.join(row_marks)}".rstrip()


def print_progress(text: str) -> None:
    """Overwrite the line on a terminal; without a terminal, print one line per table."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif "round 0" in text:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the benchmarks that the command line selects."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the cost of a call."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 15 s")
    parser.add_argument("--only", action="append", choices=TABLES, help="this table (repeatable)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a mark is missed")
    parser.add_argument("--seed", type=int, default=7, help="seed of the candidates' order")
    args = parser.parse_args()

    rounds, target_ns, runs = (80, 800_000, 5) if args.quick else (400, 1_500_000, 20)
    tables: dict[str, dict[str, dict[str, object]]] = {}
    marks: list[Mark] = []
    for table in args.only or TABLES:
        if table == "imports":
            rows = measure_imports(runs=runs, seed=args.seed, progress=print_progress)
        else:
            rows = measure_scene(
                table, rounds=rounds, target_ns=target_ns, seed=args.seed, progress=print_progress
            )
        tables[table] = table_values(table, rows)
        marks += marks_of(table, rows)
    if sys.stderr.isatty():
        print_progress("")

    missed = sum(not mark.met for mark in marks)
    if args.json:
        mark_values = [asdict(mark) | {"met": mark.met} for mark in marks]
        about = {"python": platform.python_version(), "rounds": rounds, "import rounds": runs}
        print(json.dumps(about | {"tables": tables, "marks": mark_values}, indent=2))
    else:
        print(f"Python {platform.python_version()}, {rounds} rounds, {runs} of each import")
        for table, values in tables.items():
            print("\n".join(table_lines(table, values, marks)))
        print(f"\n{len(marks) - missed} of {len(marks)} marks met")
    return 1 if args.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
