from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator import report
from tarry.simulator.report import render_page, write_html, write_png, write_svg
from tarry.simulator.study import StudyResults
from tests.simulator.sample_results import (
    BARS,
    COLUMNS,
    LINES,
    VARIANTS,
    sample_results,
    sample_study,
    swept_results,
)

HOSTILE = "</script><script>alert(1)</script><!-- & \"'\u2028"


def embedded_data(text: str) -> str:
    """Return the chart data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return found[1]


def without_library(text: str) -> str:
    """Return the page without the JavaScript library."""
    return text.replace(report.javascript_bundle(), "")


def test_equal_results_give_equal_pages(tmp_path: Path) -> None:
    """The same results give the same bytes."""
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    write_html(sample_results(), first)
    write_html(sample_results(), second)
    assert first.read_bytes() == second.read_bytes()


def test_sections_have_a_fixed_order() -> None:
    """The page has the question, table, charts, lesson and version in this order."""
    text = unescape(without_library(render_page(sample_results())))
    study = sample_results().study
    parts = [study.question, "Results", study.plots[0].title, "Lesson", study.lesson[:40]]
    parts += ["How this report was made", "version of tarry"]
    positions = [text.index(part) for part in parts]
    assert sorted(positions) == positions


def test_table_has_the_formatted_values() -> None:
    """The table has the column titles, and values with their units."""
    text = unescape(render_page(sample_results()))
    cells = re.findall(r"<td>(.*?)</td>", text)
    titles = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', text)
    assert ["40 %", "4x", "never", "12,500 ms"] == cells[:4]
    assert ["jitter", *(column.title for column in COLUMNS)] == titles


def test_table_has_the_swept_parameters() -> None:
    """Each row of a sweep shows the values of the swept parameters."""
    text = render_page(swept_results({"servers.db.clients": (10, 1000)}, plots=(LINES,)))
    assert "<td>1,000</td>" in text
    assert '<th scope="col">clients</th>' in text


def test_parameters_have_their_full_names() -> None:
    both = {"network.median": 0.002, "servers.db.latency.median": 0.07}

    text = render_page(swept_results({"clients.rate": (1, 2)}, parameters=both))

    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert {"0.002", "0.07"} == {facts[name] for name in both}
    assert "1, 2" == facts["clients.rate (swept)"]


def test_points_of_a_sweep_are_separated() -> None:
    """In a sweep of several variants, each point but the first starts with a separator."""
    assert 2 == render_page(swept_results({"rate": (1, 2, 3)})).count(
        '<tr data-variant="0" class="first-of-combination">'
    )
    assert 0 == render_page(swept_results({"rate": (1, 2, 3)}, variants=("full",))).count(
        'class="first-of-combination"'
    )


def test_command_is_shown() -> None:
    """The page shows the command line that created it."""
    assert "tarry simulate a.toml --assert &#x27;x &lt; 1&#x27;" in render_page(
        sample_results(), command="tarry simulate a.toml --assert 'x < 1'"
    )


def test_page_without_a_command_shows_none() -> None:
    """A report that was created from Python shows no command."""
    assert "<pre" not in without_library(render_page(sample_results()))


def test_note_mentions_the_median_of_infinite_values() -> None:
    """The note of the table mentions the median if a trial is infinite."""
    assert "or medians where a trial has an infinite value" in render_page(
        swept_results({"clients": (1, 2)})
    )


@pytest.mark.parametrize("field", ["name", "question", "lesson", "variant_parameter"])
def test_texts_of_a_study_are_escaped(field: str) -> None:
    """The name, question, lesson and variant parameter are escaped in HTML."""
    text = without_library(render_page(sample_results(**{field: HOSTILE})))
    assert "alert(1)</script>" not in text
    assert HOSTILE in unescape(text)


def test_names_are_escaped() -> None:
    """Names of variants, columns, plots and parameters are escaped in HTML and in the script."""
    results = sample_results(
        variants=(HOSTILE, "full"),
        columns=(COLUMNS[0]._replace(title=HOSTILE),),
        plots=(BARS._replace(title=HOSTILE, y_title=HOSTILE),),
        parameters={HOSTILE: HOSTILE},
    )
    text = without_library(render_page(results))
    assert "alert(1)</script>" not in text
    assert HOSTILE == json.loads(embedded_data(text))["charts"][0]["records"][0][0]["v"]


def test_page_loads_no_other_resource() -> None:
    """The page refers to no URL, and its content security policy forbids loading any."""
    text = render_page(sample_results())
    assert [] == re.findall(r'(?:src|href)="(?!data:,)[^"]*"', without_library(text))
    assert [] == re.findall(r"@import|url\(", without_library(text))
    assert "default-src 'none'" in text
    assert "unsafe" not in without_library(text)


def test_question_and_lesson_are_optional() -> None:
    """A page without a question has the study name as its title, and no lesson section."""
    text = without_library(render_page(sample_results(question="", lesson="")))
    assert "<h1>storm</h1>" in text
    assert "Lesson" not in text


def test_results_without_rows_give_a_page() -> None:
    """A page of results without rows states that nothing was run."""
    assert "Nothing was run." in render_page(StudyResults(sample_study(), 0, 1, []))


def test_missing_extra_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra, the error has the command that installs it."""
    monkeypatch.setattr(
        "tarry.simulator.report.javascript_bundle", report.javascript_bundle.__wrapped__
    )
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[sim\]'"):
        write_html(sample_results(), tmp_path / "report.html")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["missing/report.html", "."])
