"""What `tarry simulate` prints and writes."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tarry.cli.output import printable
from tarry.policyfile.defence import Defence
from tarry.simulator.files.parameters import list_parameters
from tarry.simulator.files.studies import ARRIVALS_BY_KEY
from tarry.simulator.metrics import METRICS
from tarry.simulator.report.formatting import format_value
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from tarry.simulator.assertions import AssertionResult
    from tarry.simulator.scenario import Scenario
    from tarry.simulator.study import Study, StudyResults, StudyRow


class Bar:
    """A progress bar on the error stream, when a person looks at it and there is time to."""

    def __init__(self, *, hidden: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=hidden or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task("simulating", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """Show how many runs are done, of how many."""
        self._progress.update(self._task, completed=done, total=total)


def list_studies(*, as_json: bool) -> None:
    """Print the built-in scenarios."""
    if as_json:
        print_json([_described(study) for study in STUDIES.values()])
        return
    console = Console()
    show_studies(console, STUDIES)
    console.print()
    console.print("tarry simulate NAME runs one, tarry simulate NAME --show says what it takes.")


def describe(study: Study, *, as_json: bool) -> None:
    """Print the variants and parameters of a study."""
    if as_json:
        print_json(_described(study))
    else:
        show_study(Console(), study)


def print_findings(
    findings: StudyResults, results: Sequence[AssertionResult], *, as_json: bool
) -> None:
    """Print the numbers; JSON has the claims too."""
    if not as_json:
        show_findings(Console(), findings)
        return
    claims = [
        {
            "claim": result.assertion.text,
            "variant": result.row.variant,
            "parameters": result.row.parameters,
            "holds": result.holds,
        }
        for result in results
    ]
    print_json({**findings.to_dict(), "claims": claims})


def tell_written(paths: Iterable[Path]) -> None:
    """Say which files were written, where no program reads it."""
    for path in paths:
        sys.stderr.write(f"written to {printable(str(path))}\n")


def print_json(value: object) -> None:
    """Print JSON that is the same bytes for the same values."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, default=str)
    sys.stdout.write(f"{text}\n")


def judge(results: Sequence[AssertionResult], *, quiet: bool) -> bool:
    """Say which rows fail which claim; return whether all is well."""
    failed = [result for result in results if not result.holds]
    for result in failed:
        about = f"{result.assertion.text}, but {result.describe_value()}"
        sys.stderr.write(f"failed: {row_name(result.row)}: {printable(about)}\n")
    if results and not failed and not quiet:
        sys.stdout.write("every claim holds\n")
    return not failed


def _described(study: Study) -> dict[str, Any]:
    return {
        "name": study.name,
        "question": study.question,
        "variants": study.variants,
        "parameters": dict(study.parameters),
        "sweep": dict(study.sweep),
        "columns": [column._asdict() for column in study.columns],
        "trials": study.trials,
    }


_GAP = 3
"""Columns of the terminal between two columns of the table."""
_LEAST = 4
"""What a column of names keeps in a narrow terminal; it goes on below."""


class _Column(NamedTuple):
    title: str
    cells: list[str]

    @property
    def width(self) -> int:
        """What it needs: its title may be wrapped, its cells may not."""
        return max(len(word) for word in [*self.title.split(), *self.cells, ""])


def show_findings(console: Console, findings: StudyResults) -> None:
    """Print the question, a row for each variant and point, and the lesson."""
    study = findings.study
    if study.question:
        console.print(Text(printable(study.question), style="bold"))
        console.print()
    rows = findings.rows
    swept = list(rows[0].parameters) if rows else []
    keys = [_Column(study.variant_parameter, [printable(row.variant) for row in rows])]
    keys += [
        _Column(_last(name), [printable(str(row.parameters[name])) for row in rows])
        for name in swept
    ]
    metrics = [row.metrics for row in rows]
    numbers = [
        _Column(column.title, [format_value(one[column.metric], column.unit) for one in metrics])
        for column in study.columns
    ]
    widest = max((number.width for number in numbers), default=0)
    kept = _squeezed(keys, console.width - widest - _GAP * len(keys))
    room = console.width - sum(kept) - _GAP * len(keys)
    for group in _fitting(numbers, room):
        widths = [*kept, *_spread(group, room)]
        console.print(_table([*keys, *group], widths, len(keys), _ends(rows)))
        console.print()
    trials = "1 trial" if findings.trials == 1 else f"{findings.trials} trials"
    console.print(Text(f"seed {findings.seed}, {trials} for each row", style="dim"))
    if study.lesson:
        console.print()
        console.print(Text(printable(study.lesson)))


