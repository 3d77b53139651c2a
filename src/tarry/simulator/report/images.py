"""The charts of a study as one PNG or SVG image, and the library that draws charts."""

from __future__ import annotations

from functools import cache
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from tarry.errors import MissingExtra
from tarry.simulator.files.file_io import check_writable, write_atomically
from tarry.simulator.report.charts import build_charts
from tarry.simulator.report.theme import LIGHT, vega_config
from tarry.simulator.report.vega import PICKED

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from tarry.simulator.report.charts import Chart, Panel
    from tarry.simulator.study import StudyResults

_WIDTH_PX = 860
_TITLE_CHARACTERS = 88
_CAPTION_CHARACTERS = 108
_PNG_SCALE = 2.0
"""Pixels per point: sharp on a high-resolution screen."""
_TITLE_SIZE, _QUESTION_SIZE, _LABEL_SIZE = 17, 21, 13


def write_png(results: StudyResults, path: Path) -> None:
    """Write the charts as a PNG file."""
    check_writable(path)
    png: bytes = import_vl_convert().vegalite_to_png(image_spec(results), scale=_PNG_SCALE)
    write_atomically(path, png)


def write_svg(results: StudyResults, path: Path) -> None:
    """Write the charts as an SVG file."""
    check_writable(path)
    svg: str = import_vl_convert().vegalite_to_svg(image_spec(results))
    write_atomically(path, svg.encode())


def image_spec(results: StudyResults) -> dict[str, Any]:
    """Return the Vega-Lite specification of all charts, one below the other."""
    question = {
        "text": wrap(results.study.question, _TITLE_CHARACTERS),
        "fontSize": _QUESTION_SIZE,
        "offset": 24,
    }
    return {
        "title": question,
        "padding": 32,
        "spacing": 48,
        "config": vega_config(LIGHT, legend=True),
        "params": [PICKED],
        "vconcat": [_chart_spec(chart) for chart in build_charts(results)],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }


def _chart_spec(chart: Chart) -> dict[str, Any]:
    title = {
        "text": wrap(chart.title, _TITLE_CHARACTERS),
        "subtitle": wrap(chart.caption, _CAPTION_CHARACTERS),
        "fontSize": _TITLE_SIZE,
        "subtitleFontSize": _LABEL_SIZE,
        "subtitlePadding": 6,
        "offset": 14,
    }
    return {
        "title": title,
        "spacing": 14,
        "vconcat": [_panel_spec(panel) for panel in chart.panels],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }


def _panel_spec(panel: Panel) -> dict[str, Any]:
    label = {"text": panel.label, "fontSize": _LABEL_SIZE, "limit": _WIDTH_PX}
    title = {"title": label} if panel.label else {}
    return {**title, "width": _WIDTH_PX, "data": {"values": panel.records}, **panel.view}


def import_vl_convert() -> ModuleType:
    """Return the module `vl_convert`, which contains Vega, Vega-Lite and Vega-Embed."""
    try:
        import vl_convert
    except ImportError as exc:
        msg = "reports need vl-convert-python: pip install 'tarry[sim]'"
        raise MissingExtra(msg) from exc
    return vl_convert


@cache
def javascript_bundle() -> str:
    """Return the script that draws the charts of a page. Building it takes seconds."""
    code: str = import_vl_convert().javascript_bundle()
    # In a page a script element ends at the first such tag, even inside a string.
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n")
