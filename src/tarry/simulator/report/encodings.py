"""What the drawings share: axes and their ticks, who is shown in which colour, what a pointer says.

An axis starts, ends and is ticked by what was found; a colour is the same in every chart.
"""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.simulator.report.numbers import SUFFIXES
from tarry.simulator.report.reading import numeric, said
from tarry.simulator.report.theme import TEXT_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Spec = dict[str, Any]

_FEW_DECADES = 2
_WIDE = 50
_MOST_TICKS = 8
_FADED = 0.12

PICKED: Spec = {"name": "picked", "value": -1}
"""The number of the variant that the reader singled out, or -1."""
LEVEL_TITLE: Spec = {
    "titleAngle": 0,
    "titleAlign": "left",
    "titleBaseline": "bottom",
    "titleAnchor": "end",
    "titleX": 0,
    "titleY": -TEXT_SIZE,
}
"""The title of a y axis above it, where it can be read and takes no width."""


class Extent(NamedTuple):
    """The part of an axis that is drawn. `top` is where values stand that never come."""

    low: float
    high: float
    top: float
    log: bool

    def at(self, value: float | None, *, never: bool = False) -> float | None:
        """Return where a value is drawn: zero has no place on a log axis but its foot."""
        if never:
            return self.top
        if value is None:
            return None
        return max(value, self.low) if self.log else value

    def scale(self) -> dict[str, Any]:
        """Return the scale."""
        kind = {"type": "log"} if self.log else {"type": "linear", "nice": False}
        return {**kind, "domain": [self.low, self.top]}


def extent(values: Iterable[float | None], *, log: bool, room: float = 1.0) -> Extent:
    """Return an extent that holds all values, with `room` above the highest as a factor."""
    known = [value for value in values if value is not None]
    positive = [value for value in known if value > 0]
    if log and positive:
        low = 10.0 ** floor(log10(min(positive)))
        high = max(positive)
        high = max(high, low * 10)
        return Extent(low, high, high * (high / low) ** (room - 1), log=True)
    high = max(known, default=0.0) or 1.0
    low = min(0.0, *known) if known else 0.0
    return Extent(low, high, low + (high - low) * room, log=False)


def axis(reach: Extent, unit: str, title: str | None, count: int = 4) -> dict[str, Any]:
    """Return an axis whose ticks carry the unit; one title stands level above it."""
    plain = "abs(datum.value) >= 10000 ? format(datum.value, '.3~s') : format(datum.value, ',~g')"
    made: dict[str, Any] = {
        "title": title,
        "labelExpr": f"({plain}) + '{SUFFIXES[unit]}'",
        "domain": False,
        "ticks": False,
    }
    return made | ({"values": ticks(reach)} if reach.log else {"tickCount": count})


def ticks(reach: Extent) -> list[float]:
    """Return the powers of ten on a log axis, and the steps between when they are few."""
    first, last = floor(log10(reach.low)), ceil(log10(reach.high))
    steps = (1, 2, 5) if last - first <= _FEW_DECADES else (1,)
    every = max(1, (last - first) // 5)
    marks = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
    return [mark for mark in marks if reach.low <= mark <= reach.high]


def across(values: Sequence[Any], title: str, unit: str, *, swept: bool) -> Spec:
    """Return the x channel: numbers on an axis, over decades on a log axis; names side by side."""
    if not numeric(values):
        names = list(dict.fromkeys(said(value) for value in values))
        plain: Spec = {"title": title, "labelAngle": 0, "grid": False}
        return {"field": "x", "type": "ordinal", "sort": names, "axis": plain}
    marked: Spec = {
        "title": title,
        "grid": False,
        "labelExpr": f"format(datum.value, ',~g') + '{SUFFIXES[unit]}'",
        "labelFlush": True,
    }
    points = sorted(set(values))
    if swept and len(points) <= _MOST_TICKS:
        marked["values"] = points
    else:
        marked["tickCount"] = 6
    wide = points[0] > 0 and points[-1] / points[0] >= _WIDE
    kind: Spec = {"type": "log"} if wide else {"type": "linear", "zero": False}
    scale: Spec = {**kind, "nice": False, "padding": 10}
    return {"field": "x", "type": "quantitative", "scale": scale, "axis": marked}


def colour(names: Sequence[str], **more: object) -> Spec:
    """The colour of a variant, the same in every chart."""
    scale = {"domain": list(names)}
    return {"field": "v", "type": "nominal", "scale": scale, "title": None, **more}


def opacity() -> Spec:
    """All are plain to see until one is singled out."""
    stands_out = {"test": "picked == -1 || picked == datum.i", "value": 1}
    return {"condition": stands_out, "value": _FADED}


def tooltip(*fields: tuple[str, str]) -> list[Spec]:
    """Fields of the data as text, each with its title."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields]
