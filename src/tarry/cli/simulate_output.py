"""Output of `tarry simulate`: progress, tables, JSON and failed assertions.

A study runs one scenario in several variants, and reports metrics. A table of its results has key
columns, which identify the row (variant and swept parameters), and metric columns. A defence is a
policy or hedging, with an optional breaker, budget and limiter.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tarry.cli.output import report_table, to_printable_line
from tarry.core.text import format_count
from tarry.policyfile.defence import Defence
from tarry.simulator.files import ARRIVAL_KINDS_BY_SETTING, scenario_parameters
from tarry.simulator.formatting import format_value
from tarry.simulator.metrics import METRICS
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.simulator.assertions import AssertionResult
    from tarry.simulator.scenario import Scenario
    from tarry.simulator.study import Study, StudyResults, StudyRow


_COLUMN_GAP = 3
"""Characters between two columns of a table."""
_MIN_KEY_WIDTH = 4
"""Minimum width of a key column in a narrow terminal, in characters; longer names are wrapped."""


def print_studies(*, as_json: bool) -> None:
    """Print the name and the question of each built-in study."""
    if as_json:
        print_sorted_json([_study_to_json(study) for study in STUDIES.values()])
        return
    table = _grid()
    table.add_column()
    for name, study in STUDIES.items():
        table.add_row(Text(name, style="bold"), Text(study.question))
    console = Console()
    console.print(table)
    console.print()
    console.print("Run one: tarry simulate NAME. List its parameters: tarry simulate NAME --show.")


def print_study(study: Study, *, as_json: bool) -> None:
    """Print the variants, parameters and metrics of a study, and the settings of its scenario."""
    if as_json:
        print_sorted_json(_study_to_json(study))
        return
    console = Console()
    _print_question(console, study)
    variants = ", ".join(to_printable_line(name) for name in study.variants)
    console.print(Text(f"values of {study.variant_parameter} (for --variants): {variants}"))
    console.print(Text("parameters (for --set and --sweep) with their current values:"))
    parameters: list[tuple[str, object, str]] = []
    for name, value in study.parameters.items():
        swept = ", ".join(map(str, study.sweep.get(name, ())))
        parameters.append((name, value, swept and f"swept: {swept}"))
    _print_rows(console, parameters)
    if study.build_scenario is not None:
        console.print(Text("other settings of the scenario:"))
        scenario = study.build_scenario(Defence(), **study.parameters)
        _print_rows(console, _scenario_settings(scenario))
    console.print(Text("metrics (for --assert) with their column titles in the table:"))
    # Metrics that a study defines have no description. If there are any, no column is described.
    has_standard_metrics = all(column.metric in METRICS for column in study.columns)
    columns: list[tuple[str, object, str]] = []
    for column in study.columns:
        description = METRICS[column.metric].description if has_standard_metrics else ""
        columns.append((column.metric, column.title, description))
    _print_rows(console, columns)


def print_results(
    results: StudyResults, assertion_results: Sequence[AssertionResult], *, as_json: bool
) -> None:
    """Print the metrics of each row; as JSON, also the results of the assertions."""
    if not as_json:
        _print_result_tables(Console(), results)
        return
    assertions = [
        {
            "assertion": result.assertion.text,
            "variant": result.row.variant,
            "parameters": result.row.parameters,
            "holds": result.holds,
        }
        for result in assertion_results
    ]
    print_sorted_json({**results.to_dict(), "assertions": assertions})


def print_sorted_json(value: object) -> None:
    """Print JSON with sorted keys, so that equal results are printed as equal bytes."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, default=str)
    sys.stdout.write(f"{text}\n")


def report_assertions(results: Sequence[AssertionResult], *, quiet: bool) -> bool:
    """Print each failed assertion, or "all assertions hold"; return whether none failed."""
    failed = [result for result in results if not result.holds]
    for result in failed:
        message = f"{result.assertion.text}, but {result.describe_value()}"
        sys.stderr.write(f"failed: {row_name(result.row)}: {to_printable_line(message)}\n")
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
        "trials": study.trial_count,
    }


class _Column(NamedTuple):
    title: str
    cells: list[str]

    @property
    def min_width(self) -> int:
        """Smallest width at which no cell is wrapped and no word of the title is split."""
        return max(len(word) for word in [*self.title.split(), *self.cells, ""])


