"""The Vega-Lite specification of each kind of chart, and the light and dark theme of the report.

The data of a chart is a list of records, which `charts` builds. The names of their fields are
short, because a page can have thousands of records:

i, v    the index and the name of the variant, which has the same colour in every chart
y       the value: its position on the value axis (horizontal for bars), or the colour of a cell
text    the formatted value
never   whether the value is infinite (shown as "never")
x, at   the x value of a line chart or time series, and the same as text
n       the order of the points of a line
a, b    the column and the row of a heat map
"""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.simulator.formatting import UNIT_SUFFIXES, format_parameter, is_numeric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Spec = dict[str, Any]
"""A part of a Vega-Lite specification."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
TEXT_SIZE = 12

# Variant n has the shape n % 7 and the colour n % 8. As 7 and 8 have no common factor, 56 variants
# differ in shape or colour.
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")


class Theme(NamedTuple):
    """The colours of a theme.

    On `page` and `surface`, text has a contrast ratio of at least 4.5, and marks of at least 3.
    """

    page: str  # the background of the page
    surface: str  # the background of tables and charts
    ink: str  # text
    muted: str  # text of less importance, such as captions and axis labels
    line: str  # borders, axes and grid lines
    context: str  # in a time series of one variant, the lines of the other variants
    accent: str  # highlights, such as the focus outline
    wash: str  # the background of the lesson (the text below the charts) and the selected variant
    span: str  # the shading of a period behind a time series
    marks: tuple[str, ...]  # lines, bars and points: one colour for each variant
    ramp: tuple[str, str]
    """The colours of the lowest and highest value of a heat map; `ink` is readable on both."""


LIGHT = Theme(
    page="#fbfaf7",
    surface="#ffffff",
    ink="#1c2028",
    muted="#5a6270",
    line="#e3e1da",
    context="#c2c6ce",
    accent="#2559b8",
    wash="#eef3fc",
    span="#f3efe4",
    marks=("#c8431c", "#2a63c9", "#138560", "#8a4fc0", "#9c6f06", "#127b96", "#c03a7e", "#5b6472"),
    ramp=("#f3f6fc", "#86ade9"),
)
DARK = Theme(
    page="#12151b",
    surface="#191d25",
    ink="#e8eaf0",
    muted="#a2aab8",
    line="#2c323d",
    context="#4d5666",
    accent="#8fb4ff",
    wash="#1c2739",
    span="#262b35",
    marks=("#ff8f66", "#7aa7ff", "#4fcf9f", "#c89bff", "#e3b44a", "#55c7e3", "#ff8cc0", "#a9b2c1"),
    ramp=("#1d2431", "#2b5cae"),
)


def css_properties() -> str:
    """Return CSS custom properties for the theme that the browser prefers, light or dark."""
    return (
        f":root{{color-scheme:light dark;{_theme_properties(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_theme_properties(DARK)}}}}}"
        + "".join(f".v{n}{{--variant:var(--v{n})}}" for n in range(len(LIGHT.marks)))
    )


def _theme_properties(theme: Theme) -> str:
    names = ("page", "surface", "ink", "muted", "line", "accent", "wash")
    colours = {name: getattr(theme, name) for name in names}
    colours |= {f"v{n}": colour for n, colour in enumerate(theme.marks)}
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def vega_config(theme: Theme, *, legend: bool) -> dict[str, Any]:
    """Return the theme as a Vega-Lite configuration; `legend`: whether charts have a legend."""
    text: Spec = {"labelColor": theme.muted, "titleColor": theme.muted}
    text |= {"titleFontWeight": "normal", "labelFontSize": TEXT_SIZE, "titleFontSize": TEXT_SIZE}
    title = {"color": theme.ink, "subtitleColor": theme.muted, "anchor": "start", "frame": "group"}
    lines = {"gridColor": theme.line, "domainColor": theme.line, "tickColor": theme.line}
    layout = {"orient": "top", "offset": 30, "columns": 2, "symbolSize": 70, "labelLimit": 400}
    ramp = list(theme.ramp)
    ranges = {"category": list(theme.marks), "symbol": list(SHAPES), "ramp": ramp, "heatmap": ramp}
    return {
        "background": theme.surface,
        "font": FONT,
        "view": {"stroke": None},
        "title": title,
        "axis": {**text, **lines, "labelPadding": 6, "labelOverlap": True},
        "legend": {**text, "disable": not legend, **layout},
        "range": ranges,
        "text": {"color": theme.ink, "fontSize": TEXT_SIZE},
        "style": {
            "context": {"color": theme.context, "strokeWidth": 1},
            "rule": {"color": theme.muted},
            "span": {"color": theme.span},
            "note": {"color": theme.muted},
            "hollow": {"fill": theme.surface},
            "cell": {"stroke": theme.surface, "strokeWidth": 2},
        },
    }


_SUBDIVIDED_DECADES = 2
"""A log axis of at most this many decades also has ticks at 2 and 5."""
_LOG_AXIS_RATIO = 50
"""The x axis is logarithmic if the largest value is at least this many times the smallest."""
_MAX_SWEPT_TICKS = 8
_FADED_OPACITY = 0.12
_BAR_HEIGHT_PX = 48
_CELL_HEIGHT_PX = 34
_MAX_LABELLED_COLUMNS = 6
"""The cells of a heat map with more columns are too narrow to show the values."""

SELECTED_VARIANT: Spec = {"name": "selected", "value": -1}
"""The Vega signal with the index of the variant that the reader has selected; -1 for none."""
_TITLE_ABOVE_AXIS: Spec = {
    "titleAngle": 0,
    "titleAlign": "left",
    "titleBaseline": "bottom",
    "titleAnchor": "end",
    "titleX": 0,
    "titleY": -TEXT_SIZE,
}
"""Axis options that put the title of a y axis above the axis, where it needs no width."""
_FULL_HEIGHT: Spec = {"y": {"value": 0}, "y2": {"value": "height"}}


class AxisRange(NamedTuple):
    """The range of an axis: finite values from `low` to `high`, infinite ones (never) at `top`."""

    low: float
    high: float
    top: float
    is_log: bool

    def position(self, value: float | None, *, never: bool = False) -> float | None:
        """Return the position of a value (None: no value). On a log axis, zero is at `low`."""
        if never:
            return self.top
        if value is None:
            return None
        return max(value, self.low) if self.is_log else value

    def scale(self) -> dict[str, Any]:
        """Return the Vega-Lite scale."""
        scale = {"type": "log"} if self.is_log else {"type": "linear", "nice": False}
        return {**scale, "domain": [self.low, self.top]}


def axis_range(values: Iterable[float | None], *, is_log: bool, stretch: float = 1.0) -> AxisRange:
    """Return a range that contains all values; None stands for a missing or infinite value.

    `stretch` above 1 makes the axis longer than its highest value needs, for labels or "never".
    """
    finite = [value for value in values if value is not None]
    positive = [value for value in finite if value > 0]
    if is_log and positive:
        low = 10.0 ** floor(log10(min(positive)))
        high = max(*positive, low * 10)
        return AxisRange(low, high, high * (high / low) ** (stretch - 1), is_log=True)
    high = max(finite, default=0.0) or 1.0
    low = min(0.0, *finite) if finite else 0.0
    return AxisRange(low, high, low + (high - low) * stretch, is_log=False)


def log_ticks(value_range: AxisRange) -> list[float]:
    """Return ticks at the powers of ten, and also between them if the axis has few decades."""
    first, last = floor(log10(value_range.low)), ceil(log10(value_range.high))
    steps = (1, 2, 5) if last - first <= _SUBDIVIDED_DECADES else (1,)
    decade_step = max(1, (last - first) // 5)
    ticks = [step * 10.0**power for power in range(first, last + 1, decade_step) for step in steps]
    return [tick for tick in ticks if value_range.low <= tick <= value_range.high]


def x_channel(values: Sequence[Any], title: str, unit: str, *, is_swept: bool) -> Spec:
    """Return the x channel of a line chart.

    Numbers get a quantitative axis, which is logarithmic if their range is wide. Other values get
    an ordinal axis. With `is_swept` (values of a swept parameter), a few values each get a tick.
    """
    if not is_numeric(values):
        names = list(dict.fromkeys(format_parameter(value) for value in values))
        name_axis: Spec = {"title": title, "labelAngle": 0, "grid": False}
        return {"field": "x", "type": "ordinal", "sort": names, "axis": name_axis}
    label = f"format(datum.value, ',~g') + '{UNIT_SUFFIXES[unit]}'"
    axis: Spec = {"title": title, "grid": False, "labelExpr": label, "labelFlush": True}
    points = sorted(set(values))
    if is_swept and len(points) <= _MAX_SWEPT_TICKS:
        axis["values"] = points
    else:
        axis["tickCount"] = 6
    is_log = points[0] > 0 and points[-1] / points[0] >= _LOG_AXIS_RATIO
    scale_type: Spec = {"type": "log"} if is_log else {"type": "linear", "zero": False}
    scale: Spec = {**scale_type, "nice": False, "padding": 10}
    return {"field": "x", "type": "quantitative", "scale": scale, "axis": axis}


def series_view(
    names: Sequence[str],
    variant_index: int,
    point_count: int,
    y_range: AxisRange,
    y_title: str,
    background: Sequence[Spec] = (),
) -> Spec:
    """Return a chart of the time series of one variant; the other variants are grey lines."""
    y_axis = _axis(y_range, "", None, 3)
    y = {"field": "y", "type": "quantitative", "scale": y_range.scale(), "axis": y_axis}
    is_own = {"field": "i", "equal": variant_index}
    own_records: Spec = {"transform": [{"filter": is_own}]}
    other_records: Spec = {"transform": [{"filter": {"not": is_own}}]}
    by_variant = {"detail": {"field": "v"}}
    own_colour = {"color": _variant_channel(names, legend=None)}
    own_area = {**own_colour, "y2": {"datum": y_range.low}}
    point = {"type": "point", "filled": True, "size": 60}
    rule = {"type": "rule", "opacity": 0, "strokeWidth": {"expr": f"width / {point_count}"}}
    tooltip = _tooltip(("v", "variant"), ("at", "time"), ("text", y_title))
    select = {"type": "point", "encodings": ["x"], "on": "pointerover", "clear": "pointerout"}
    visible = {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0}
    return {
        "height": 104,
        "encoding": {"x": _time_channel("x"), "y": y},
        "layer": [
            *background,
            {**other_records, "mark": {"type": "line", "style": "context"}, "encoding": by_variant},
            {**own_records, "mark": {"type": "area", "opacity": 0.16}, "encoding": own_area},
            {**own_records, "mark": {"type": "line", "strokeWidth": 1.75}, "encoding": own_colour},
            {**own_records, "mark": point, "encoding": {**own_colour, "opacity": visible}},
            {
                # An invisible rule over the whole height makes each point easy to hover.
                **own_records,
                "params": [{"name": "hover", "select": select}],
                "mark": rule,
                "encoding": {**_FULL_HEIGHT, "tooltip": tooltip},
            },
        ],
    }


def span_layers(span: tuple[float, float, str], duration: float) -> list[Spec]:
    """Return layers that shade a period of a time series and put its label above the chart."""
    start, end, label = span
    data = {"values": [{"start": start, "end": min(end, duration), "label": label}]}
    # A label in the right half is aligned right, so that it stays within the chart.
    is_late = start > duration / 2
    text = {"type": "text", "style": "note", "align": "right" if is_late else "left"}
    period = {"x": _time_channel("start"), "x2": {"field": "end"}, **_FULL_HEIGHT}
    label_x = _time_channel("end" if is_late else "start")
    label_channels = {"x": label_x, "y": {"value": -3}, "text": {"field": "label"}}
    return [
        {"data": data, "mark": {"type": "rect", "style": "span"}, "encoding": period},
        {"data": data, "mark": {**text, "baseline": "bottom"}, "encoding": label_channels},
    ]


def bars_view(names: Sequence[str], x_range: AxisRange, unit: str, title: str) -> Spec:
    """Return a chart with a labelled bar for each variant. The bar of "never" is dashed."""
    axis = _axis(x_range, unit, f"{title} (log scale)") if x_range.is_log else None
    x = {"field": "y", "type": "quantitative", "scale": x_range.scale(), "axis": axis}
    colour = _variant_channel(names, legend=None)
    tooltip = _tooltip(("v", "variant"), ("text", title))
    bar_channels = {"x": x, "x2": {"datum": x_range.low}, "color": colour, "tooltip": tooltip}
    bar = {"type": "bar", "height": 16, "yOffset": 10, "cornerRadiusEnd": 2}
    dashed = {**bar, "strokeDash": [3, 3], "fillOpacity": 0.12, "strokeWidth": 1.25}
    outlined = {**bar_channels, "stroke": colour}
    label = {"type": "text", "align": "left", "baseline": "middle"}
    name_label = {**label, "dy": -9, "limit": {"expr": "width"}}
    value_label = {**label, "dy": 10, "dx": 6, "fontWeight": "bold"}
    value_text, at_start = {"text": {"field": "text"}}, {"x": {"value": 0}}
    finite = [{"filter": "!datum.never && isValid(datum.y)"}]
    not_finite = [{"filter": "datum.never || !isValid(datum.y)"}]
    y = {"field": "v", "type": "nominal", "sort": list(names), "axis": None}
    return {
        "height": len(names) * _BAR_HEIGHT_PX,
        "encoding": {"y": {**y, "scale": {"padding": 0}}, "opacity": _opacity()},
        "layer": [
            {"transform": finite, "mark": bar, "encoding": bar_channels},
            {"transform": [{"filter": "datum.never"}], "mark": dashed, "encoding": outlined},
            {"mark": name_label, "encoding": {"text": {"field": "v"}, **at_start}},
            {"transform": finite, "mark": value_label, "encoding": {**value_text, "x": x}},
            {"transform": not_finite, "mark": value_label, "encoding": {**value_text, **at_start}},
        ],
    }


def lines_view(
    names: Sequence[str], y_range: AxisRange, x: Spec, unit: str, titles: tuple[str, str]
) -> Spec:
    """Return a chart with a line for each variant. "never" is on a dashed line at the top."""
    x_title, y_title = titles
    y_axis = {**_axis(y_range, unit, y_title, 5), **_TITLE_ABOVE_AXIS}
    y = {"field": "y", "type": "quantitative", "scale": y_range.scale(), "axis": y_axis}
    channels = {"x": x, "y": y, "color": _variant_channel(names), "opacity": _opacity()}
    not_never, valid = [{"filter": "!datum.never"}], [{"filter": "isValid(datum.y)"}]
    line, order = {"type": "line", "strokeWidth": 2}, {"field": "n", "type": "quantitative"}
    point = {"type": "point", "size": 70, "strokeWidth": 2, "style": "hollow"}
    tooltip = _tooltip(("v", "variant"), ("at", x_title), ("text", y_title))
    point_channels = {**channels, "shape": _variant_channel(names), "tooltip": tooltip}
    top = {"datum": y_range.top, "type": "quantitative", "scale": y_range.scale(), "axis": y_axis}
    at_top = {"y": top}
    never: list[Spec] = [
        {"mark": {"type": "rule", "style": "rule", "strokeDash": [2, 4]}, "encoding": at_top},
        {
            "mark": {"type": "text", "style": "note", "align": "right", "dx": -6},
            "encoding": {**at_top, "x": {"value": 0}, "text": {"value": "never"}},
        },
    ]
    return {
        "height": 320,
        "layer": [
            *(never if y_range.top > y_range.high else []),
            {"transform": not_never, "mark": line, "encoding": {**channels, "order": order}},
            {"transform": valid, "mark": point, "encoding": point_channels},
        ],
    }


def heat_map_view(
    value_range: AxisRange, columns: Sequence[str], rows: Sequence[str], titles: Sequence[str]
) -> Spec:
    """Return a heat map with a cell for each pair of parameter values. "never" has no colour."""
    x_title, y_title, title = titles
    plain_axis = {"ticks": False, "domain": False, "labelAngle": 0}
    x = {"field": "a", "type": "ordinal", "sort": list(columns)}
    y = {"field": "b", "type": "ordinal", "sort": list(rows)}
    has_text = len(columns) <= _MAX_LABELLED_COLUMNS
    colour = {
        "field": "y",
        "type": "quantitative",
        "scale": value_range.scale(),
        "legend": None if has_text else {"title": title, "orient": "bottom"},
        "condition": {"test": "datum.never || !isValid(datum.y)", "value": "transparent"},
    }
    tooltip = _tooltip(("v", "variant"), ("a", x_title), ("b", y_title), ("text", title))
    cell = {"color": colour, "tooltip": tooltip}
    text: list[Spec] = [{"mark": {"type": "text"}, "encoding": {"text": {"field": "text"}}}]
    return {
        "height": len(rows) * _CELL_HEIGHT_PX,
        "encoding": {
            "x": {**x, "axis": {**plain_axis, "title": x_title}},
            "y": {**y, "axis": {**plain_axis, **_TITLE_ABOVE_AXIS, "title": y_title}},
        },
        "layer": [
            {"mark": {"type": "rect", "style": "cell"}, "encoding": cell},
            *(text if has_text else []),
        ],
    }


def _axis(value_range: AxisRange, unit: str, title: str | None, tick_count: int = 4) -> Spec:
    number = "abs(datum.value) >= 10000 ? format(datum.value, '.3~s') : format(datum.value, ',~g')"
    label = f"({number}) + '{UNIT_SUFFIXES[unit]}'"
    axis: Spec = {"title": title, "labelExpr": label, "domain": False, "ticks": False}
    ticks = {"values": log_ticks(value_range)} if value_range.is_log else {"tickCount": tick_count}
    return axis | ticks


def _time_channel(field: str) -> Spec:
    tick_count = {"expr": "max(3, round(width / 150))"}
    axis: Spec = {"title": None, "ticks": False, "grid": False, "tickCount": tick_count}
    axis |= {"labelExpr": "format(datum.value, ',~g') + ' s'", "labelFlush": True}
    scale = {"nice": False, "zero": False}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _variant_channel(names: Sequence[str], **options: object) -> Spec:
    scale = {"domain": list(names)}
    return {"field": "v", "type": "nominal", "scale": scale, "title": None, **options}


def _opacity() -> Spec:
    """Return the opacity of a mark; it is faded while the reader has selected another variant."""
    is_opaque = {"test": "selected == -1 || selected == datum.i", "value": 1}
    return {"condition": is_opaque, "value": _FADED_OPACITY}


def _tooltip(*fields: tuple[str, str]) -> list[Spec]:
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields]
