"""What the drawings share: axes and their ticks, who is shown in which colour, what a pointer says.

An axis starts, ends and is ticked by what was found; a colour is the same in every chart.
"""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.simulator.report.formatting import SUFFIXES, numeric, said
from tarry.simulator.report.theme import TEXT_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence


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


_ROW = 48
_CELL = 34
_COLUMNS_WITH_TEXT = 6


def series(
    names: Sequence[str],
    variant: int,
    points: int,
    reach: Extent,
    y_title: str,
    behind: Sequence[Spec] = (),
) -> Spec:
    """One variant over time, filled, in front of the lines of all others, and what is `behind`."""
    y_axis = axis(reach, "", None, 3)
    y = {"field": "y", "type": "quantitative", "scale": reach.scale(), "axis": y_axis}
    mine: Spec = {"transform": [{"filter": {"field": "i", "equal": variant}}]}
    own = {"color": colour(names, legend=None)}
    pointed = {"type": "point", "encodings": ["x"], "on": "pointerover", "clear": "pointerout"}
    seen = {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0}
    return {
        "height": 104,
        "encoding": {"x": _time("x"), "y": y},
        "layer": [
            *behind,
            {
                "transform": [{"filter": {"not": {"field": "i", "equal": variant}}}],
                "mark": {"type": "line", "style": "context"},
                "encoding": {"detail": {"field": "v"}},
            },
            {
                **mine,
                "mark": {"type": "area", "opacity": 0.16},
                "encoding": {**own, "y2": {"datum": reach.low}},
            },
            {**mine, "mark": {"type": "line", "strokeWidth": 1.75}, "encoding": own},
            {
                **mine,
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {**own, "opacity": seen},
            },
            {
                # What a pointer meets: the whole height at each point, so that none is hard to hit.
                **mine,
                "params": [{"name": "hover", "select": pointed}],
                "mark": {
                    "type": "rule",
                    "opacity": 0,
                    "strokeWidth": {"expr": f"width / {points}"},
                },
                "encoding": {
                    "y": {"value": 0},
                    "y2": {"value": "height"},
                    "tooltip": tooltip(("v", "variant"), ("at", "time"), ("text", y_title)),
                },
            },
        ],
    }


def shaded(span: tuple[float, float, str], ends: float) -> list[Spec]:
    """A time of trouble: its ground is shaded, its label stands above, where no line crosses it."""
    start, end, label = span
    data = {"values": [{"start": start, "end": min(end, ends), "label": label}]}
    late = start > ends / 2  # a long label must not leave the picture
    text = {"type": "text", "style": "note", "align": "right" if late else "left"}
    height = {"y": {"value": 0}, "y2": {"value": "height"}}
    return [
        {
            "data": data,
            "mark": {"type": "rect", "style": "span"},
            "encoding": {"x": _time("start"), "x2": {"field": "end"}, **height},
        },
        {
            "data": data,
            "mark": {**text, "baseline": "bottom"},
            "encoding": {
                "x": _time("end" if late else "start"),
                "y": {"value": -3},
                "text": {"field": "label"},
            },
        },
    ]


def _time(field: str) -> Spec:
    ticks = {
        "title": None,
        "ticks": False,
        "grid": False,
        "tickCount": {"expr": "max(3, round(width / 150))"},
        "labelExpr": "format(datum.value, ',~g') + ' s'",
        "labelFlush": True,
    }
    scale = {"nice": False, "zero": False}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": ticks}


