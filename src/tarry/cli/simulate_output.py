"""Output of `tarry simulate`: progress, tables, JSON and failed assertions."""

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


class ProgressBar:
    """A progress bar on standard error; hidden when that is not a terminal."""

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
        """Set the number of finished runs, and of all runs."""
        self._progress.update(self._task, completed=done, total=total)


def print_studies(*, as_json: bool) -> None:
    """Print the built-in scenarios."""
    if as_json:
        print_json([_study_to_json(study) for study in STUDIES.values()])
        return
    console = Console()
    _show_studies(console, STUDIES)
    console.print()
    console.print("To run one: tarry simulate NAME. Its parameters: tarry simulate NAME --show.")


def print_study(study: Study, *, as_json: bool) -> None:
    """Print the variants and parameters of a study."""
    if as_json:
        print_json(_study_to_json(study))
    else:
        _show_study(Console(), study)


def print_results(
    results: StudyResults, assertions: Sequence[AssertionResult], *, as_json: bool
) -> None:
    """Print the metrics of each row; JSON includes the results of the assertions."""
    if not as_json:
        _show_results(Console(), results)
        return
    checked = [
        {
            "assertion": assertion.assertion.text,
            "variant": assertion.row.variant,
            "parameters": assertion.row.parameters,
            "holds": assertion.holds,
        }
        for assertion in assertions
    ]
    print_json({**results.to_dict(), "assertions": checked})


def print_written_files(paths: Iterable[Path]) -> None:
    """Print the names of written files to standard error: standard output may be parsed."""
    for path in paths:
        sys.stderr.write(f"written to {printable(str(path))}\n")