def show_studies(console: Console, studies: Mapping[str, Study]) -> None:
    """Print the name and the question of each."""
    table = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, study in studies.items():
        table.add_row(Text(name, style="bold"), Text(study.question))
    console.print(table)


def show_study(console: Console, study: Study) -> None:
    """Print what can be chosen, changed and claimed, and the world where it is not all of that."""
    if study.question:
        console.print(Text(printable(study.question), style="bold"))
        console.print()
    variants = ", ".join(printable(name) for name in study.variants)
    console.print(Text(f"--variants ({study.variant_parameter}): {variants}"))
    console.print(Text("--set and --sweep, with the values in force:"))
    _listed(
        console,
        (
            (name, _said(value), f"swept: {', '.join(map(str, swept))}" if swept else "")
            for name, value in study.parameters.items()
            for swept in [study.sweep.get(name)]
        ),
    )
    if study.build_scenario is not None:
        console.print(Text("what it runs:"))
        scenario = study.build_scenario(Defence(), **study.parameters)
        _listed(console, ((name, _said(value), "") for name, value in _facts(scenario)))
    console.print(Text("--assert, and the columns of the table:"))
    # A study with a number of its own does not mean the same by the others either.
    usual = all(column.metric in METRICS for column in study.columns)
    _listed(
        console,
        (
            (one.metric, one.title, METRICS[one.metric].description if usual else "")
            for one in study.columns
        ),
    )


def _listed(console: Console, rows: Iterable[tuple[str, str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0))
    table.add_column(overflow="fold", no_wrap=True)
    for name, value, note in rows:
        table.add_row(Text(printable(name)), Text(printable(value)), Text(note, style="dim"))
    console.print(Padding(table, (0, 0, 0, 2)))


def _facts(scenario: Scenario) -> Iterable[tuple[str, object]]:
    """Name what makes the world of a study; its defence is what the variants are about."""
    arrivals = scenario.clients.arrivals
    idle = tuple(f"clients.{key}" for key, fits in ARRIVALS_BY_KEY.items() if arrivals not in fits)
    for name, value in list_parameters(scenario).items():
        if value is not None and not name.startswith(("clients.defence.", *idle)):
            yield name, value
    for name, server in scenario.servers.items():
        if server.capacity is not None:
            yield f"servers.{name} can answer", f"{server.capacity:.3g} a second"


def _said(value: object) -> str:
    return "-" if value is None else str(value)


def row_name(row: StudyRow) -> str:
    """Return the variant and the swept values of a row: full, clients=100."""
    swept = [f"{_last(name)}={value}" for name, value in row.parameters.items()]
    return printable(", ".join([row.variant, *swept]))


def _squeezed(keys: list[_Column], room: int) -> list[int]:
    """Return the width of each column of names, so that one number has a place beside them."""
    widths = [key.width for key in keys]
    while sum(widths) > room and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _fitting(numbers: list[_Column], room: int) -> Iterable[list[_Column]]:
    """Share out the numbers on as many tables as the terminal needs to show them whole."""
    group: list[_Column] = []
    used = 0
    for column in numbers:
        if group and used + column.width > room:
            yield group
            group, used = [], 0
        group.append(column)
        used += column.width + _GAP
    yield group


def _spread(group: list[_Column], room: int) -> list[int]:
    """Return the width of each number: room that is left makes the highest titles lower."""
    widths = [column.width for column in group]
    for _ in range(room - sum(widths) - _GAP * (len(group) - 1)):
        lines = [len(wrap(one.title, width)) for one, width in zip(group, widths, strict=True)]
        if max(lines) == 1:
            break
        widths[lines.index(max(lines))] += 1
    return widths


def _ends(rows: list[StudyRow]) -> list[bool]:
    """Tell after which rows the next point of a sweep begins, where a point has several rows."""
    if len({row.variant for row in rows}) == 1:
        return [False] * len(rows)
    return [row.parameters != after.parameters for row, after in pairwise(rows)] + [False]


def _table(columns: list[_Column], widths: list[int], keys: int, ends: list[bool]) -> Table:
    # Each width is given: left to itself, the table takes from columns that cannot spare any.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(
            Text(column.title),
            justify="left" if place < keys else "right",
            overflow="fold",
            vertical="bottom",
            width=width,
        )
    for end, *cells in zip(ends, *(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells), end_section=end)
    return table


def _last(name: str) -> str:
    return name.rpartition(".")[2]
