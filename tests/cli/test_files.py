"""What every command does alike when it reads and writes documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tarry.cli.files import check_output_path, read_documents, write_text
from tarry.errors import ConfigurationError
from tests.simulator.files.file_builders import write_file


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    """Whatever the locale says, and with the ends of lines that it has."""
    write_text(tmp_path / "a", "é\n")

    assert b"\xc3\xa9\n" == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    "act", [check_output_path, lambda path: write_text(path, "")], ids=["before", "at last"]
)
def test_refusal_names_the_option_and_the_path(tmp_path: Path, act: Callable[[Path], None]) -> None:
    """So that the user knows what to change."""
    path = tmp_path / "no" / "a.toml"

    with pytest.raises(ConfigurationError) as caught:
        act(path)

    assert f"--out: {path} cannot be written: No such folder" == str(caught.value)


def test_option_has_another_name(tmp_path: Path) -> None:
    """A command may have several."""
    with pytest.raises(ConfigurationError, match=r"^--html: "):
        check_output_path(tmp_path, option="--html")


def test_name_must_have_a_format(tmp_path: Path) -> None:
    """In whatever case."""
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
    """YAML may hold several; what is empty is none; JSON is YAML too."""
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
def test_mistake_names_its_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """As in a scenario file, in whichever document of the file it is."""
    path = write_file(tmp_path, name, text)

    with pytest.raises(ConfigurationError) as caught:
        read_documents(path)

    assert str(caught.value).startswith(f"{path}{expected}")
