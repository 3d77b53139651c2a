"""Files of measured durations: what they may not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.files import read_study
from tests.simulator.files.written import SMALL

MISTAKES = [
    ("0.1\nx\n", "", "t.csv:2: must be a number of at least 0, got 'x'"),
    ("0.1\n-1\n", "", "t.csv:2: must be a number of at least 0, got '-1'"),
    ("0.1\nnan\n", "", "t.csv:2: must be a number of at least 0, got 'nan'"),
    ("\n\n", "", "t.csv: there is no value in it"),
    ("a,b\n1,2\n", "column = 'c'", "t.csv:1: there is no column 'c'; there are a, b"),
    ("a,b\n1\n", "column = 'b'", "t.csv:2: must be a number of at least 0, got ''"),
    ("1\n" * 1_000_001, "", "t.csv:1000001: at most 1,000,000 values are read"),
    ('"' + "1" * 200_000, "", "t.csv:1: not CSV: field larger than field limit"),
]


@pytest.mark.parametrize(("text", "more", "expected"), MISTAKES, ids=[case[2] for case in MISTAKES])
def test_mistake_names_both_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, more: str, expected: str
) -> None:
    """The line that names the file, and the line in it."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text, encoding="utf-8")
    latency = f"[servers.x.latency]\nkind = 'empirical'\nfile = 't.csv'\n{more}\n"
    Path("s.toml").write_text(SMALL + latency, encoding="utf-8")

    with pytest.raises(ConfigurationError) as caught:
        read_study(Path("s.toml"))

    assert f"s.toml:9: file: {expected}" in str(caught.value)
