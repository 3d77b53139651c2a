"""How a number of a study is shown: the same in the terminal, in the page and in the charts.

Values are in their own measure, seconds and shares; the unit says how they are written.
"""

from __future__ import annotations

from math import ceil, floor, inf, isfinite, isinf, isnan, log10
from typing import TYPE_CHECKING, Any

from tarry.simulator.metrics import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.simulator.study import Findings, Row

_FACTORS = {"": 1.0, "s": 1.0, "ms": 1000.0, "%": 100.0, "x": 1.0}
SUFFIXES = {"": "", "s": " s", "ms": " ms", "%": " %", "x": "x"}
_TIMES = ("s", "ms")
NOTHING = "-"
_DIGITS = 3
_SMALLEST = 0.001


def shown(value: float, unit: str = "") -> str:
    """Return it for people: 12,345, 0.25 s, 250 ms, 99.2 %, 4.1x; infinite seconds are never."""
    if isnan(value):
        return NOTHING
    if isinf(value):
        return "never" if unit in _TIMES else ("-∞" if value < 0 else "∞")
    return _plain(value, unit) + SUFFIXES[unit]


def scaled(value: float, unit: str) -> float:
    """Return the number that is written before the unit, as an axis needs it."""
    return value * _FACTORS[unit]


def _plain(value: float, unit: str) -> str:
    number = scaled(value, unit)
    if 0 < abs(number) < _SMALLEST:
        return f"{'>-' if number < 0 else '<'}{_SMALLEST}"
    text = _rounded(number)
    if unit == "%" and value < 1 and text == "100":
        return ">99.9"  # a failure in ten thousand calls is still a failure
    return text


def _rounded(number: float) -> str:
    """Return three significant digits, and every digit before the point."""
    if number == 0:
        return "0"
    places = max(0, _DIGITS - 1 - floor(log10(abs(number))))
    text = f"{number:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


Records = list[dict[str, Any]]

_MOST_POINTS = 600
_MOST_VALUES = 24


def variants(findings: Findings) -> list[str]:
    """Return the variants that were run, in their order."""
    return list(dict.fromkeys(row.variant for row in findings.rows))


def swept(findings: Findings) -> list[str]:
    """Return the names of the swept parameters."""
    return list(findings.rows[0].parameters) if findings.rows else []


def in_force(findings: Findings) -> dict[str, Any]:
    """Return the parameters that are the same in all rows."""
    moved = swept(findings)
    return {name: value for name, value in findings.study.parameters.items() if name not in moved}


def unit(findings: Findings, metric: str) -> str:
    """Return the unit that the table gives a metric, or the one it has by nature."""
    for column in findings.study.columns:
        if column.metric == metric:
            return column.unit
    return MEANINGS[metric].unit if metric in MEANINGS else ""


def title(findings: Findings, name: str) -> str:
    """Return the title of a metric or parameter for people."""
    for column in findings.study.columns:
        if column.metric == name:
            return column.title
    return name.rpartition(".")[2].replace("_", " ")


def point(parameters: dict[str, Any]) -> str:
    """Return one swept point as text: clients = 100, rate = 5."""
    return ", ".join(
        f"{name.rpartition('.')[2]} = {said(value)}" for name, value in parameters.items()
    )


def said(value: object) -> str:
    """Return a parameter for people."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def drawn(findings: Findings, row: Row, metric: str) -> dict[str, Any]:
    """Return one value to draw: y on the axis (None where it has no place), and how it is said."""
    value = row.metrics.get(metric, float("nan"))
    of = unit(findings, metric)
    return {
        "i": variants(findings).index(row.variant),
        "v": row.variant,
        "y": scaled(value, of) if isfinite(value) else None,
        "never": value == inf,
        "text": shown(value, of),
    }


def series(row: Row, name: str) -> tuple[float, list[float]]:
    """Return the bucket and the points of a time series of the first trial; both may be nothing.

    A long one is thinned to the highest value of each stretch, because the peaks are the story.
    """
    trial = row.trials[0] if row.trials else None
    values: Sequence[float] = getattr(trial, "series", {}).get(name, ())
    bucket: float = getattr(trial, "bucket", 1.0)
    stretch = max(1, ceil(len(values) / _MOST_POINTS))
    parts = (values[start : start + stretch] for start in range(0, len(values), stretch))
    return bucket * stretch, [max(part) for part in parts]


def numeric(values: Iterable[object]) -> bool:
    """Say whether all are numbers, so that they have a place on an axis."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        for value in values
    )


def sentences(*parts: str) -> str:
    """Join what there is to say, each part with a capital."""
    return " ".join(f"{part[0].upper()}{part[1:]}" for part in parts if part)


def mean(findings: Findings, *metrics: str) -> str:
    """Say what a number stands for: `Row.metrics` takes the median where a mean has no value."""
    if findings.trials == 1:
        return ""
    every = (trial.metrics() for row in findings.rows for trial in row.trials)
    endless = any(isinf(one.get(name, 0.0)) for one in every for name in metrics)
    median = ", or their median where not all came to an end" if endless else ""
    return f"The mean of {findings.trials} trials{median}."


def values(findings: Findings, records: Records) -> list[tuple[str, str]]:
    """Name each row and its value."""
    return [
        (" at ".join(filter(None, (row.variant, point(row.parameters)))), one["text"])
        for row, one in zip(findings.rows, records, strict=True)
    ]


def in_words(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return what a chart shows as text, as long as anybody would listen."""
    listed = "; ".join(f"{name}: {text}" for name, text in pairs[:_MOST_VALUES])
    more = "; and more, all in the table" if len(pairs) > _MOST_VALUES else ""
    return f"{title}. {listed}{more}."
