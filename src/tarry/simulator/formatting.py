"""Format the results of a study as text, for the terminal, the HTML report and its charts.

Times are stored in seconds, and shares as numbers from 0 to 1. The unit, such as "ms" or "%",
selects how a value is shown.
"""

from __future__ import annotations

from math import floor, isfinite, isinf, isnan, log10
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.simulator.study import StudyResults

UNIT_SUFFIXES = {"": "", "s": " s", "ms": " ms", "%": " %", "x": "x"}
_DISPLAY_FACTORS = {"": 1.0, "s": 1.0, "ms": 1000.0, "%": 100.0, "x": 1.0}
_TIME_UNITS = ("s", "ms")
_SIGNIFICANT_DIGITS = 3
_SMALLEST_SHOWN = 0.001
_MAX_DESCRIBED_VALUES = 24


def format_value(value: float, unit: str = "") -> str:
    """Return a value with its unit: "0.25 s". nan becomes "-", and an infinite time "never"."""
    if isnan(value):
        return "-"
    if isinf(value):
        return "never" if unit in _TIME_UNITS else ("-∞" if value < 0 else "∞")
    return _format_number(value, unit) + UNIT_SUFFIXES[unit]


def scale_value(value: float, unit: str) -> float:
    """Convert a stored value to the unit: 0.25 becomes 250 for "ms" and 25 for "%"."""
    return value * _DISPLAY_FACTORS[unit]


def format_parameter(value: object) -> str:
    """Return the value of a parameter as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def format_swept_parameters(parameters: dict[str, Any]) -> str:
    """Return swept parameters (run with several values) as text: "clients = 100, rate = 5"."""
    return ", ".join(
        f"{name.rpartition('.')[2]} = {format_parameter(value)}"
        for name, value in parameters.items()
    )


def is_numeric(values: Iterable[object]) -> bool:
    """Return whether all values are finite numbers, which fit on a numeric axis."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        for value in values
    )


def join_sentences(*sentences: str) -> str:
    """Capitalise and join the sentences that are not empty."""
    return " ".join(f"{each[0].upper()}{each[1:]}" for each in sentences if each)


def describe_average(results: StudyResults, *metrics: str) -> str:
    """Return a sentence on how these metrics are averaged, or "" if there is only one trial."""
    if results.trial_count == 1:
        return ""
    all_metrics = (trial.metrics() for row in results.rows for trial in row.trials)
    has_infinite = any(isinf(values.get(name, 0.0)) for values in all_metrics for name in metrics)
    median_note = ", or medians where a trial has an infinite value" if has_infinite else ""
    return f"Values are means of {results.trial_count} trials{median_note}."


def describe_values(title: str, values: Sequence[tuple[str, str]]) -> str:
    """Return the first values of a chart as text for screen readers; `values` has (name, text)."""
    first_values = "; ".join(f"{name}: {text}" for name, text in values[:_MAX_DESCRIBED_VALUES])
    omission = "; the table has all values" if len(values) > _MAX_DESCRIBED_VALUES else ""
    return f"{title}. {first_values}{omission}."


def _format_number(value: float, unit: str) -> str:
    """Return a number with three significant digits, but all digits before the decimal point."""
    number = scale_value(value, unit)
    if number == 0:
        return "0"
    if abs(number) < _SMALLEST_SHOWN:
        return f"{'>-' if number < 0 else '<'}{_SMALLEST_SHOWN}"
    decimals = max(0, _SIGNIFICANT_DIGITS - 1 - floor(log10(abs(number))))
    text = f"{number:,.{decimals}f}"
    if decimals:
        text = text.rstrip("0").rstrip(".")
    if unit == "%" and value < 1 and text == "100":
        return ">99.9"  # one failure in ten thousand calls must not look like none
    return text
