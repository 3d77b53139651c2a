from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.report import write_png, write_svg
from tarry.simulator.study import StudyResults
from tests.simulator.report.sample_results import LINES, VARIANTS, sample_results, swept_results


def test_png(tmp_path: Path) -> None:
    """The image is a PNG with a high resolution, and the same each time."""
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    write_png(sample_results(), one)
    write_png(sample_results(), two)
    content = one.read_bytes()
    assert b"\x89PNG\r\n\x1a\n" == content[:8]
    assert 1700 < int.from_bytes(content[16:20], "big") < 2600
    assert content == two.read_bytes()


def test_svg(tmp_path: Path) -> None:
    """The SVG has the question, the titles and the names as text."""
    path = tmp_path / "one.svg"
    write_svg(sample_results(), path)
    text = path.read_text()
    wanted = ["A dependency is down for twenty seconds.", "Requests at the server", *VARIANTS]
    assert [] == [one for one in wanted if one not in text]


def test_legend(tmp_path: Path) -> None:
    """An image of a line chart has a legend."""
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
