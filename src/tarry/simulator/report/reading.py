"""What the findings say: names, units and points for charts and tables, and sentences on them."""

from __future__ import annotations

from math import ceil, inf, isfinite, isinf
from typing import TYPE_CHECKING, Any

from tarry.simulator.report.numbers import scaled, shown
from tarry.simulator.summary import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.simulator.study import Findings, Row

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
