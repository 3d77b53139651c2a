"""Build the charts of a study: for each plot the panels, a caption and a text description.

A study compares the variants of a scenario. Its results have a row for each variant, or for each
variant and combination of values if parameters are swept (run with several values).
"""

from __future__ import annotations

from math import ceil, inf, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.simulator import vega
from tarry.simulator.formatting import (
    UNIT_SUFFIXES,
    describe_average,
    describe_values,
    format_parameter,
    format_swept_parameters,
    format_value,
    is_numeric,
    join_sentences,
    scale_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.simulator.study import Plot, StudyResults, StudyRow
    from tarry.simulator.vega import AxisRange, Spec

Records = list[dict[str, Any]]
"""The data of a chart; the docstring of `vega` describes the fields of a record."""

# The factor by which the axis is lengthened beyond its highest value, see `vega.axis_range`.
_SERIES_STRETCH = 1.02
_BARS_STRETCH = 1.25  # leaves space for the value next to the longest bar
_NEVER_STRETCH = 1.15  # leaves space for the line of values that are "never" (infinite)
_MAX_SERIES_POINTS = 600


class Panel(NamedTuple):
    """One part of a chart, with its own axes. `variant_index` is None if it shows all variants."""

    label: str
    variant_index: int | None
    records: Records
    view: Spec
    """The Vega-Lite specification without the records."""


class Chart(NamedTuple):
    """The chart of one plot of a study. It has no panels if there is nothing to draw."""

    title: str
    kind: str
    """The CSS class of the chart: "series", "bars", "lines", "heat" or "nothing"."""
    caption: str
    description: str
    """The values as text, for screen readers."""
    panels: list[Panel]


def build_charts(results: StudyResults) -> list[Chart]:
    """Return the charts of a study in the order of its plots."""
    return [_build_chart(results, plot) for plot in results.study.plots]


def _build_chart(results: StudyResults, plot: Plot) -> Chart:
    if not results.rows:
        return Chart(plot.title, "nothing", "Nothing was run.", "No values.", [])
    if plot.kind == "series":
        return _series_chart(results, plot)
    if plot.kind == "lines":
        if plot.x in results.rows[0].metrics or len(results.swept_parameters) == 1:
            return _line_chart(results, plot)
        if len(results.swept_parameters) > 1:
            return _heat_map(results, plot)
    return _bar_chart(results, plot)


def _series_chart(results: StudyResults, plot: Plot) -> Chart:
    names = results.variants
    # Only the last combination of swept values is drawn: it usually has the highest load.
    last_combination = results.rows[-1].parameters
    rows = [row for row in results.rows if row.parameters == last_combination]
    all_series = [(names.index(row.variant), *_thin_series(row, plot.y)) for row in rows]
    all_series = [(index, width, points) for index, width, points in all_series if points]
    values = (value for *_, points in all_series for value in points)
    y_range = vega.axis_range(values, is_log=plot.is_log, stretch=_SERIES_STRETCH)
    records: Records = [
        {
            "i": variant_index,
            "v": names[variant_index],
            "x": number * width,
            "y": y_range.position(value),
            "at": format_value(number * width, "s"),
            "text": format_value(value),
        }
        for variant_index, width, points in all_series
        for number, value in enumerate(points)
    ]
    y_title = _y_title(results, plot)
    duration = max((record["x"] for record in records), default=0.0)
    spans = [span for span in plot.spans if span[0] < duration]
    span_texts = [
        f"{label}, {format_value(start, 's')} to {format_value(end, 's')}"
        for start, end, label in spans
    ]
    background = [layer for span in spans for layer in vega.span_layers(span, duration)]
    panels: list[Panel] = []
    peaks: list[tuple[str, str]] = []
    for index, _, points in all_series:
        view = vega.series_view(names, index, len(points), y_range, y_title, background)
        panels.append(Panel(names[index], index, records, view))
        peaks.append((names[index], format_value(max(points))))
    return Chart(
        plot.title,
        "series",
        join_sentences(
            f"One row for each variant, {y_title} over time, all on the same "
            f"{'log ' if plot.is_log else ''}scale; the other variants are grey.",
            f"Shaded: {'; '.join(span_texts)}." if span_texts else "",
            f"Drawn for {format_swept_parameters(last_combination)}." if last_combination else "",
            f"The first of {results.trial_count} trials." if results.trial_count > 1 else "",
        ),
        describe_values(f"{plot.title}, highest value", peaks),
        panels,
    )


def _bar_chart(results: StudyResults, plot: Plot) -> Chart:
    records = [_build_record(results, row, plot.y) for row in results.rows]
    values = (record["y"] for record in records)
    x_range = vega.axis_range(values, is_log=plot.is_log, stretch=_BARS_STRETCH)
    records_by_label: dict[str, Records] = {}
    for row, record in zip(results.rows, records, strict=True):
        label = format_swept_parameters(row.parameters)
        records_by_label.setdefault(label, []).append(_with_position(record, x_range))
    unit = results.study.unit(plot.y)
    view = vega.bars_view(results.variants, x_range, unit, _y_title(results, plot))
    panels = [Panel(label, None, records, view) for label, records in records_by_label.items()]
    never_note = "A dashed bar means never." if _has_infinite_value(records) else ""
    scale_note = _describe_log_scale(records, x_range, "The scale is logarithmic.")
    sentences = ("One bar for each variant.", never_note, scale_note)
    return _metric_chart(results, plot, "bars", sentences, records, panels)


def _line_chart(results: StudyResults, plot: Plot) -> Chart:
    names, study = results.variants, results.study
    y_title = _y_title(results, plot)
    records = [_build_record(results, row, plot.y) for row in results.rows]
    stretch = _NEVER_STRETCH if _has_infinite_value(records) else 1.0
    values = (record["y"] for record in records)
    y_range = vega.axis_range(values, is_log=plot.is_log, stretch=stretch)
    x_is_metric = plot.x in results.rows[0].metrics
    x_name = plot.x if x_is_metric else results.swept_parameters[0]
    x_unit = study.unit(x_name) if x_is_metric else ""
    if x_is_metric:
        metric_values = [row.metrics[x_name] for row in results.rows]
        x_values = [scale_value(value, x_unit) for value in metric_values]
        x_texts = [format_value(value, x_unit) for value in metric_values]
    else:
        x_values = [row.parameters[x_name] for row in results.rows]
        x_texts = [format_parameter(value) for value in x_values]
    positions = x_values if is_numeric(x_values) else list(map(format_parameter, x_values))
    for index, record in enumerate(records):
        record |= {"n": index, "x": positions[index], "at": x_texts[index]}
    x_title = study.title(x_name)
    mark = "line" if len(results.rows) > len(names) else "point"
    channel = vega.x_channel(x_values, x_title, x_unit, is_swept=not x_is_metric)
    view = vega.lines_view(names, y_range, channel, study.unit(plot.y), (x_title, y_title))
    never_note = "Values on the line at the top mean never." if _has_infinite_value(records) else ""
    scale_note = _describe_log_scale(records, y_range, "The vertical scale is logarithmic.")
    first_sentence = f"One {mark} for each variant: {y_title} against {x_title}."
    sentences = (first_sentence, never_note, scale_note)
    panel = Panel("", None, [_with_position(record, y_range) for record in records], view)
    return _metric_chart(results, plot, "lines", sentences, records, [panel])


def _heat_map(results: StudyResults, plot: Plot) -> Chart:
    names, study = results.variants, results.study
    x_name, y_name, *other_names = results.swept_parameters
    records = [_build_record(results, row, plot.y) for row in results.rows]
    value_range = vega.axis_range((record["y"] for record in records), is_log=plot.is_log)
    groups: dict[tuple[int, str], Records] = {}  # by variant index and other swept values
    for row, record in zip(results.rows, records, strict=True):
        record["a"] = format_parameter(row.parameters[x_name])
        record["b"] = format_parameter(row.parameters[y_name])
        label = format_swept_parameters({name: row.parameters[name] for name in other_names})
        groups.setdefault((record["i"], label), []).append(_with_position(record, value_range))
    columns = list(dict.fromkeys(record["a"] for record in records))
    rows = list(dict.fromkeys(record["b"] for record in records))
    titles = (study.title(x_name), study.title(y_name), study.title(plot.y))
    view = vega.heat_map_view(value_range, columns, rows, titles)
    panels = [
        Panel(", ".join(filter(None, (names[index], label))), index, group, view)
        for (index, label), group in groups.items()
    ]
    sentence = (
        f"{titles[2]} in each cell, one map for each variant, all on the same scale: "
        "a stronger colour means a higher value."
    )
    return _metric_chart(results, plot, "heat", (sentence,), records, panels)


def _metric_chart(
    results: StudyResults,
    plot: Plot,
    kind: str,
    caption_sentences: Sequence[str],
    records: Records,
    panels: list[Panel],
) -> Chart:
    """Return a chart of the metric `plot.y`; `records` has one record for each row."""
    average_note = describe_average(results, plot.y)
    label_parts = ((row.variant, format_swept_parameters(row.parameters)) for row in results.rows)
    labels = (" at ".join(filter(None, parts)) for parts in label_parts)
    values = [(label, record["text"]) for label, record in zip(labels, records, strict=True)]
    caption = join_sentences(caption_sentences[0], average_note, *caption_sentences[1:])
    return Chart(plot.title, kind, caption, describe_values(plot.title, values), panels)


def _build_record(results: StudyResults, row: StudyRow, metric: str) -> dict[str, Any]:
    """Return the record of a metric of a row; `y` is None if the value is infinite or missing."""
    value = row.metrics.get(metric, nan)
    unit = results.study.unit(metric)
    return {
        "i": results.variants.index(row.variant),
        "v": row.variant,
        "y": scale_value(value, unit) if isfinite(value) else None,
        "never": value == inf,
        "text": format_value(value, unit),
    }


def _thin_series(row: StudyRow, name: str) -> tuple[float, list[float]]:
    """Return a time series of the first trial: the seconds between two points, and the points.

    A point of a long series is the highest of several values, because peaks must stay visible.
    """
    trial = row.trials[0] if row.trials else None
    values: Sequence[float] = getattr(trial, "series", {}).get(name, ())
    bucket: float = getattr(trial, "bucket", 1.0)
    group_size = max(1, ceil(len(values) / _MAX_SERIES_POINTS))
    groups = (values[start : start + group_size] for start in range(0, len(values), group_size))
    return bucket * group_size, [max(group) for group in groups]


def _y_title(results: StudyResults, plot: Plot) -> str:
    """Return `plot.y_title`, or the title of the metric if `plot.y_title` is only a unit or ""."""
    return results.study.title(plot.y) if plot.y_title in UNIT_SUFFIXES else plot.y_title


def _with_position(record: dict[str, Any], value_range: AxisRange) -> dict[str, Any]:
    """Return a copy of a record in which `y` is the position of the value on its axis."""
    return {**record, "y": value_range.position(record["y"], never=record["never"])}


def _has_infinite_value(records: Records) -> bool:
    return any(record["never"] for record in records)


def _describe_log_scale(records: Records, value_range: AxisRange, text: str) -> str:
    """Return the text, with a note if a record is zero; return "" for a linear scale."""
    if not value_range.is_log:
        return ""
    has_zero = any(record["y"] is not None and record["y"] < value_range.low for record in records)
    return f"{text} Zero is drawn at its low end." if has_zero else text
