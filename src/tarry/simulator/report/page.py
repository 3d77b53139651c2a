"""The page: one file with the question, the numbers, the charts and the lesson, and all they need.

Everything that comes from outside is escaped where it is put in: as HTML, or as JSON in HTML.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from tarry.simulator.files.disk import check_place, write_atomically
from tarry.simulator.report.charts import charts
from tarry.simulator.report.formatting import (
    in_force,
    mean,
    said,
    sentences,
    shown,
    swept,
    title,
    variants,
)
from tarry.simulator.report.images import bundle
from tarry.simulator.report.theme import DARK, LIGHT, SHAPES, config, css
from tarry.simulator.report.vega import PICKED

if TYPE_CHECKING:
    from pathlib import Path

    from tarry.simulator.report.charts import Chart, Panel
    from tarry.simulator.study import Findings

_ROWS_IN_VIEW = 12
_OUTLINES = {
    "circle": "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10z",
    "square": "M1.5 1.5h9v9h-9z",
    "triangle-up": "M6 1l5.5 10H.5z",
    "diamond": "M6 0l5 6l-5 6l-5-6z",
    "triangle-down": "M6 11L.5 1h11z",
    "cross": "M4 .5h4V4h3.5v4H8v3.5H4V8H.5V4H4z",
    "triangle-right": "M11 6L1 .5v11z",
}


def write_html(findings: Findings, path: Path, *, command: str = "") -> None:
    """Write the report; `command` is the line that made it, if there was one."""
    check_place(path)
    write_atomically(path, page(findings, command=command).encode())


def page(findings: Findings, *, command: str = "") -> str:
    """Return the whole page. The same findings give the same text."""
    study = findings.study
    drawn = charts(findings)
    style = css() + _part("page.css")
    library, script = bundle(), _part("page.js")
    return Template(_part("page.html")).substitute(
        policy=_policy(style, library, script),
        style=style,
        name=escape(study.name),
        question=_prose(study.question or study.name),
        table=_table(findings),
        table_note=_table_note(findings),
        legend=_legend(findings),
        charts="\n".join(_figure(number, chart) for number, chart in enumerate(drawn)),
        lesson=_lesson(study.lesson),
        command=_made_by(command),
        facts=_facts(findings),
        data=_data(drawn),
        library=library,
        script=script,
    )


def _part(name: str) -> str:
    return files("tarry.simulator.report").joinpath(name).read_text("utf-8")


def _policy(style: str, *scripts: str) -> str:
    """Return a policy that lets in what stands in the page and nothing else, from nowhere."""
    allowed = " ".join(_digest(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _table(findings: Findings) -> str:
    names = variants(findings)
    columns = findings.study.columns
    parameters = swept(findings)
    titles = [title(findings, name) for name in parameters] + [one.title for one in columns]
    heads = "".join(f'<th scope="col">{escape(one)}</th>' for one in titles)
    rows: list[str] = []
    before = findings.rows[0].parameters if findings.rows else {}
    for row in findings.rows:
        metrics = row.metrics
        texts = [said(value) for value in row.parameters.values()]
        texts += [shown(metrics.get(one.metric, float("nan")), one.unit) for one in columns]
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        number = names.index(row.variant)
        name = f'<th scope="row" class="variant">{_mark(number)}{escape(row.variant)}</th>'
        begins = ' class="point"' if len(names) > 1 and row.parameters != before else ""
        before = row.parameters
        rows.append(f'<tr data-variant="{number}"{begins}>{name}{cells}</tr>')
    knob = f'<th scope="col" class="variant">{escape(findings.study.knob)}</th>'
    body = "\n".join(rows)
    return f"<table>\n<thead><tr>{knob}{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _table_note(findings: Findings) -> str:
    rows = len(findings.rows)
    return sentences(
        mean(findings, *(column.metric for column in findings.study.columns)) or "One run a row.",
        f"{rows} rows: the table scrolls." if rows > _ROWS_IN_VIEW else "",
    )


def _prose(text: str) -> str:
    """Return text as HTML; `code` is the one mark it may have."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _mark(number: int) -> str:
    """Return the colour and shape of a variant; its name stands beside it."""
    outline = _OUTLINES[SHAPES[number % len(SHAPES)]]
    colour = number % len(LIGHT.variants)
    return (
        f'<svg class="mark v{colour}" viewBox="0 0 12 12" aria-hidden="true">'
        f'<path d="{outline}"/></svg>'
    )


def _legend(findings: Findings) -> str:
    return "\n".join(
        f'<button type="button" class="v{number % len(LIGHT.variants)}" '
        f'data-variant="{number}" aria-pressed="false">{_mark(number)}{escape(name)}</button>'
        for number, name in enumerate(variants(findings))
    )


def _figure(number: int, chart: Chart) -> str:
    panels = "\n".join(
        _panel(f"view-{number}-{place}", panel) for place, panel in enumerate(chart.panels)
    )
    return (
        f'<figure class="{chart.kind}">\n'
        f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.reading)}</p></figcaption>\n"
        f'<div class="panels" role="img" aria-label="{escape(chart.alt)}">\n{panels}\n</div>\n'
        "</figure>"
    )


def _panel(name: str, panel: Panel) -> str:
    single = "" if panel.variant is None else f' data-variant="{panel.variant}"'
    mark = "" if panel.variant is None else _mark(panel.variant)
    label = f'<p class="label">{mark}{escape(panel.label)}</p>' if panel.label else ""
    return f'<div class="panel"{single}>{label}<div class="view" id="{name}"></div></div>'


def _lesson(text: str) -> str:
    if not text:
        return ""
    parts = "\n".join(f"<p>{_prose(part)}</p>" for part in text.split("\n\n"))
    head = '<h2 id="lesson">The lesson</h2>'
    return f'<section class="lesson" aria-labelledby="lesson">\n{head}\n{parts}\n</section>'


def _made_by(command: str) -> str:
    if not command:
        return ""
    return f'<pre class="scroll" tabindex="0"><code>{escape(command)}</code></pre>'


def _facts(findings: Findings) -> str:
    facts = {
        "version of tarry": version("tarry"),
        "seed": str(findings.seed),
        "trials": str(findings.trials),
        **{name: said(value) for name, value in in_force(findings).items()},
    }
    for name in swept(findings):
        values = dict.fromkeys(said(row.parameters[name]) for row in findings.rows)
        facts[f"{name} (swept)"] = ", ".join(values)
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items()
    )


def _data(drawn: list[Chart]) -> str:
    """Return what the script draws; the panels of a chart may share their records."""
    every: list[dict[str, Any]] = []
    for chart in drawn:
        shared = {id(panel.records): panel.records for panel in chart.panels}
        order = list(shared)
        every.append(
            {
                "records": list(shared.values()),
                "panels": [
                    {"view": _fitted(panel), "records": order.index(id(panel.records))}
                    for panel in chart.panels
                ],
            }
        )
    themes = {"light": config(LIGHT, legend=False), "dark": config(DARK, legend=False)}
    text = json.dumps(
        {"charts": every, "themes": themes},
        allow_nan=False,
        ensure_ascii=True,
        separators=(",", ":"),
    )
    # As text of a script element, only these could end it or begin a comment.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _fitted(panel: Panel) -> dict[str, Any]:
    fit = {"type": "fit-x", "contains": "padding"}
    edge = {"left": 0, "right": 0, "top": 6, "bottom": 4}
    own = {"width": "container", "autosize": fit, "padding": edge, "params": [PICKED]}
    return {**own, **panel.view}
