"""What is said about a chart: how to read it, and what it shows for those who do not see it."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from tarry.simulator.report.reading import point

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.simulator.report.reading import Records
    from tarry.simulator.study import Findings

_MOST_VALUES = 24


def sentences(*parts: str) -> str:
    """Join what there is to say, each part with a capital."""
    return " ".join(f"{part[0].upper()}{part[1:]}" for part in parts if part)


def mean(findings: Findings, *metrics: str) -> str:
    """Say what a number stands for: `Row.metrics` takes the median where a mean has no value."""
    if findings.trials == 1:
        return ""
    every = (trial.metrics() for row in findings.rows for trial in row.trials)
    endless = any(not isfinite(one.get(name, 0.0)) for one in every for name in metrics)
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