def test_path_that_is_no_file_is_rejected(tmp_path: Path, name: str) -> None:
    """The error names a path that cannot be a file."""
    with pytest.raises(ConfigurationError, match=re.escape(str(tmp_path / name))):
        write_html(sample_results(), tmp_path / name)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a file that cannot be written, and the old file is kept."""
    path = tmp_path / "report.html"
    path.write_text("old")

    def raise_disk_full(_self: Path, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", raise_disk_full)
    with pytest.raises(
        ConfigurationError, match=r"report\.html cannot be written: No space left on device"
    ):
        write_html(sample_results(), path)
    assert ["old"] == [file.read_text() for file in tmp_path.iterdir()]


def test_png_is_reproducible(tmp_path: Path) -> None:
    """The image is a PNG about 2,000 pixels wide, and equal results give equal bytes."""
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    write_png(sample_results(), first)
    write_png(sample_results(), second)
    content = first.read_bytes()
    assert b"\x89PNG\r\n\x1a\n" == content[:8]
    assert 1700 < int.from_bytes(content[16:20], "big") < 2600
    assert content == second.read_bytes()


def test_svg_has_text(tmp_path: Path) -> None:
    """The SVG has the question, the titles and the names as text."""
    path = tmp_path / "one.svg"
    write_svg(sample_results(), path)
    text = path.read_text()
    expected = ["A dependency is down for twenty seconds.", "Requests at the server", *VARIANTS]
    assert [] == [part for part in expected if part not in text]


def test_line_chart_has_a_legend(tmp_path: Path) -> None:
    """The image of a line chart has the names of the variants."""
    path = tmp_path / "one.svg"
    write_svg(swept_results({"clients": (1, 2)}, plots=(LINES,)), path)
    assert VARIANTS[3] in path.read_text()


@pytest.mark.parametrize("write", [write_png, write_svg])
def test_errors_name_the_missing_folder_and_library(
    write: Callable[[StudyResults, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names a folder that does not exist, or a library that is not installed."""
    with pytest.raises(ConfigurationError, match="missing"):
        write(sample_results(), tmp_path / "missing" / "picture")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtra, match=r"tarry\[sim\]"):
        write(sample_results(), tmp_path / "picture")
