"""Write the report of a study as one self-contained HTML file, or its charts as an image.

A study compares the variants of a scenario. The page has its question, the table of results, the
charts and the lesson (what the results teach). All text is escaped where it is inserted. Swept
parameters are those that were run with several values.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from importlib.metadata import version
from importlib.resources import files
from math import nan
from string import Template
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from tarry.core.extras import require_extra
from tarry.simulator.charts import build_charts
from tarry.simulator.documents import check_output_path, write_atomically
from tarry.simulator.formatting import (
    describe_average,
    format_parameter,
    format_value,
    join_sentences,
)
from tarry.simulator.vega import DARK, LIGHT, SELECTED_VARIANT, SHAPES, css_properties, vega_config

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from tarry.simulator.charts import Chart, Panel
    from tarry.simulator.study import StudyResults


_MAX_VISIBLE_ROWS = 12  # of the table on the page, which scrolls if it has more
_IMAGE_WIDTH_PX = 860
_HEADING_WIDTH_CHARS = 88
_CAPTION_WIDTH_CHARS = 108
_PNG_SCALE = 2.0
"""Pixels per point; 2 is sharp on a high-resolution screen."""
_CHART_TITLE_SIZE_PX, _QUESTION_SIZE_PX, _LABEL_SIZE_PX = 17, 21, 13
_SHAPE_PATHS = {
    "circle": "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10z",
    "square": "M1.5 1.5h9v9h-9z",
    "triangle-up": "M6 1l5.5 10H.5z",
    "diamond": "M6 0l5 6l-5 6l-5-6z",
    "triangle-down": "M6 11L.5 1h11z",
    "cross": "M4 .5h4V4h3.5v4H8v3.5H4V8H.5V4H4z",
    "triangle-right": "M11 6L1 .5v11z",
}
"""SVG paths of the shapes that identify variants; the keys are Vega's names of the shapes."""
_INDEPENDENT_SCALES = {"scale": {"color": "independent", "shape": "independent"}}


def write_html(results: StudyResults, path: Path, *, command: str = "") -> None:
    """Write the page. It shows `command`, the command line that created it."""
    check_output_path(path)
    write_atomically(path, render_page(results, command=command).encode())


def render_page(results: StudyResults, *, command: str = "") -> str:
    """Return the page as HTML. Equal results give equal pages."""
    study = results.study
    charts = build_charts(results)
    style = css_properties() + _read_asset("page.css")
    library, script = javascript_bundle(), _read_asset("page.js")
    average_note = describe_average(results, *(column.metric for column in study.columns))
    row_count = len(results.rows)
    scroll_note = f"{row_count} rows: the table scrolls." if row_count > _MAX_VISIBLE_ROWS else ""
    command_html = f'<pre class="scroll" tabindex="0"><code>{escape(command)}</code></pre>'
    return Template(_read_asset("page.html")).substitute(
        security_policy=_content_security_policy(style, library, script),
        style=style,
        name=escape(study.name),
        question=_render_prose(study.question or study.name),
        table=_render_table(results),
        table_note=join_sentences(average_note or "One run for each row.", scroll_note),
        legend=_render_legend(results),
        charts="\n".join(_render_figure(number, chart) for number, chart in enumerate(charts)),
        lesson=_render_lesson(study.lesson),
        command=command_html if command else "",
        facts=_render_run_facts(results),
        data=_chart_data(charts),
        library=library,
        script=script,
    )


def _read_asset(name: str) -> str:
    return files("tarry.simulator").joinpath("assets", name).read_text("utf-8")


