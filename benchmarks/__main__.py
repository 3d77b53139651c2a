"""Measure, print the tables, and compare tarry's figures with their upper limits.

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

from benchmarks.measure import CASES, Row, measure_case, measure_imports

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLES = (*CASES, "imports")


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A figure of tarry and its upper limit; a limit without a figure is missed."""

    table: str
    row: str
    unit: str
    """The unit of the figure, or the quantity that it counts."""
    figure: float | None
    limit: float

    @property
    def met(self) -> bool:
        """Whether the figure is known and within the limit."""
        return self.figure is not None and self.figure <= self.limit

    def __str__(self) -> str:
        """Return the text for the last column of a table."""
        figure = "?" if self.figure is None else f"{self.figure:.2f}"
        return f"{'pass' if self.met else 'MISS'}: {self.unit} {figure} <= {self.limit:g}"


def check_limits(table: str, rows: dict[str, Row]) -> Iterator[LimitCheck]:
    """Yield the limit checks of one table."""

    def ratio(name: str, prefix: str = "") -> float | None:
        tarry, other = rows[prefix + "tarry"], rows[prefix + name]
        return tarry.ratio(other) if tarry.rounds and other.rounds else None

    def best(row: str, unit: float = 1.0) -> float | None:
        return min(rows[row].rounds) / unit if rows[row].rounds else None

    if table == "imports":
        for row in ("import tarry", "import tarry; tarry.retry"):
            yield LimitCheck(table, row, "ms", best(row), 35.0)
        import_row = rows["import tarry"]
        loads_asyncio = import_row.loads_asyncio if import_row.rounds else None
        yield LimitCheck(table, "import tarry", "asyncio", loads_asyncio, 0)
        first = "first call of "
        yield LimitCheck(table, f"{first}tarry", "x tenacity", ratio("tenacity", first), 1.0)
    elif table.endswith("failure"):
        yield LimitCheck(table, "tarry", "x loop", ratio("loop"), 3.0)
    else:
        yield LimitCheck(table, "tarry", "x loop", ratio("loop"), 1.6)
        yield LimitCheck(table, "tarry", "x nopanic", ratio("nopanic"), 1.0)
    if table == "sync-success":
        row = "tarry budget+breaker"
        yield LimitCheck(table, row, "us", best(row, 1e3), 1.0)


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
    table: str, values: dict[str, dict[str, object]], checks: list[LimitCheck]
) -> Iterator[str]:
    """Yield the lines of one table."""
    titles = max(values.values(), key=len)  # a row with an error has only one cell
    yield f"\n{table:27}" + "".join(f"{title:>14}" for title in titles) + "  limits"
    for name, row in values.items():
        cells = "".join(f"{format_cell(cell):>14}" for cell in row.values())
        row_checks = [str(check) for check in checks if (check.table, check.row) == (table, name)]
        yield f"{name:27}{cells}  {'; '.join(row_checks)}".rstrip()


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
    parser.add_argument(
        "--only", action="append", choices=TABLES, help="measure only this table (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a limit is missed")
    parser.add_argument(
        "--seed", type=int, default=7, help="seed of the random order of the candidates"
    )
    args = parser.parse_args()

    rounds, target_ns, runs = (80, 800_000, 5) if args.quick else (400, 1_500_000, 20)
    tables: dict[str, dict[str, dict[str, object]]] = {}
    checks: list[LimitCheck] = []
    for table in args.only or TABLES:
        if table == "imports":
            rows = measure_imports(runs=runs, seed=args.seed, progress=print_progress)
        else:
            rows = measure_case(
                table, rounds=rounds, target_ns=target_ns, seed=args.seed, progress=print_progress
            )
        tables[table] = table_values(table, rows)
        checks += check_limits(table, rows)
    if sys.stderr.isatty():
        print_progress("")

    missed = sum(not check.met for check in checks)
    if args.json:
        limits = [asdict(check) | {"met": check.met} for check in checks]
        about = {"python": platform.python_version(), "rounds": rounds, "import rounds": runs}
        print(json.dumps(about | {"tables": tables, "limits": limits}, indent=2))
    else:
        print(f"Python {platform.python_version()}, {rounds} rounds, {runs} of each import")
        for table, values in tables.items():
            print("\n".join(table_lines(table, values, checks)))
        print(f"\n{len(checks) - missed} of {len(checks)} limits met")
    return 1 if args.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
