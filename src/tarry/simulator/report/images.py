"""Write the charts of a study as one PNG or SVG image, and import the library that draws them."""

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
_MAX_TITLE_LINE = 88
_MAX_CAPTION_LINE = 108
"""Characters after which the text is wrapped."""
_PNG_SCALE = 2.0
"""Pixels per point; 2 is sharp on a high-resolution screen."""
_TITLE_SIZE_PX, _QUESTION_SIZE_PX, _LABEL_SIZE_PX = 17, 21, 13


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
        "text": wrap(results.study.question, _MAX_TITLE_LINE),
        "fontSize": _QUESTION_SIZE_PX,
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
        "text": wrap(chart.title, _MAX_TITLE_LINE),
        "subtitle": wrap(chart.caption, _MAX_CAPTION_LINE),
        "fontSize": _TITLE_SIZE_PX,
        "subtitleFontSize": _LABEL_SIZE_PX,
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
    label = {"text": panel.label, "fontSize": _LABEL_SIZE_PX, "limit": _WIDTH_PX}
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
    """Return the JavaScript libraries for a page; cached, because building takes seconds."""
    code: str = import_vl_convert().javascript_bundle()
    # The HTML parser ends a script element at the first "</script", even in a string literal, and
    # "<!--" starts a comment.
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n")
