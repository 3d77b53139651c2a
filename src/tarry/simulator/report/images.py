"""The library that draws, and all charts of a study in one picture, for a document or a chat."""

from __future__ import annotations

from functools import cache
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from tarry.errors import MissingExtra
from tarry.simulator.files.disk import check_place, write_atomically
from tarry.simulator.report.charts import charts
from tarry.simulator.report.theme import LIGHT, config
from tarry.simulator.report.vega import PICKED

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from tarry.simulator.report.charts import Chart, Panel
    from tarry.simulator.study import Findings

_WIDTH = 860
_LETTERS = 88
_SCALE = 2.0
_TITLE, _QUESTION, _LABEL = 17, 21, 13


def write_png(findings: Findings, path: Path) -> None:
    """Write the charts as PNG, with pixels enough for a sharp screen."""
    check_place(path)
    png: bytes = drawing_library().vegalite_to_png(picture(findings), scale=_SCALE)
    write_atomically(path, png)


def write_svg(findings: Findings, path: Path) -> None:
    """Write the charts as SVG."""
    check_place(path)
    svg: str = drawing_library().vegalite_to_svg(picture(findings))
    write_atomically(path, svg.encode())


def picture(findings: Findings) -> dict[str, Any]:
    """Return all charts below each other as one Vega-Lite specification."""
    question = {
        "text": wrap(findings.study.question, _LETTERS),
        "fontSize": _QUESTION,
        "offset": 24,
    }
    return {
        "title": question,
        "padding": 32,
        "spacing": 48,
        "config": config(LIGHT, legend=True),
        "params": [PICKED],
        "vconcat": [_column(chart) for chart in charts(findings)],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }


def _column(chart: Chart) -> dict[str, Any]:
    title = {
        "text": wrap(chart.title, _LETTERS),
        "subtitle": wrap(chart.reading, _LETTERS + 20),
        "fontSize": _TITLE,
        "subtitleFontSize": _LABEL,
        "subtitlePadding": 6,
        "offset": 14,
    }
    return {
        "title": title,
        "spacing": 14,
        "vconcat": [_view(panel) for panel in chart.panels],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }


def _view(panel: Panel) -> dict[str, Any]:
    label = {"text": panel.label, "fontSize": _LABEL, "limit": _WIDTH}
    titled = {"title": label} if panel.label else {}
    return {**titled, "width": _WIDTH, "data": {"values": panel.records}, **panel.view}


def drawing_library() -> ModuleType:
    """Return vl_convert, which carries Vega, Vega-Lite and Vega-Embed."""
    try:
        import vl_convert
    except ImportError as exc:
        msg = "reports need vl-convert-python: pip install 'tarry[sim]'"
        raise MissingExtra(msg) from exc
    return vl_convert


@cache
def bundle() -> str:
    """Return the script that draws, whole; it takes seconds to make."""
    code: str = drawing_library().javascript_bundle()
    # Inside a page the script ends at the first such tag, even in a string.
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n")
