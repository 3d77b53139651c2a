"""The charts of a study: for each plot its panels, how to read it, and what it shows in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.simulator.report import vega
from tarry.simulator.report.formatting import (
    SUFFIXES,
    drawn,
    in_words,
    mean,
    numeric,
    point,
    said,
    scaled,
    sentences,
    series,
    shown,
    swept,
    title,
    unit,
    values,
    variants,
)
from tarry.simulator.report.vega import across, extent

if TYPE_CHECKING:
    from tarry.simulator.report.formatting import Records
    from tarry.simulator.report.vega import Extent, Spec
    from tarry.simulator.study import Findings, Plot

_ROOM_FOR_LABELS = 1.25
_ROOM_FOR_NEVER = 1.15


class Panel(NamedTuple):
    """One view of a chart; `variant` is the number of the only one it shows, or None."""

    label: str
    variant: int | None
    records: Records
    view: Spec


class Chart(NamedTuple):
    """One plot of the study; without panels there was nothing to draw."""

    title: str
    kind: str
    reading: str
    alt: str
    panels: list[Panel]


def charts(findings: Findings) -> list[Chart]:
    """Return the charts of the study in their order."""
    return [_chart(findings, plot) for plot in findings.study.plots]


def _chart(findings: Findings, plot: Plot) -> Chart:
    if not findings.rows:
        return Chart(plot.title, "nothing", "Nothing was run.", "No values.", [])
    if plot.kind == "series":
        return _series(findings, plot)
    metrics = findings.rows[0].metrics
    if plot.kind == "lines" and plot.x in metrics:
        return _lines(findings, plot)
    if plot.kind == "lines" and len(swept(findings)) == 1:
        return _lines(findings, plot)
    if plot.kind == "lines" and len(swept(findings)) > 1:
        return _heat(findings, plot)
    return _bars(findings, plot)


def _series(findings: Findings, plot: Plot) -> Chart:
    names = variants(findings)
    # Of a sweep the last point is shown: it is the one where most is asked of a policy.
    last = findings.rows[-1].parameters
    rows = [row for row in findings.rows if row.parameters == last]
    taken = {names.index(row.variant): series(row, plot.y) for row in rows}
    taken = {number: one for number, one in taken.items() if one[1]}
    known = [value for _, points in taken.values() for value in points]
    reach = extent(known, log=plot.log, room=1.02)
    records: Records = [
        {
            "i": number,
            "v": names[number],
            "x": index * bucket,
            "y": reach.at(value),
            "at": shown(index * bucket, "s"),
            "text": shown(value),
        }
        for number, (bucket, points) in taken.items()
        for index, value in enumerate(points)
    ]
    y_title = _label(findings, plot)
    ends = max((one["x"] for one in records), default=0.0)
    spans = [span for span in plot.spans if span[0] < ends]
    told = [f"{label}, {shown(start, 's')} to {shown(end, 's')}" for start, end, label in spans]
    behind = [layer for span in spans for layer in vega.shaded(span, ends)]
    panels = [
        Panel(
            names[number],
            number,
            records,
            vega.series(names, number, len(points), reach, y_title, behind),
        )
        for number, (_, points) in taken.items()
    ]
    peaks = [(names[number], shown(max(points))) for number, (_, points) in taken.items()]
    return Chart(
        plot.title,
        "series",
        sentences(
            f"One row for each variant, {y_title} over time, all on one "
            f"{'log ' if plot.log else ''}scale; the others stand in grey behind it.",
            f"Shaded: {'; '.join(told)}." if told else "",
            f"Drawn for {point(last)}." if last else "",
            f"The first of {findings.trials} trials." if findings.trials > 1 else "",
        ),
        in_words(f"{plot.title}, at its highest", peaks),
        panels,
    )


def _bars(findings: Findings, plot: Plot) -> Chart:
    names = variants(findings)
    of = unit(findings, plot.y)
    records = [drawn(findings, row, plot.y) for row in findings.rows]
    reach = extent((one["y"] for one in records), log=plot.log, room=_ROOM_FOR_LABELS)
    points: dict[str, Records] = {}
    for row, one in zip(findings.rows, records, strict=True):
        points.setdefault(point(row.parameters), []).append(_placed(one, reach))
    view = vega.bars(names, reach, of, _label(findings, plot))
    panels = [Panel(label, None, mine, view) for label, mine in points.items()]
    return Chart(
        plot.title,
        "bars",
        sentences(
            "One bar for each variant.",
            mean(findings, plot.y),
            "A dashed bar without an end means never." if _any_never(records) else "",
            _on_log(records, reach, "The scale is logarithmic."),
        ),
        in_words(plot.title, values(findings, records)),
        panels,
    )


def _lines(findings: Findings, plot: Plot) -> Chart:
    names = variants(findings)
    y_title = _label(findings, plot)
    records = [drawn(findings, row, plot.y) for row in findings.rows]
    room = _ROOM_FOR_NEVER if _any_never(records) else 1.0
    reach = extent((one["y"] for one in records), log=plot.log, room=room)
    by_metric = plot.x in findings.rows[0].metrics
    name = plot.x if by_metric else swept(findings)[0]
    of = unit(findings, name) if by_metric else ""
    places = [
        scaled(row.metrics[name], of) if by_metric else row.parameters[name]
        for row in findings.rows
    ]
    in_order = numeric(places)
    for number, (row, one, value) in enumerate(zip(findings.rows, records, places, strict=True)):
        one |= {
            "n": number,
            "x": value if in_order else said(value),
            "at": shown(row.metrics[name], of) if by_metric else said(value),
        }
    x_title = title(findings, name)
    mark = "line" if len(findings.rows) > len(names) else "point"
    view = vega.lines(
        names,
        reach,
        across(places, x_title, of, swept=not by_metric),
        unit(findings, plot.y),
        (x_title, y_title),
    )
    return Chart(
        plot.title,
        "lines",
        sentences(
            f"One {mark} for each variant: {y_title} against {x_title}.",
            mean(findings, plot.y),
            "The line on top is where never is." if _any_never(records) else "",
            _on_log(records, reach, "The vertical scale is logarithmic."),
        ),
        in_words(plot.title, values(findings, records)),
        [Panel("", None, [_placed(one, reach) for one in records], view)],
    )


def _heat(findings: Findings, plot: Plot) -> Chart:
    names = variants(findings)
    right, down, *rest = swept(findings)
    records = [drawn(findings, row, plot.y) for row in findings.rows]
    reach = extent((one["y"] for one in records), log=plot.log)
    for row, one in zip(findings.rows, records, strict=True):
        one |= {"a": said(row.parameters[right]), "b": said(row.parameters[down])}
    columns = list(dict.fromkeys(one["a"] for one in records))
    rows = list(dict.fromkeys(one["b"] for one in records))
    titles = (title(findings, right), title(findings, down), title(findings, plot.y))
    groups: dict[tuple[int, str], Records] = {}
    for row, one in zip(findings.rows, records, strict=True):
        others = point({name: row.parameters[name] for name in rest})
        groups.setdefault((one["i"], others), []).append(_placed(one, reach))
    panels = [
        Panel(
            ", ".join(filter(None, (names[number], others))),
            number,
            mine,
            vega.heat(reach, columns, rows, titles),
        )
        for (number, others), mine in groups.items()
    ]
    return Chart(
        plot.title,
        "heat",
        sentences(
            f"{titles[2]} in each cell, one map for each variant, all on one scale: "
            "the stronger the colour, the higher the value.",
            mean(findings, plot.y),
        ),
        in_words(plot.title, values(findings, records)),
        panels,
    )


def _label(findings: Findings, plot: Plot) -> str:
    """Return what is on the y axis; a bare unit says nothing that the ticks do not say."""
    return title(findings, plot.y) if plot.y_title in SUFFIXES else plot.y_title


def _placed(record: dict[str, Any], reach: Extent) -> dict[str, Any]:
    return {**record, "y": reach.at(record["y"], never=record["never"])}


def _any_never(records: Records) -> bool:
    return any(one["never"] for one in records)


def _on_log(records: Records, reach: Extent, text: str) -> str:
    if not reach.log:
        return ""
    low = any(one["y"] is not None and one["y"] < reach.low for one in records)
    return f"{text} Zero stands at its foot." if low else text