def print_json(value: object) -> None:
    """Print JSON with sorted keys: equal values give equal bytes."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, default=str)
    sys.stdout.write(f"{text}\n")


def report_failures(results: Sequence[AssertionResult], *, quiet: bool) -> bool:
    """Print the rows that fail an assertion; return whether there are none."""
    failed = [result for result in results if not result.holds]
    for result in failed:
        message = f"{result.assertion.text}, but {result.describe_value()}"
        sys.stderr.write(f"failed: {row_name(result.row)}: {printable(message)}\n")
    if results and not failed and not quiet:
        sys.stdout.write("all assertions hold\n")
    return not failed


def _study_to_json(study: Study) -> dict[str, Any]:
    return {
        "name": study.name,
        "question": study.question,
        "variants": study.variants,
        "parameters": dict(study.parameters),
        "sweep": dict(study.sweep),
        "columns": [column._asdict() for column in study.columns],
        "trials": study.trials,
    }


_COLUMN_GAP = 3
"""Characters between two columns of a table."""
_MIN_KEY_WIDTH = 4
"""Width of a key column in a narrow terminal; longer names are wrapped."""


class _Column(NamedTuple):
    title: str
    cells: list[str]

    @property
    def width(self) -> int:
        """Minimum width: the title may be wrapped between words, cells may not."""
        return max(len(word) for word in [*self.title.split(), *self.cells, ""])


def _show_results(console: Console, results: StudyResults) -> None:
    """Print the question, one row per variant and sweep point, and the lesson.

    The number columns are split over several tables when the terminal is too narrow for one.
    """
    study = results.study
    if study.question:
        console.print(Text(printable(study.question), style="bold"))
        console.print()
    rows = results.rows
    swept = list(rows[0].parameters) if rows else []
    keys = [_Column(study.variant_parameter, [printable(row.variant) for row in rows])]
    keys += [
        _Column(_last_part(name), [printable(str(row.parameters[name])) for row in rows])
        for name in swept
    ]
    metrics = [row.metrics for row in rows]
    numbers = [
        _Column(
            column.title, [format_value(values[column.metric], column.unit) for values in metrics]
        )
        for column in study.columns
    ]
    widest = max((number.width for number in numbers), default=0)
    key_widths = _key_widths(keys, console.width - widest - _COLUMN_GAP * len(keys))
    width_left = console.width - sum(key_widths) - _COLUMN_GAP * len(keys)
    for group in _group_by_width(numbers, width_left):
        widths = [*key_widths, *_number_widths(group, width_left)]
        console.print(_table([*keys, *group], widths, len(keys), _section_ends(rows)))
        console.print()
    trials = "1 trial" if results.trials == 1 else f"{results.trials} trials"
    console.print(Text(f"seed {results.seed}, {trials} for each row", style="dim"))
    if study.lesson:
        console.print()
        console.print(Text(printable(study.lesson)))


def _show_studies(console: Console, studies: Mapping[str, Study]) -> None:
    """Print the name and the question of each study."""
    table = Table(box=None, show_header=False, padding=(0, _COLUMN_GAP, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, study in studies.items():
        table.add_row(Text(name, style="bold"), Text(study.question))
    console.print(table)


def _show_study(console: Console, study: Study) -> None:
    """Print the variants, parameters and metrics of a study, and the settings of its scenario."""
    if study.question:
        console.print(Text(printable(study.question), style="bold"))
        console.print()
    variants = ", ".join(printable(name) for name in study.variants)
    console.print(Text(f"--variants ({study.variant_parameter}): {variants}"))
    console.print(Text("--set and --sweep, with the current values:"))
    _print_rows(
        console,
        (
            (name, _format_setting(value), f"swept: {', '.join(map(str, swept))}" if swept else "")
            for name, value in study.parameters.items()
            for swept in [study.sweep.get(name)]
        ),
    )
    if study.build_scenario is not None:
        console.print(Text("other settings of the scenario:"))
        scenario = study.build_scenario(Defence(), **study.parameters)
        _print_rows(
            console,
            ((name, _format_setting(value), "") for name, value in _scenario_settings(scenario)),
        )
    console.print(Text("--assert, and the columns of the table:"))
    # A study with its own metrics gives the standard metrics another meaning, too.
    has_standard_metrics = all(column.metric in METRICS for column in study.columns)
    _print_rows(
        console,
        (
            (
                column.metric,
                column.title,
                METRICS[column.metric].description if has_standard_metrics else "",
            )
            for column in study.columns
        ),
    )


def _print_rows(console: Console, rows: Iterable[tuple[str, str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, _COLUMN_GAP, 0, 0))
    table.add_column(overflow="fold", no_wrap=True)
    for name, value, note in rows:
        table.add_row(Text(printable(name)), Text(printable(value)), Text(note, style="dim"))
    console.print(Padding(table, (0, 0, 0, 2)))


def _scenario_settings(scenario: Scenario) -> Iterable[tuple[str, object]]:
    """Yield the settings of a scenario, except its policy: the variants set that."""
    arrivals = scenario.clients.arrivals
    unused = tuple(
        f"clients.{key}" for key, fits in ARRIVALS_BY_KEY.items() if arrivals not in fits
    )
    for name, value in list_parameters(scenario).items():
        if value is not None and not name.startswith(("clients.defence.", *unused)):
            yield name, value
    for name, server in scenario.servers.items():
        if server.capacity is not None:
            yield f"servers.{name} capacity", f"{server.capacity:.3g} requests per second"


def _format_setting(value: object) -> str:
    return "-" if value is None else str(value)


def row_name(row: StudyRow) -> str:
    """Return the variant and the swept values of a row: full, clients=100."""
    swept = [f"{_last_part(name)}={value}" for name, value in row.parameters.items()]
    return printable(", ".join([row.variant, *swept]))


def _key_widths(keys: list[_Column], width_left: int) -> list[int]:
    """Return the width of each key column; the widest are narrowed until all fit."""
    widths = [key.width for key in keys]
    while sum(widths) > width_left and max(widths) > _MIN_KEY_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths


def _group_by_width(numbers: list[_Column], width_left: int) -> Iterable[list[_Column]]:
    """Split the number columns into groups; each group fits into one table."""
    group: list[_Column] = []
    used = 0
    for column in numbers:
        if group and used + column.width > width_left:
            yield group
            group, used = [], 0
        group.append(column)
        used += column.width + _COLUMN_GAP
    yield group


def _number_widths(group: list[_Column], width_left: int) -> list[int]:
    """Return the width of each number column; spare width goes to the most wrapped titles."""
    widths = [column.width for column in group]
    for _ in range(width_left - sum(widths) - _COLUMN_GAP * (len(group) - 1)):
        lines = [
            len(wrap(column.title, width)) for column, width in zip(group, widths, strict=True)
        ]
        if max(lines) == 1:
            break
        widths[lines.index(max(lines))] += 1
    return widths


def _section_ends(rows: list[StudyRow]) -> list[bool]:
    """Return for each row whether a line follows it: after the last row of a sweep point."""
    if len({row.variant for row in rows}) == 1:
        return [False] * len(rows)
    return [row.parameters != after.parameters for row, after in pairwise(rows)] + [False]


def _table(columns: list[_Column], widths: list[int], key_count: int, ends: list[bool]) -> Table:
    # All widths are explicit, because rich would narrow columns whose cells cannot be wrapped.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(
            Text(column.title),
            justify="left" if index < key_count else "right",
            overflow="fold",
            vertical="bottom",
            width=width,
        )
    for end, *cells in zip(ends, *(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells), end_section=end)
    return table


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
