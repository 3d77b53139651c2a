from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import vl_convert

from tarry.simulator.report.charts import Chart, build_charts
from tarry.simulator.report.images import image_spec
from tarry.simulator.study import Plot, StudyResults, StudyRow
from tests.simulator.report.sample_results import (
    BARS,
    LINES,
    SERIES,
    VARIANTS,
    MadeUp,
    findings,
    study,
    swept,
)

CLIENTS: dict[str, tuple[Any, ...]] = {"clients": (10, 100, 1000)}
GRID: dict[str, tuple[Any, ...]] = {"clients": (10, 100), "servers.db.rate": (0.5, 5.0, 50.0)}
CUBE = {**GRID, "jitter": ("none", "full")}


def only(of: StudyResults) -> Chart:
    """Return the one chart that there is."""
    (chart,) = build_charts(of)
    return chart


def with_values(*values: float, plot: Plot = BARS) -> StudyResults:
    """Findings in which the metric of the plot has these values, one for each variant."""
    of = study(plots=(plot,), variants=tuple(f"variant {n}" for n in range(len(values))))
    rows = [
        StudyRow(name, {}, [MadeUp({plot.y: value})])
        for name, value in zip(of.variants, values, strict=True)
    ]
    return StudyResults(of, 0, 1, rows)


def compiles(of: StudyResults) -> bool:
    """Say whether it can be drawn, and without a NaN in it."""
    return "NaN" not in vl_convert.vegalite_to_svg(image_spec(of))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("made", "plot", "kind", "panels"),
    [
        (findings, SERIES, "series", 5),
        (findings, BARS, "bars", 1),
        (findings, LINES, "bars", 1),
        (lambda **changes: swept(CLIENTS, **changes), SERIES, "series", 5),
        (lambda **changes: swept(CLIENTS, **changes), BARS, "bars", 3),
        (lambda **changes: swept(CLIENTS, **changes), LINES, "lines", 1),
        (lambda **changes: swept(GRID, **changes), LINES, "heat", 5),
        (lambda **changes: swept(GRID, **changes), BARS, "bars", 6),
        (lambda **changes: swept(CUBE, **changes), LINES, "heat", 10),
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
def test_kinds(
    made: Callable[..., StudyResults], plot: Plot, kind: str, panels: int, log: bool
) -> None:
    """Every kind of plot is drawn from every kind of findings."""
    of = made(plots=(plot._replace(log=log),))
    chart = only(of)
    assert (kind, panels, True) == (chart.kind, len(chart.panels), compiles(of))


def test_lines_over_a_metric() -> None:
    """A metric can be drawn against another one."""
    of = swept(CLIENTS, plots=(Plot("lines", "success_rate", "t", x="amplification"),))
    record = only(of).panels[0].records[0]
    assert (40.0, "1.06x", "40 %") == (record["y"], record["at"], record["text"])
    assert record["x"] == pytest.approx(1.06)
    assert compiles(of)


def test_lines_over_names() -> None:
    """A swept parameter that is no number stands in the order that was asked for."""
    of = swept({"jitter": ("none", "full", "equal")}, plots=(LINES,))
    chart = only(of)
    sort = chart.panels[0].view["layer"][0]["encoding"]["x"]["sort"]
    assert ["none", "full", "equal"] == sort
    assert compiles(of)


@pytest.mark.parametrize("kind", ["bars", "lines"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [(inf, 1.0), (inf, inf), (nan, 2.0), (nan, nan), (0.0, 0.0), (-1.0, 3.0), (0.0, 1e12)],
    ids=["some never", "all never", "one unknown", "all unknown", "all zero", "negative", "huge"],
)
def test_values_that_break_charts(kind: str, log: bool, values: tuple[float, ...]) -> None:
    """Whatever the values are, the chart is drawn."""
    plot = Plot(kind, "recovered_after", "t", x="recovered_after", log=log)
    assert compiles(with_values(*values, plot=plot))


def test_never_is_shown_as_never() -> None:
    """A time that never came has a bar to the end, its word, and a sentence that explains it."""
    chart = only(with_values(inf, 10.0))
    first, second = chart.panels[0].records
    domain = chart.panels[0].view["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert ("never", True, domain[1]) == (first["text"], first["never"], first["y"])
    assert ("10 s", False, 10.0) == (second["text"], second["never"], second["y"])
    assert "dashed bar means never" in chart.caption


def test_without_never_it_is_not_mentioned() -> None:
    """Nothing is explained that is not there."""
    assert "never" not in only(with_values(1.0, 10.0)).caption


def test_panels_of_series_share_scale_and_data() -> None:
    """Rows that are compared have one scale, and every other variant behind them."""
    panels = only(findings(plots=(SERIES,))).panels
    assert list(VARIANTS) == [panel.label for panel in panels]
    assert 1 == len({str(panel.view["encoding"]["y"]["scale"]) for panel in panels})
    assert 1 == len({id(panel.records) for panel in panels})


def test_long_series_keep_their_peaks() -> None:
    """A series of an hour is thinned to what a screen can show, and its peak stays."""
    of = findings(plots=(SERIES,), variants=("one",))
    values = [1.0] * 3600
    values[1801] = 99.0
    of.rows[0].trials[0] = MadeUp({"requests": 1.0}, {"requests": values})
    records = only(of).panels[0].records
    assert (600, 99.0, 6.0) == (
        len(records),
        max(one["y"] for one in records),
        records[1]["x"],
    )


def test_times_of_trouble_are_shaded_behind_a_series() -> None:
    """First of all layers, and no further than the run; the words below the title say when."""
    chart = only(findings(plots=(SERIES,)))
    layers = [layer for layer in chart.panels[0].view["layer"] if "data" in layer]
    assert layers == chart.panels[0].view["layer"][: len(layers)]
    spans = [
        tuple(layer["data"]["values"][0].values())
        for layer in layers
        if layer["mark"]["type"] == "rect"
    ]
    assert [(20.0, 40.0, "frozen"), (110.0, 119.0, "maintenance")] == spans
    assert "Shaded: frozen, 20 s to 40 s; maintenance, 110 s to 125 s." in chart.caption


def test_no_series() -> None:
    """Trials without a time series make an empty chart, not an error."""
    assert [] == only(with_values(1.0, plot=SERIES)).panels


def test_no_rows() -> None:
    """Findings without rows make an empty chart, not an error."""
    assert [] == only(StudyResults(study(plots=(BARS,)), 0, 1, [])).panels


def test_words_for_those_who_do_not_see() -> None:
    """The chart in words has the name and the value of each variant."""
    alt = only(with_values(inf, 10.0)).description
    assert "Time until all was well again. variant 0: never; variant 1: 10 s." == alt


def test_words_have_an_end() -> None:
    """A sweep of many points is not read aloud to the last."""
    alt = only(swept({"clients": tuple(range(1, 40))}, plots=(LINES,))).description
    assert alt.endswith("; the table has all values.")
