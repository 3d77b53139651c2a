"""Findings and studies as tables in the terminal."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tarry.cli.words import plain
from tarry.simulator.report.numbers import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import Console

    from tarry.simulator.study import Findings, Row, Study

_GAP = 3
"""Columns of the terminal between two columns of the table."""


class _Column(NamedTuple):
    title: str
    cells: list[str]

    @property
    def width(self) -> int:
        """What it needs: its title may be wrapped, its cells may not."""
        return max(len(word) for word in [*self.title.split(), *self.cells, ""])


def show_findings(console: Console, findings: Findings) -> None:
    """Print the question, a row for each variant and point, and the lesson."""
    study = findings.study
    if study.question:
        console.print(Text(plain(study.question), style="bold"))
        console.print()
    rows = findings.rows
    swept = list(rows[0].parameters) if rows else []
    keys = [_Column(study.knob, [plain(row.variant) for row in rows])]
    keys += [
        _Column(_last(name), [plain(str(row.parameters[name])) for row in rows]) for name in swept
    ]
    metrics = [row.metrics for row in rows]
    numbers = [
        _Column(column.title, [shown(one[column.metric], column.unit) for one in metrics])
        for column in study.columns
    ]
    for group in _fitting(keys, numbers, console.width):
        console.print(_table(keys, group, _ends(rows)))
        console.print()
    trials = "1 trial" if findings.trials == 1 else f"{findings.trials} trials"
    console.print(Text(f"seed {findings.seed}, {trials} for each row", style="dim"))
    if study.lesson:
        console.print()
        console.print(Text(plain(study.lesson)))


def show_studies(console: Console, studies: Mapping[str, Study]) -> None:
    """Print the name and the question of each."""
    table = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, study in studies.items():
        table.add_row(Text(name, style="bold"), Text(study.question))
    console.print(table)


def show_study(console: Console, study: Study) -> None:
    """Print what can be chosen and changed."""
    if study.question:
        console.print(Text(plain(study.question), style="bold"))
        console.print()
    variants = ", ".join(plain(name) for name in study.variants)
    console.print(Text(f"--variants ({study.knob}): {variants}"))
    console.print(Text("--set and --sweep, with the values in force:"))
    table = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0))
    table.add_column(overflow="fold", no_wrap=True)
    for name, value in study.parameters.items():
        swept = study.sweep.get(name)
        table.add_row(
            Text(plain(name)),
            Text("-" if value is None else plain(str(value))),
            Text(f"swept: {', '.join(map(str, swept))}" if swept else "", style="dim"),
        )
    console.print(Padding(table, (0, 0, 0, 2)))


def row_name(row: Row) -> str:
    """Return the variant and the swept values of a row: full, clients=100."""
    swept = [f"{_last(name)}={value}" for name, value in row.parameters.items()]
    return plain(", ".join([row.variant, *swept]))


def _fitting(keys: list[_Column], numbers: list[_Column], width: int) -> Iterable[list[_Column]]:
    """Share out the numbers on as many tables as the terminal needs to show them whole."""
    fixed = sum(key.width + _GAP for key in keys)
    group: list[_Column] = []
    used = fixed
    for column in numbers:
        if group and used + column.width > width:
            yield group
            group, used = [], fixed
        group.append(column)
        used += column.width + _GAP
    yield group


def _ends(rows: list[Row]) -> list[bool]:
    """Tell after which rows the next point of a sweep begins, where a point has several rows."""
    if len({row.variant for row in rows}) == 1:
        return [False] * len(rows)
    return [row.parameters != after.parameters for row, after in pairwise(rows)] + [False]


def _table(keys: list[_Column], numbers: list[_Column], ends: list[bool]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for column in keys:
        table.add_column(Text(column.title), vertical="bottom", no_wrap=True)
    for column in numbers:
        table.add_column(Text(column.title), justify="right", min_width=column.width)
    columns = [*keys, *numbers]
    for end, *cells in zip(ends, *(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell, no_wrap=True) for cell in cells), end_section=end)
    return table


def _last(name: str) -> str:
    return name.rpartition(".")[2]