def _content_security_policy(style: str, *scripts: str) -> str:
    """Return a policy that allows these scripts and this style, and no network access."""
    style_digest, *script_digests = (
        f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
        for text in (style, *scripts)
    )
    return (
        f"default-src 'none'; script-src {' '.join(script_digests)}; style-src {style_digest}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _render_table(results: StudyResults) -> str:
    study, names = results.study, results.variants
    titles = [study.title(name) for name in results.swept_parameters]
    titles += [column.title for column in study.columns]
    header_cells = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    rows: list[str] = []
    previous_values = results.rows[0].parameters if results.rows else {}
    for row in results.rows:
        metrics = row.metrics
        texts = [format_parameter(value) for value in row.parameters.values()]
        texts += [
            format_value(metrics.get(column.metric, nan), column.unit) for column in study.columns
        ]
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        index = names.index(row.variant)
        name = f'<th scope="row" class="variant">{_render_symbol(index)}{escape(row.variant)}</th>'
        # A gap precedes the first row of each combination of swept values.
        is_first = len(names) > 1 and row.parameters != previous_values
        css_class = ' class="first-of-combination"' if is_first else ""
        previous_values = row.parameters
        rows.append(f'<tr data-variant="{index}"{css_class}>{name}{cells}</tr>')
    variant_head = f'<th scope="col" class="variant">{escape(study.variant_parameter)}</th>'
    head = f"<thead><tr>{variant_head}{header_cells}</tr></thead>"
    return "\n".join(("<table>", head, "<tbody>", *rows, "</tbody>", "</table>"))


def _render_prose(text: str) -> str:
    """Return text as HTML; text in backquotes becomes a code element."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _render_symbol(variant_index: int) -> str:
    path = _SHAPE_PATHS[SHAPES[variant_index % len(SHAPES)]]
    colour_index = variant_index % len(LIGHT.marks)
    return (
        f'<svg class="mark v{colour_index}" viewBox="0 0 12 12" aria-hidden="true">'
        f'<path d="{path}"/></svg>'
    )


def _render_legend(results: StudyResults) -> str:
    return "\n".join(
        f'<button type="button" class="v{index % len(LIGHT.marks)}" '
        f'data-variant="{index}" aria-pressed="false">'
        f"{_render_symbol(index)}{escape(name)}</button>"
        for index, name in enumerate(results.variants)
    )


def _render_figure(number: int, chart: Chart) -> str:
    panels = "\n".join(
        _render_panel(f"view-{number}-{index}", panel) for index, panel in enumerate(chart.panels)
    )
    description = escape(chart.description)
    return (
        f'<figure class="{chart.kind}">\n'
        f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.caption)}</p></figcaption>\n"
        f'<div class="panels" role="img" aria-label="{description}">\n{panels}\n</div>\n'
        "</figure>"
    )


def _render_panel(element_id: str, panel: Panel) -> str:
    index = panel.variant_index
    attribute = "" if index is None else f' data-variant="{index}"'
    symbol = "" if index is None else _render_symbol(index)
    label = f'<p class="label">{symbol}{escape(panel.label)}</p>' if panel.label else ""
    view = f'<div class="view" id="{element_id}"></div>'
    return f'<div class="panel"{attribute}>{label}{view}</div>'


def _render_lesson(text: str) -> str:
    if not text:
        return ""
    paragraphs = "\n".join(f"<p>{_render_prose(part)}</p>" for part in text.split("\n\n"))
    head = '<h2 id="lesson">Lesson</h2>'
    return f'<section class="lesson" aria-labelledby="lesson">\n{head}\n{paragraphs}\n</section>'


def _render_run_facts(results: StudyResults) -> str:
    """Return what is needed to repeat the run: version, seed, trials and parameters."""
    facts = {
        "version of tarry": version("tarry"),
        "seed": str(results.seed),
        "trials": str(results.trial_count),
        **{name: format_parameter(value) for name, value in results.fixed_parameters.items()},
    }
    for name in results.swept_parameters:
        values = dict.fromkeys(format_parameter(row.parameters[name]) for row in results.rows)
        facts[f"{name} (swept)"] = ", ".join(values)
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items()
    )


def _chart_data(charts: list[Chart]) -> str:
    """Return the data of the charts as JSON. Panels may share records, and refer to their index."""
    autosize = {"type": "fit-x", "contains": "padding"}  # as wide as the panel's container
    padding = {"left": 0, "right": 0, "top": 6, "bottom": 4}
    params = [SELECTED_VARIANT]
    options = {"width": "container", "autosize": autosize, "padding": padding, "params": params}
    data: list[dict[str, Any]] = []
    for chart in charts:
        records_by_id = {id(panel.records): panel.records for panel in chart.panels}
        ids = list(records_by_id)
        panels = [
            {"view": {**options, **panel.view}, "records_index": ids.index(id(panel.records))}
            for panel in chart.panels
        ]
        data.append({"records": list(records_by_id.values()), "panels": panels})
    themes = {"light": vega_config(LIGHT, legend=False), "dark": vega_config(DARK, legend=False)}
    text = json.dumps({"charts": data, "themes": themes}, allow_nan=False, separators=(",", ":"))
    # These characters could end the script element that contains the JSON, or start a comment.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_png(results: StudyResults, path: Path) -> None:
    """Write the charts as a PNG file."""
    check_output_path(path)
    png: bytes = import_vl_convert().vegalite_to_png(image_spec(results), scale=_PNG_SCALE)
    write_atomically(path, png)


def write_svg(results: StudyResults, path: Path) -> None:
    """Write the charts as an SVG file."""
    check_output_path(path)
    svg: str = import_vl_convert().vegalite_to_svg(image_spec(results))
    write_atomically(path, svg.encode())


def image_spec(results: StudyResults) -> dict[str, Any]:
    """Return the Vega-Lite specification of all charts, one below the other."""
    question = wrap(results.study.question, _HEADING_WIDTH_CHARS)
    return {
        "title": {"text": question, "fontSize": _QUESTION_SIZE_PX, "offset": 24},
        "padding": 32,
        "spacing": 48,
        "config": vega_config(LIGHT, legend=True),
        "params": [SELECTED_VARIANT],
        "vconcat": [_chart_spec(chart) for chart in build_charts(results)],
        "resolve": _INDEPENDENT_SCALES,
    }


def _chart_spec(chart: Chart) -> dict[str, Any]:
    title = {
        "text": wrap(chart.title, _HEADING_WIDTH_CHARS),
        "subtitle": wrap(chart.caption, _CAPTION_WIDTH_CHARS),
        "fontSize": _CHART_TITLE_SIZE_PX,
        "subtitleFontSize": _LABEL_SIZE_PX,
        "subtitlePadding": 6,
        "offset": 14,
    }
    panels = [_panel_spec(panel) for panel in chart.panels]
    return {"title": title, "spacing": 14, "vconcat": panels, "resolve": _INDEPENDENT_SCALES}


def _panel_spec(panel: Panel) -> dict[str, Any]:
    label = {"text": panel.label, "fontSize": _LABEL_SIZE_PX, "limit": _IMAGE_WIDTH_PX}
    title = {"title": label} if panel.label else {}
    return {**title, "width": _IMAGE_WIDTH_PX, "data": {"values": panel.records}, **panel.view}


def import_vl_convert() -> ModuleType:
    """Return the module `vl_convert` (it contains Vega, Vega-Lite and Vega-Embed), or raise."""
    with require_extra("reports need vl-convert-python", "sim"):
        import vl_convert
    return vl_convert


@cache
def javascript_bundle() -> str:
    """Return the JavaScript libraries for a page. Cached, because building them takes seconds."""
    code: str = import_vl_convert().javascript_bundle()
    # The HTML parser ends a script element at the first "</script", even in a string literal, and
    # "<!--" starts a comment.
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n")
