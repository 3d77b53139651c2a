from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.report import library, to_json, write_html
from tarry.simulator.report.page import page
from tarry.simulator.report.theme import DARK, LIGHT, Theme
from tarry.simulator.study import Findings
from tests.simulator.report.made_up import BARS, COLUMNS, LINES, findings, study, swept

HOSTILE = "</script><script>alert(1)</script><!-- & \"'\u2028"


def embedded(text: str) -> str:
    """Return the data in the page as it stands there."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return found[1]


def without_library(text: str) -> str:
    """Return what we wrote, without the code that draws."""
    return text.replace(library.bundle(), "")


def test_same_findings_same_bytes(tmp_path: Path) -> None:
    """A page can be compared with the one of last week."""
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    write_html(findings(), one)
    write_html(findings(), two)
    assert one.read_bytes() == two.read_bytes()


def test_story() -> None:
    """The page has question, numbers, charts, lesson and origin, in this order."""
    text = unescape(without_library(page(findings())))
    of = findings().study
    parts = [of.question, "What came out", of.plots[0].title, "The lesson", of.lesson[:40]]
    parts += ["How this was made", "version of tarry"]
    places = [text.index(part) for part in parts]
    assert sorted(places) == places


def test_table_has_the_numbers_of_the_terminal() -> None:
    """The table says what the terminal says, and names its columns the same."""
    text = unescape(page(findings()))
    cells = re.findall(r"<td>(.*?)</td>", text)
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', text)
    assert ["40 %", "4x", "never", "12,500 ms"] == cells[:4]
    assert ["jitter", *(column.title for column in COLUMNS)] == heads


def test_swept_parameters_stand_in_the_table() -> None:
    """A row of a sweep says at which point it was run."""
    text = page(swept({"servers.db.clients": (10, 1000)}, plots=(LINES,)))
    assert "<td>1,000</td>" in text
    assert '<th scope="col">clients</th>' in text


def test_command_of_the_caller() -> None:
    """Who knows the command that was given can have it shown."""
    assert "tarry simulate a.toml --assert &#x27;x &lt; 1&#x27;" in page(
        findings(), command="tarry simulate a.toml --assert 'x < 1'"
    )


def test_without_a_command() -> None:
    """A report that was made in Python shows no command that nobody gave."""
    assert "<pre" not in without_library(page(findings()))


def test_median_where_there_is_no_mean() -> None:
    """A row with a trial that never recovered does not claim to be a mean."""
    assert "or their median where not all came to an end" in page(swept({"clients": (1, 2)}))


@pytest.mark.parametrize("field", ["name", "question", "lesson", "knob"])
def test_texts_are_escaped(field: str) -> None:
    """No text of a study becomes a part of the page."""
    text = without_library(page(findings(**{field: HOSTILE})))
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
    text = without_library(page(of))
    assert "alert(1)</script>" not in text
    assert HOSTILE == json.loads(embedded(text))["charts"][0]["records"][0][0]["v"]


def test_nothing_comes_from_elsewhere() -> None:
    """The page names no address that a browser would fetch, and forbids to fetch any."""
    text = page(findings())
    assert [] == re.findall(r'(?:src|href)="(?!data:,)[^"]*"', without_library(text))
    assert [] == re.findall(r"@import|url\(", without_library(text))
    assert "default-src 'none'" in text
    assert "unsafe" not in without_library(text)


def test_study_without_words() -> None:
    """A study from a file may have no question and no lesson."""
    text = without_library(page(findings(question="", lesson="")))
    assert "<h1>storm</h1>" in text
    assert "The lesson" not in text


def test_no_rows() -> None:
    """Findings without rows still make a page."""
    assert "Nothing was run." in page(Findings(study(), 0, 1, []))


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra, the error has the line that installs it."""
    monkeypatch.setattr("tarry.simulator.report.page.bundle", library.bundle.__wrapped__)
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
    with pytest.raises(ConfigurationError, match=r"report\.html: No space left on device"):
        write_html(findings(), path)
    assert ["old"] == [one.read_text() for one in tmp_path.iterdir()]


def test_to_json() -> None:
    """Plain data has everything, and null where a number would not be JSON."""
    of = to_json(findings())
    assert json.loads(json.dumps(of, allow_nan=False)) == of
    first = of["rows"][0]
    assert ("storm", 7, 1, "none") == (of["study"], of["seed"], of["trials"], first["variant"])
    assert (None, 0.4) == (first["metrics"]["recovered_after"], first["metrics"]["success_rate"])
    assert 120 == len(first["trials"][0]["series"]["requests"])


def test_to_json_of_odd_parameters() -> None:
    """A parameter that JSON has no word for is said as text."""
    of = findings(parameters={"path": Path("a"), "waits": (1.0, float("inf")), "more": {1: None}})
    parameters = to_json(of)["parameters"]
    assert {"path": "a", "waits": [1.0, None], "more": {"1": None}} == parameters


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(theme: Theme) -> None:
    """Text has a contrast of 4.5 and a mark one of 3 on everything they stand on."""
    for ground in (theme.page, theme.surface, theme.wash, *theme.ramp):
        assert 4.5 <= contrast(theme.ink, ground)
    for ground in (theme.page, theme.surface, theme.wash):
        assert 4.5 <= min(contrast(theme.muted, ground), contrast(theme.accent, ground))
        assert 3 <= min(contrast(colour, ground) for colour in theme.variants)


def contrast(one: str, other: str) -> float:
    """Return the ratio of WCAG 2, section 1.4.3."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
