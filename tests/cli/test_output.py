"""Tests for the text, times and files that commands write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tarry.cli.output import (
    check_output_path,
    format_cell,
    table,
    time_of_day,
    time_since,
    time_until,
    to_printable_line,
    write_text,
)
from tarry.errors import ConfigurationError


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    """Text is written as UTF-8 in every locale, and line ends are kept."""
    write_text(tmp_path / "a", "é\n")

    assert b"\xc3\xa9\n" == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    "check_or_write", [check_output_path, lambda path: write_text(path, "")], ids=["check", "write"]
)
def test_error_names_the_option_and_the_path(
    tmp_path: Path, check_or_write: Callable[[Path], None]
) -> None:
    """The error for a file that cannot be written names the option and the path."""
    path = tmp_path / "no" / "a.toml"

    with pytest.raises(ConfigurationError) as caught:
        check_or_write(path)

    assert f"--out: {path} cannot be written: No such folder" == str(caught.value)


def test_error_names_another_option(tmp_path: Path) -> None:
    """The error names the option that the command passed."""
    with pytest.raises(ConfigurationError, match=r"^--html: "):
        check_output_path(tmp_path, option="--html")


def test_suffix_is_checked(tmp_path: Path) -> None:
    """The suffix of an output file is checked, ignoring case."""
    check_output_path(tmp_path / "A.TOML", (".json", ".toml"))

    with pytest.raises(
        ConfigurationError, match=r"^--out must be a file name that ends in .json or .toml, "
    ):
        check_output_path(tmp_path / "a.yaml", (".json", ".toml"))


def test_cells_are_escaped() -> None:
    """Cells have no markup and no control characters; None is empty."""
    assert ["[bold]\\x1b[2J", "", "7"] == [
        format_cell(value).plain for value in ("[bold]\x1b[2J", None, 7)
    ]


@pytest.mark.parametrize("width", [100, 60, 56])
def test_only_one_column_is_cut(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In a narrow terminal, the cells of one column are cut, and no word is split."""
    headings = ("downstream", "state", "pending", "running", "dead", "p50", "p95")
    row = ("https:orders.example.com:8443", "PROBING", "1234", "12", "3", "1.2s", "2.5s")

    Console(width=width).print(table(headings, [row], cut_column="downstream"))

    heading_line, row_line = capsys.readouterr().out.splitlines()
    assert list(headings) == heading_line.split()
    name, *cells = row_line.split()
    assert list(row[1:]) == cells
    assert name == row[0] if width == 100 else name.endswith("…")


def test_times_are_relative() -> None:
    """Times are shown relative to now."""
    assert ["in 3 s", "now", "3 s ago"] == [
        time_until(5000, 2.0),
        time_until(1000, 2.0),
        time_since(2000, 5.0),
    ]
    assert time_of_day(1_700_000_000_042).endswith(".042")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é text", "plain é text"),
        ("two\n  lines\t", "two lines"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    """Control characters are escaped, and line ends become spaces."""
    assert expected == to_printable_line(text)
