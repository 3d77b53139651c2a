from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import vl_convert

from tarry.simulator.charts import Chart, build_charts
from tarry.simulator.report import image_spec
from tarry.simulator.study import Plot, StudyResults, StudyRow
from tests.simulator.sample_results import (
    BARS,
    LINES,
    SERIES,
    VARIANTS,
    SampleTrial,
    sample_results,
    sample_study,
    swept_results,
)

CLIENTS: dict[str, tuple[Any, ...]] = {"clients": (10, 100, 1000)}
GRID: dict[str, tuple[Any, ...]] = {"clients": (10, 100), "servers.db.rate": (0.5, 5.0, 50.0)}
CUBE = {**GRID, "jitter": ("none", "full")}


def only_chart(results: StudyResults) -> Chart:
    """Return the only chart of the results."""
    (chart,) = build_charts(results)
    return chart


def results_with_values(*values: float, plot: Plot = BARS) -> StudyResults:
    """Return results in which the metric of the plot has these values, one for each variant."""
    study = sample_study(plots=(plot,), variants=tuple(f"variant {n}" for n in range(len(values))))
    rows = [
        StudyRow(name, {}, [SampleTrial({plot.y: value})])
        for name, value in zip(study.variants, values, strict=True)
    ]
    return StudyResults(study, 0, 1, rows)


def can_be_drawn(results: StudyResults) -> bool:
    """Return whether the charts can be drawn and contain no NaN."""
    return "NaN" not in vl_convert.vegalite_to_svg(image_spec(results))


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    ("make_results", "plot", "kind", "panels"),
    [
        (sample_results, SERIES, "series", 5),
        (sample_results, BARS, "bars", 1),
        (sample_results, LINES, "bars", 1),
        (lambda **changes: swept_results(CLIENTS, **changes), SERIES, "series", 5),
        (lambda **changes: swept_results(CLIENTS, **changes), BARS, "bars", 3),
        (lambda **changes: swept_results(CLIENTS, **changes), LINES, "lines", 1),
        (lambda **changes: swept_results(GRID, **changes), LINES, "heat", 5),
        (lambda **changes: swept_results(GRID, **changes), BARS, "bars", 6),
        (lambda **changes: swept_results(CUBE, **changes), LINES, "heat", 10),
    ],
    ids=[
        "series",
        "bars",
        "lines without a sweep",
        "series of a sweep",
        "bars of a sweep",
        "lines",
        "heat map",
        "bars of a grid",
        "heat map of a cube",
    ],
)
def test_each_kind_of_plot_is_drawn(
    make_results: Callable[..., StudyResults], plot: Plot, kind: str, panels: int, is_log: bool
) -> None:
    """Each kind of plot can be drawn from each kind of results."""
    results = make_results(plots=(plot._replace(is_log=is_log),))
    chart = only_chart(results)
    assert (kind, panels, True) == (chart.kind, len(chart.panels), can_be_drawn(results))


def test_metric_is_drawn_against_another_metric() -> None:
    results = swept_results(CLIENTS, plots=(Plot("lines", "success_rate", "t", x="amplification"),))
    record = only_chart(results).panels[0].records[0]
    assert (40.0, "1.06x", "40 %") == (record["y"], record["at"], record["text"])
    assert record["x"] == pytest.approx(1.06)
    assert can_be_drawn(results)


def test_names_on_the_x_axis_keep_their_order() -> None:
    """Swept values that are not numbers are drawn in the order of the sweep."""
    results = swept_results({"jitter": ("none", "full", "equal")}, plots=(LINES,))
    chart = only_chart(results)
    sort = chart.panels[0].view["layer"][0]["encoding"]["x"]["sort"]
    assert ["none", "full", "equal"] == sort
    assert can_be_drawn(results)


@pytest.mark.parametrize("kind", ["bars", "lines"])
@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    "values",
    [(inf, 1.0), (inf, inf), (nan, 2.0), (nan, nan), (0.0, 0.0), (-1.0, 3.0), (0.0, 1e12)],
    ids=["some never", "all never", "one unknown", "all unknown", "all zero", "negative", "huge"],
)
def test_unusual_values_are_drawn(kind: str, is_log: bool, values: tuple[float, ...]) -> None:
    """Infinite, missing, zero, negative and huge values can be drawn."""
    plot = Plot(kind, "recovered_after", "t", x="recovered_after", is_log=is_log)
    assert can_be_drawn(results_with_values(*values, plot=plot))


def test_infinite_time_is_shown_as_never() -> None:
    """An infinite time has a bar up to the end of the axis, labelled "never"."""
    chart = only_chart(results_with_values(inf, 10.0))
    first, second = chart.panels[0].records
    domain = chart.panels[0].view["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert ("never", True, domain[1]) == (first["text"], first["never"], first["y"])
    assert ("10 s", False, 10.0) == (second["text"], second["never"], second["y"])
    assert "dashed bar means never" in chart.caption


def test_caption_mentions_never_only_if_needed() -> None:
    """Without infinite values the caption does not explain "never"."""
    assert "never" not in only_chart(results_with_values(1.0, 10.0)).caption


def test_panels_of_series_share_scale_and_data() -> None:
    """All panels of a series have the same scale and show all variants."""
    panels = only_chart(sample_results(plots=(SERIES,))).panels
    assert list(VARIANTS) == [panel.label for panel in panels]
    assert 1 == len({str(panel.view["encoding"]["y"]["scale"]) for panel in panels})
    assert 1 == len({id(panel.records) for panel in panels})


def test_long_series_keep_their_peaks() -> None:
    """A long series is thinned, and its peak is kept."""
    results = sample_results(plots=(SERIES,), variants=("one",))
    values = [1.0] * 3600
    values[1801] = 99.0
    results.rows[0].trials[0] = SampleTrial({"requests": 1.0}, {"requests": values})
    records = only_chart(results).panels[0].records
    assert (600, 99.0, 6.0) == (
        len(records),
        max(record["y"] for record in records),
        records[1]["x"],
    )


def test_spans_are_shaded_behind_a_series() -> None:
    """Spans are the first layers, are cut at the end of the run, and are named in the caption."""
    chart = only_chart(sample_results(plots=(SERIES,)))
    layers = [layer for layer in chart.panels[0].view["layer"] if "data" in layer]
    assert layers == chart.panels[0].view["layer"][: len(layers)]
    spans = [
        tuple(layer["data"]["values"][0].values())
        for layer in layers
        if layer["mark"]["type"] == "rect"
    ]
    assert [(20.0, 40.0, "frozen"), (110.0, 119.0, "maintenance")] == spans
    assert "Shaded: frozen, 20 s to 40 s; maintenance, 110 s to 125 s." in chart.caption


def test_trials_without_a_series_give_an_empty_chart() -> None:
    assert [] == only_chart(results_with_values(1.0, plot=SERIES)).panels


def test_description_has_all_values() -> None:
    """The text description of a chart has the name and the value of each variant."""
    description = only_chart(results_with_values(inf, 10.0)).description
    assert "Time to recovery. variant 0: never; variant 1: 10 s." == description


def test_description_is_limited() -> None:
    """The description of a sweep with many points ends with a reference to the table."""
    description = only_chart(
        swept_results({"clients": tuple(range(1, 40))}, plots=(LINES,))
    ).description
    assert description.endswith("; the table has all values.")
