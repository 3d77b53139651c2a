"""The horizontal channel of a line chart: whatever was swept, it gets a fitting axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.simulator.report.numbers import SUFFIXES
from tarry.simulator.report.reading import numeric, said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.simulator.report.encodings import Spec

_WIDE = 50
_MOST_TICKS = 8


def across(values: Sequence[Any], title: str, unit: str, *, swept: bool) -> Spec:
    """Return the x channel: numbers on an axis, over decades on a log axis; names side by side."""
    if not numeric(values):
        names = list(dict.fromkeys(said(value) for value in values))
        axis: Spec = {"title": title, "labelAngle": 0, "grid": False}
        return {"field": "x", "type": "ordinal", "sort": names, "axis": axis}
    ticks: Spec = {
        "title": title,
        "grid": False,
        "labelExpr": f"format(datum.value, ',~g') + '{SUFFIXES[unit]}'",
        "labelFlush": True,
    }
    points = sorted(set(values))
    if swept and len(points) <= _MOST_TICKS:
        ticks["values"] = points
    else:
        ticks["tickCount"] = 6
    wide = points[0] > 0 and points[-1] / points[0] >= _WIDE
    kind: Spec = {"type": "log"} if wide else {"type": "linear", "zero": False}
    scale: Spec = {**kind, "nice": False, "padding": 10}
    return {"field": "x", "type": "quantitative", "scale": scale, "axis": ticks}
