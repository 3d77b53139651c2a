"""Reading and writing files of commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tarry.cli.files import check_output_path, read_documents, write_text
from tarry.errors import ConfigurationError
from tests.simulator.file_builders import write_file


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    """Text is written as UTF-8 in every locale, and line ends are kept."""
    write_text(tmp_path / "a", "é\n")

    assert b"\xc3\xa9\n" == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    "act", [check_output_path, lambda path: write_text(path, "")], ids=["before", "at last"]
)
def test_error_names_the_option_and_the_path(tmp_path: Path, act: Callable[[Path], None]) -> None:
    """The error for a file that cannot be written names the option and the path."""
    path = tmp_path / "no" / "a.toml"

    with pytest.raises(ConfigurationError) as caught:
        act(path)

    assert f"--out: {path} cannot be written: No such folder" == str(caught.value)


def test_error_names_another_option(tmp_path: Path) -> None:
    """The error names the option that the command passed."""
    with pytest.raises(ConfigurationError, match=r"^--html: "):
        check_output_path(tmp_path, option="--html")


def test_suffix_is_checked(tmp_path: Path) -> None:
    """The suffix of an output file is checked, in upper and lower case."""
    check_output_path(tmp_path / "A.TOML", (".json", ".toml"))

    with pytest.raises(
        ConfigurationError, match=r"^--out must be a file name that ends in .json or .toml, "
    ):
        check_output_path(tmp_path / "a.yaml", (".json", ".toml"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "---\na: 1\n---\n---\nb: [2]\n", [{"a": 1}, {"b": [2]}]),
        ("a.txt", '{"a": 1}', [{"a": 1}]),
        ("a.json", '[{"a": 1}]', [[{"a": 1}]]),
    ],
)
def test_documents_are_read(tmp_path: Path, name: str, text: str, expected: list[object]) -> None:
    """A YAML file may have several documents, empty ones are skipped, and JSON is read."""
    assert expected == read_documents(write_file(tmp_path, name, text))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: 1\n---\nb: &b 2\nc: *b\n", ":4: write the value out instead of an alias"),
        ("a.yaml", "a: 1\n---\nb: 1\nb: 2\n", ":4: the key 'b' appears twice, first on line 3"),
        ("a.yaml", "a: 1\n---\n8080: 1\n", ":3: a key must be a plain name or a quoted string"),
        ("a.json", '{"a": 1,\n"a": 2}', ":2: the key 'a' appears twice in one table"),
        ("a.json", f'{{"a": {"9" * 5000}}}', ": not JSON: Exceeds the limit"),
        ("a.yaml", "#" * 1_000_001, ": too large; at most 1,000,000 bytes are read"),
    ],
)
def test_syntax_error_names_its_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """A syntax error is reported with its line, in any document of the file."""
    path = write_file(tmp_path, name, text)

    with pytest.raises(ConfigurationError) as caught:
        read_documents(path)

    assert str(caught.value).startswith(f"{path}{expected}")
