"""Assertions about the results of a study, such as "no-retries: peak_load <= 2", for use in CI.

A study runs a scenario in several variants. `no-retries` is the name of a variant, `peak_load` a
metric and 2 the bound. Each row of the results belongs to one variant.
"""

from __future__ import annotations

import re
from math import isclose, isfinite, isinf, isnan
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, NamedTuple

from tarry.errors import ConfigurationError
from tarry.simulator.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tarry.simulator.study import Column, StudyResults, StudyRow

_ASSERTION_PATTERN = re.compile(
    r"""\s*(?:(?P<variant>.*\S)\s*:\s*)?
        (?P<metric>\w+)\s*
        (?P<operator><=|>=|==|<|>)\s*
        (?P<bound>[+-]?(?:inf|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+))\s*
        (?P<unit>ms|s|%|x|)\s*""",
    re.VERBOSE,
)
_STORED_VALUE_PER_UNIT = {"": 1.0, "x": 1.0, "s": 1.0, "ms": 0.001, "%": 0.01}
"""By unit, the factor that converts a number to the stored value, in seconds or as a share."""
_TIME_UNITS = ("s", "ms")
_BOUND_UNITS = {"": ("",), "x": ("", "x", "%"), "%": ("", "%"), "s": _TIME_UNITS, "ms": _TIME_UNITS}
"""The units in which a bound may be written, by the unit of the metric."""
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
    "==": isclose,  # a mean over trials has rounding errors
}
_MISSING_VALUE_CAUSES = {
    **dict.fromkeys(("success_rate", "amplification", "attempts_per_call"), "no call was started"),
    "peak_load": "the last server has no capacity limit",
    **dict.fromkeys(("recovered", "recovered_after"), "there is no disruption to recover from"),
    **dict.fromkeys(("p50", "p99", "p999"), "no call succeeded"),
}
"""By metric, why it has no value. The last server is the one at the end of the chain of calls."""


class Assertion(NamedTuple):
    """A condition on a metric in the rows of `variant`, or in all rows if `variant` is None."""

    text: str
    variant: str | None
    metric: str
    operator: str
    bound: float
    """In seconds or as a share."""
    unit: str = ""
    """The unit in which the bound was written, used to show the value of the metric."""


class AssertionResult(NamedTuple):
    """Whether a row meets an assertion, and the value of the metric."""

    assertion: Assertion
    row: StudyRow
    value: float
    holds: bool
    missing_count: int
    """The number of trials in which the metric has no value."""

    def describe_value(self) -> str:
        """Return the value of the metric as text, or why it has none."""
        metric, trial_count = self.assertion.metric, len(self.row.trials)
        if not self.missing_count:
            unit = self.assertion.unit if isfinite(self.value) else ""
            return f"{metric} is {self.value / _STORED_VALUE_PER_UNIT[unit]:.6g}{unit}"
        where = f" in {self.missing_count} of {trial_count} trials" if trial_count > 1 else ""
        cause = f": {_MISSING_VALUE_CAUSES[metric]}" if metric in _MISSING_VALUE_CAUSES else ""
        return f"{metric} has no value{where}{cause}"


def metric_units(columns: Iterable[Column]) -> dict[str, str]:
    """Return the unit of each built-in metric, and of each other metric that has a column."""
    column_units = {column.metric: column.unit for column in columns}
    return column_units | {name: metric.unit for name, metric in METRICS.items()}


def parse_assertion(text: str, variants: Iterable[str], units: Mapping[str, str]) -> Assertion:
    """Parse an assertion. Raise for an unknown variant, or a unit that the metric does not have."""
    match = _ASSERTION_PATTERN.fullmatch(text)
    if match is None:
        msg = (
            f'cannot parse the assertion {text!r}; write "amplification < 1.2" or '
            f'"full: p99 <= 250ms", with one of {", ".join(_OPERATORS)}'
        )
        raise ConfigurationError(msg)
    variant, unit, known_variants = match["variant"], match["unit"], list(variants)
    if variant is not None and variant not in known_variants:
        msg = f"variant {variant!r} is not run; the variants are {', '.join(known_variants)}"
        raise ConfigurationError(f"assertion {text!r}: {msg}")
    bound = float(match["bound"]) * _STORED_VALUE_PER_UNIT[unit]
    metric_unit = units.get(match["metric"])
    if metric_unit in _TIME_UNITS and not unit and (bound == 0 or isinf(bound)):
        unit = "s"  # 0 and inf are the same in all units
    if metric_unit is not None:
        _check_unit(text, match, metric_unit, bound, unit)
    return Assertion(text, variant, match["metric"], match["operator"], bound, unit)


def check_assertions(results: StudyResults, texts: Sequence[str]) -> list[AssertionResult]:
    """Parse the assertions, and check each of them against the rows that it applies to."""
    columns = results.study.columns
    units = metric_units(columns)
    assertions = [parse_assertion(text, results.variants, units) for text in texts]
    rows = [(row, row.metrics) for row in results.rows]
    return [
        _check_row(assertion, row, metrics, columns)
        for assertion in assertions
        for row, metrics in rows
        if assertion.variant in {None, row.variant}
    ]


def _check_unit(text: str, match: re.Match[str], metric_unit: str, bound: float, unit: str) -> None:
    metric, number = match["metric"], match["bound"]
    if metric_unit in _TIME_UNITS and not unit:
        msg = f"assertion {text!r}: {metric} is a time; write {number}ms or {number}s"
    elif metric_unit == "%" and not unit and bound > 1:
        msg = f"assertion {text!r}: {metric} is a share; write {number}%"
    elif unit not in _BOUND_UNITS[metric_unit]:
        choices = " or ".join(f"{number}{each}" for each in _BOUND_UNITS[metric_unit])
        msg = f"assertion {text!r}: {metric} is not measured in {unit!r}; write {choices}"
    else:
        return
    raise ConfigurationError(msg)


def _check_row(
    assertion: Assertion, row: StudyRow, metrics: dict[str, float], columns: Iterable[Column]
) -> AssertionResult:
    if assertion.metric not in metrics:
        titles = {name: f" ({title})" for name, title, _ in columns if title != name}
        known_metrics = ", ".join(f"{name}{titles.get(name, '')}" for name in metrics)
        msg = f"unknown metric {assertion.metric!r}; there are {known_metrics}"
        raise ConfigurationError(f"assertion {assertion.text!r}: {msg}")
    value = metrics[assertion.metric]
    # The mean ignores trials without a value, but a missing value may be a sign of failure. So an
    # assertion holds only if all trials have a value.
    missing_count = sum(isnan(trial.metrics()[assertion.metric]) for trial in row.trials)
    holds = not missing_count and _OPERATORS[assertion.operator](value, assertion.bound)
    return AssertionResult(assertion, row, value, holds, missing_count)
