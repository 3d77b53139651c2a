"""What the findings say, in the shape that charts and tables need: names, units, points."""

from __future__ import annotations

from math import ceil, inf, isfinite, isnan
from typing import TYPE_CHECKING, Any

from tarry.simulator.report.numbers import scaled, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.simulator.study import Findings, Row

Records = list[dict[str, Any]]

_UNITS = {
    "success_rate": "%",
    "amplification": "x",
    "peak_load": "x",
    "recovered_after": "s",
    "p50": "s",
    "p99": "s",
    "p999": "s",
}
_MOST_POINTS = 600


def variants(findings: Findings) -> list[str]:
    """Return the variants that were run, in their order."""
    return list(dict.fromkeys(row.variant for row in findings.rows))


def swept(findings: Findings) -> list[str]:
    """Return the names of the swept parameters."""
    return list(findings.rows[0].parameters) if findings.rows else []


def unit(findings: Findings, metric: str) -> str:
    """Return the unit that the table gives a metric, or the one it has by nature."""
    for column in findings.study.columns:
        if column.metric == metric:
            return column.unit
    return _UNITS.get(metric, "")


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
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not isnan(value)
        and isfinite(value)
        for value in values
    )