def bars(names: Sequence[str], reach: Extent, unit: str, title: str) -> Spec:
    """A bar below the name of each variant, its value at its end; never is a bar without one."""
    ticks = axis(reach, unit, f"{title} (log scale)") if reach.log else None
    x = {"field": "y", "type": "quantitative", "scale": reach.scale(), "axis": ticks}
    across = {
        "x": x,
        "x2": {"datum": reach.low},
        "color": colour(names, legend=None),
        "tooltip": tooltip(("v", "variant"), ("text", title)),
    }
    shape = {"type": "bar", "height": 16, "yOffset": 10, "cornerRadiusEnd": 2}
    dashed = {"strokeDash": [3, 3], "fillOpacity": 0.12, "strokeWidth": 1.25}
    label = {"type": "text", "align": "left", "baseline": "middle"}
    value = {**label, "dy": 10, "dx": 6, "fontWeight": "bold"}
    ends = [{"filter": "!datum.never && isValid(datum.y)"}]
    no_end = [{"filter": "datum.never || !isValid(datum.y)"}]
    place = {"field": "v", "type": "nominal", "sort": list(names), "axis": None}
    return {
        "height": len(names) * _ROW,
        "encoding": {"y": {**place, "scale": {"padding": 0}}, "opacity": opacity()},
        "layer": [
            {"transform": ends, "mark": shape, "encoding": across},
            {
                "transform": [{"filter": "datum.never"}],
                "mark": {**shape, **dashed},
                "encoding": {**across, "stroke": colour(names, legend=None)},
            },
            {
                "mark": {**label, "dy": -9, "limit": {"expr": "width"}},
                "encoding": {"text": {"field": "v"}, "x": {"value": 0}},
            },
            {
                "transform": ends,
                "mark": value,
                "encoding": {"text": {"field": "text"}, "x": x},
            },
            {
                "transform": no_end,
                "mark": value,
                "encoding": {"text": {"field": "text"}, "x": {"value": 0}},
            },
        ],
    }


def lines(names: Sequence[str], reach: Extent, x: Spec, unit: str, titles: tuple[str, str]) -> Spec:
    """A line with its points for each variant; what never comes stands on a line on top."""
    x_title, y_title = titles
    y_axis = {**axis(reach, unit, y_title, 5), **LEVEL_TITLE}
    y = {"field": "y", "type": "quantitative", "scale": reach.scale(), "axis": y_axis}
    drawn = {"x": x, "y": y, "color": colour(names), "opacity": opacity()}
    said = {"tooltip": tooltip(("v", "variant"), ("at", x_title), ("text", y_title))}
    top = {"datum": reach.top, "type": "quantitative", "scale": reach.scale(), "axis": y_axis}
    ceiling = {"y": top}
    never: list[Spec] = [
        {"mark": {"type": "rule", "style": "rule", "strokeDash": [2, 4]}, "encoding": ceiling},
        {
            "mark": {"type": "text", "style": "note", "align": "right", "dx": -6},
            "encoding": {**ceiling, "x": {"value": 0}, "text": {"value": "never"}},
        },
    ]
    return {
        "height": 320,
        "layer": [
            *(never if reach.top > reach.high else []),
            {
                "transform": [{"filter": "!datum.never"}],
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {**drawn, "order": {"field": "n", "type": "quantitative"}},
            },
            {
                "transform": [{"filter": "isValid(datum.y)"}],
                "mark": {"type": "point", "size": 70, "strokeWidth": 2, "style": "hollow"},
                "encoding": {**drawn, "shape": colour(names), **said},
            },
        ],
    }


def heat(reach: Extent, columns: Sequence[str], rows: Sequence[str], titles: Sequence[str]) -> Spec:
    """A cell for each pair of parameters; a value that never comes has no colour."""
    x_title, y_title, title = titles
    plain = {"ticks": False, "domain": False, "labelAngle": 0}
    x = {"field": "a", "type": "ordinal", "sort": list(columns)}
    y = {"field": "b", "type": "ordinal", "sort": list(rows)}
    in_words = len(columns) <= _COLUMNS_WITH_TEXT
    shade = {
        "field": "y",
        "type": "quantitative",
        "scale": reach.scale(),
        "legend": None if in_words else {"title": title, "orient": "bottom"},
        "condition": {"test": "datum.never || !isValid(datum.y)", "value": "transparent"},
    }
    said = tooltip(("v", "variant"), ("a", x_title), ("b", y_title), ("text", title))
    words: list[Spec] = [{"mark": {"type": "text"}, "encoding": {"text": {"field": "text"}}}]
    return {
        "height": len(rows) * _CELL,
        "encoding": {
            "x": {**x, "axis": {**plain, "title": x_title}},
            "y": {**y, "axis": {**plain, **LEVEL_TITLE, "title": y_title}},
        },
        "layer": [
            {
                "mark": {"type": "rect", "style": "cell"},
                "encoding": {"color": shade, "tooltip": said},
            },
            *(words if in_words else []),
        ],
    }
