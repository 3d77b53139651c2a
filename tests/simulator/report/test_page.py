from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.report import images, write_html
from tarry.simulator.report.page import render_page
from tarry.simulator.study import StudyResults
from tests.simulator.report.sample_results import BARS, COLUMNS, LINES, findings, study, swept

HOSTILE = "</script><script>alert(1)</script><!-- & \"'\u2028"


def embedded(text: str) -> str:
    """Return the data in the page as it stands there."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return found[1]


def without_library(text: str) -> str:
    """Return what we wrote, without the code that draws."""
    return text.replace(images.javascript_bundle(), "")


def test_same_findings_same_bytes(tmp_path: Path) -> None:
    """A page can be compared with the one of last week."""
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    write_html(findings(), one)
    write_html(findings(), two)
    assert one.read_bytes() == two.read_bytes()


def test_story() -> None:
    """The page has question, numbers, charts, lesson and origin, in this order."""
    text = unescape(without_library(render_page(findings())))
    of = findings().study
    parts = [of.question, "Results", of.plots[0].title, "Lesson", of.lesson[:40]]
    parts += ["How this report was made", "version of tarry"]
    places = [text.index(part) for part in parts]
    assert sorted(places) == places


def test_table_has_the_numbers_of_the_terminal() -> None:
    """The table says what the terminal says, and names its columns the same."""
    text = unescape(render_page(findings()))
    cells = re.findall(r"<td>(.*?)</td>", text)
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', text)
    assert ["40 %", "4x", "never", "12,500 ms"] == cells[:4]
    assert ["jitter", *(column.title for column in COLUMNS)] == heads


def test_swept_parameters_stand_in_the_table() -> None:
    """A row of a sweep says at which point it was run."""
    text = render_page(swept({"servers.db.clients": (10, 1000)}, plots=(LINES,)))
    assert "<td>1,000</td>" in text
    assert '<th scope="col">clients</th>' in text


def test_parameters_have_their_whole_names() -> None:
    """Two that end alike are told apart, as in `--show`."""
    both = {"network.median": 0.002, "servers.db.latency.median": 0.07}

    text = render_page(swept({"clients.rate": (1, 2)}, parameters=both))

    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert {"0.002", "0.07"} == {facts[name] for name in both}
    assert "1, 2" == facts["clients.rate (swept)"]


def test_gap_between_the_points_of_a_sweep() -> None:
    """Each point but the first begins with one, where it has several rows."""
    assert 2 == render_page(swept({"rate": (1, 2, 3)})).count('<tr data-variant="0" class="point">')
    assert 0 == render_page(swept({"rate": (1, 2, 3)}, variants=("full",))).count('class="point"')


def test_command_of_the_caller() -> None:
    """Who knows the command that was given can have it shown."""
    assert "tarry simulate a.toml --assert &#x27;x &lt; 1&#x27;" in render_page(
        findings(), command="tarry simulate a.toml --assert 'x < 1'"
    )


def test_without_a_command() -> None:
    """A report that was made in Python shows no command that nobody gave."""
    assert "<pre" not in without_library(render_page(findings()))


def test_median_where_there_is_no_mean() -> None:
    """A row with a trial that never recovered does not claim to be a mean."""
    assert "or their median if some of them are infinite" in render_page(swept({"clients": (1, 2)}))


@pytest.mark.parametrize("field", ["name", "question", "lesson", "variant_parameter"])
def test_texts_are_escaped(field: str) -> None:
    """No text of a study becomes a part of the page."""
    text = without_library(render_page(findings(**{field: HOSTILE})))
    assert "alert(1)</script>" not in text
    assert HOSTILE in unescape(text)


def test_names_are_escaped() -> None:
    """No name of a variant, column, plot or parameter becomes a part of the page or its script."""
    of = findings(
        variants=(HOSTILE, "full"),
        columns=(COLUMNS[0]._replace(title=HOSTILE),),
        plots=(BARS._replace(title=HOSTILE, y_title=HOSTILE),),
        parameters={HOSTILE: HOSTILE},
    )
    text = without_library(render_page(of))
    assert "alert(1)</script>" not in text
    assert HOSTILE == json.loads(embedded(text))["charts"][0]["records"][0][0]["v"]


def test_nothing_comes_from_elsewhere() -> None:
    """The page names no address that a browser would fetch, and forbids to fetch any."""
    text = render_page(findings())
    assert [] == re.findall(r'(?:src|href)="(?!data:,)[^"]*"', without_library(text))
    assert [] == re.findall(r"@import|url\(", without_library(text))
    assert "default-src 'none'" in text
    assert "unsafe" not in without_library(text)


def test_study_without_words() -> None:
    """A study from a file may have no question and no lesson."""
    text = without_library(render_page(findings(question="", lesson="")))
    assert "<h1>storm</h1>" in text
    assert "Lesson" not in text


def test_no_rows() -> None:
    """Findings without rows still make a page."""
    assert "Nothing was run." in render_page(StudyResults(study(), 0, 1, []))


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra, the error has the line that installs it."""
    monkeypatch.setattr(
        "tarry.simulator.report.page.javascript_bundle", images.javascript_bundle.__wrapped__
    )
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[sim\]'"):
        write_html(findings(), tmp_path / "report.html")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["missing/report.html", "."])
def test_bad_path(tmp_path: Path, place: str) -> None:
    """A path where no file can be is refused by name."""
    with pytest.raises(ConfigurationError, match=re.escape(str(tmp_path / place))):
        write_html(findings(), tmp_path / place)


def test_unwritable_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is refused by name, and the old one stays."""
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(_self: Path, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        ConfigurationError, match=r"report\.html cannot be written: No space left on device"
    ):
        write_html(findings(), path)
    assert ["old"] == [one.read_text() for one in tmp_path.iterdir()]