def _print_result_tables(console: Console, results: StudyResults) -> None:
    """Print the study's question, a row per variant and sweep point, and the study's lesson.

    A sweep point is one combination of the swept values. The metric columns are split over several
    tables if the terminal is too narrow for a single table.
    """
    study = results.study
    _print_question(console, study)
    rows = results.rows
    variants = [to_printable_line(row.variant) for row in rows]
    key_columns = [_Column(study.variant_parameter, variants)]
    for name in rows[0].parameters if rows else ():
        cells = [to_printable_line(str(row.parameters[name])) for row in rows]
        key_columns.append(_Column(name.rpartition(".")[2], cells))
    metric_columns: list[_Column] = []
    for column in study.columns:
        cells = [format_value(row.metrics[column.metric], column.unit) for row in rows]
        metric_columns.append(_Column(column.title, cells))
    gaps_width = _COLUMN_GAP * len(key_columns)
    # Leave space for at least the widest metric column.
    max_metric_width = max((column.min_width for column in metric_columns), default=0)
    key_widths = _key_widths(key_columns, console.width - max_metric_width - gaps_width)
    metrics_width = console.width - sum(key_widths) - gaps_width
    for group in _group_by_width(metric_columns, metrics_width):
        widths = [*key_widths, *_metric_widths(group, metrics_width)]
        columns = [*key_columns, *group]
        console.print(_table(columns, widths, len(key_columns), _section_ends(rows)))
        console.print()
    trials = format_count(results.trial_count, "trial")
    console.print(Text(f"seed {results.seed}, {trials} for each row", style="dim"))
    if study.lesson:
        console.print()
        console.print(Text(to_printable_line(study.lesson)))


def _print_question(console: Console, study: Study) -> None:
    if study.question:
        console.print(Text(to_printable_line(study.question), style="bold"))
        console.print()


def _grid() -> Table:
    """Return a table without headings, whose first column is not wrapped."""
    table = Table(box=None, show_header=False, padding=(0, _COLUMN_GAP, 0, 0))
    table.add_column(overflow="fold", no_wrap=True)
    return table


def _print_rows(console: Console, rows: Iterable[tuple[str, object, str]]) -> None:
    """Print a row for each name, value and note."""
    table = _grid()
    for name, value, note in rows:
        text = "-" if value is None else to_printable_line(str(value))
        table.add_row(Text(to_printable_line(name)), Text(text), Text(note, style="dim"))
    console.print(Padding(table, (0, 0, 0, 2)))


def _scenario_settings(scenario: Scenario) -> Iterable[tuple[str, object, str]]:
    """Yield (name, value, "") for each setting that affects the scenario, except the defence."""
    hidden_prefixes = ["clients.defence."]
    for setting, arrival_kinds in ARRIVAL_KINDS_BY_SETTING.items():
        if scenario.clients.arrivals not in arrival_kinds:
            hidden_prefixes.append(f"clients.{setting}")
    for name, value in scenario_parameters(scenario).items():
        if value is not None and not name.startswith(tuple(hidden_prefixes)):
            yield name, value, ""
    for name, server in scenario.servers.items():
        if server.capacity is not None:
            yield f"servers.{name} capacity", f"{server.capacity:.3g} requests per second", ""


def row_name(row: StudyRow) -> str:
    """Return the variant and the swept values of a row, such as "full, clients=100"."""
    swept = [f"{name.rpartition('.')[2]}={value}" for name, value in row.parameters.items()]
    return to_printable_line(", ".join([row.variant, *swept]))


def _key_widths(key_columns: list[_Column], available_width: int) -> list[int]:
    """Return the width of each key column; the widest columns are narrowed until all fit."""
    widths = [column.min_width for column in key_columns]
    while sum(widths) > available_width and max(widths) > _MIN_KEY_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths


def _group_by_width(metric_columns: list[_Column], available_width: int) -> Iterable[list[_Column]]:
    """Split the metric columns into groups that each fit into the available width."""
    group: list[_Column] = []
    used_width = 0
    for column in metric_columns:
        if group and used_width + column.min_width > available_width:
            yield group
            group, used_width = [], 0
        group.append(column)
        used_width += column.min_width + _COLUMN_GAP
    yield group


def _metric_widths(group: list[_Column], available_width: int) -> list[int]:
    """Return the width of each metric column; titles with the most lines get the spare width."""
    widths = [column.min_width for column in group]
    for _ in range(available_width - sum(widths) - _COLUMN_GAP * (len(group) - 1)):
        line_counts = [
            len(wrap(column.title, width)) for column, width in zip(group, widths, strict=True)
        ]
        if max(line_counts) == 1:
            break
        widths[line_counts.index(max(line_counts))] += 1
    return widths


def _section_ends(rows: list[StudyRow]) -> list[bool]:
    """Return for each row whether a line is drawn below it, to separate two sweep points."""
    if len({row.variant for row in rows}) == 1:
        return [False] * len(rows)
    return [row.parameters != following.parameters for row, following in pairwise(rows)] + [False]


def _table(
    columns: list[_Column], widths: list[int], key_count: int, section_ends: list[bool]
) -> Table:
    """Return a table; its first `key_count` columns are key columns."""
    # All widths are explicit, because rich would narrow columns whose cells cannot be wrapped.
    table = report_table()
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(
            Text(column.title),
            justify="left" if index < key_count else "right",
            overflow="fold",
            vertical="bottom",
            width=width,
        )
    rows = zip(section_ends, *(column.cells for column in columns), strict=True)
    for is_section_end, *cells in rows:
        table.add_row(*map(Text, cells), end_section=is_section_end)
    return table
