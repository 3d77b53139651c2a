"""Line numbers of values, and atomic writes.

In `TOML` and `JSON`, each number is the number of its own line.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.documents import (
    json_line_numbers,
    read_text,
    toml_line_numbers,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.simulator.documents import KeyPath

TOML = '''\
a = 1
"quoted.key" = 2  # a comment with = and [brackets]
'x'.y . "z" = 3
list = [
  5, # five
  [6,
   7], {one = 7, two.three = 7},
]
text = """ # not a comment
[nor a table]
still = "text" """ # 9
after = 12
when = 1979-05-27 07:32:00
empty = ""
literal = \'\'\'
[no]\'\'\'
[table]
key = 18
[table.sub."dotted.name"]
key = 20
[[many]]
key = 22
[[many.deep]]
key = 24
[[many]]
key = 26
  [many.table]
  key = 28
[[many.deep]]
key = 30
[last] # comment
key = 32'''

JSON = """

{
  "a": 4, "b": [4,
    5, {"c.d": 5,
       "e": {}, "f": 6}],
  "g": "text with \\"quotes\\" and: colons, [ {", "h":
    7,
  "i": {
    "j": 10}
}
"""


def find_numbers(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each number in parsed data with its key path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from find_numbers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from find_numbers(item, (*path, index))
    elif isinstance(value, int):
        yield path, value


def test_toml_values_are_found_on_their_lines() -> None:
    """Each TOML value has its line number, also after comments, strings and arrays."""
    lines = toml_line_numbers(TOML)

    expected = dict(find_numbers(tomllib.loads(TOML)))
    assert expected == {path: lines[path] for path in expected}


def test_toml_tables_are_found_on_their_lines() -> None:
    """A TOML table, or an item of an array of tables, has the line of its header."""
    lines = toml_line_numbers(TOML)

    assert [17, 19, 21, 21, 25, 27] == [
        lines[path]
        for path in [
            ("table",),
            ("table", "sub"),
            ("many",),
            ("many", 0),
            ("many", 1),
            ("many", 1, "table"),
        ]
    ]


def test_json_values_are_found_on_their_lines() -> None:
    """A JSON value has the line of its key, even if the value is on the next line."""
    lines, duplicate = json_line_numbers(JSON)

    expected = dict(find_numbers(json.loads(JSON)))
    assert duplicate is None
    assert expected == {path: lines[path] for path in expected}


def test_duplicate_json_key_is_reported() -> None:
    """A duplicate key is reported, although the JSON parser accepts it."""
    assert ("a", 3) == json_line_numbers('{"a": 1,\n"b": {"a": 2},\n"a": 3}')[1]
    assert ("a", 1) == json_line_numbers('{"a": 1, "a": 2}')[1]
    assert ("a", 2) == json_line_numbers('{"a": {"b": 1},\n"a": {"b": 2}}')[1]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "a = 1"])
def test_text_without_a_final_newline_is_read(text: str) -> None:
    """A text that is empty or lacks a final newline is read completely."""
    assert len(tomllib.loads(text)) == len(toml_line_numbers(text))


def test_new_file_has_default_permissions(tmp_path: Path) -> None:
    """A new file has the default permissions, and no temporary file is left."""
    touched, path = tmp_path / "touched", tmp_path / "new"
    touched.touch()

    write_atomically(path, b"new")

    assert b"new" == path.read_bytes()
    assert touched.stat().st_mode == path.stat().st_mode
    assert {touched, path} == set(tmp_path.iterdir())


def test_existing_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o600)

    write_atomically(path, b"new")

    assert (b"new", 0o600) == (path.read_bytes(), path.stat().st_mode & 0o777)


def test_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    """Writing to a symbolic link writes its target."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)

    write_atomically(link, b"new")

    assert (True, b"new") == (link.is_symlink(), path.read_bytes())


def test_pipe_is_not_replaced(tmp_path: Path) -> None:
    """A pipe or device is written to and not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    texts: list[str] = []
    reader = Thread(target=lambda: texts.append(read_text(pipe, 100)))
    reader.start()

    write_atomically(pipe, b"new")

    reader.join()
    assert (["new"], True) == (texts, pipe.is_fifo())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("no/such/file", "No such folder"), (".", "Is a folder"), ("n" * 300, "File name too long")],
    ids=["no folder", "a folder", "a long name"],
)
def test_unwritable_path_is_rejected(tmp_path: Path, name: str, expected: str) -> None:
    """The error has the path and the reason."""
    path = tmp_path / name

    with pytest.raises(ConfigurationError) as caught:
        write_atomically(path, b"new")

    assert f"{path} cannot be written: {expected}" == str(caught.value)


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write keeps the old file and leaves no temporary file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def raise_disk_full(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", raise_disk_full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write_atomically(path, b"new")

    assert [b"old"] == [file.read_bytes() for file in tmp_path.iterdir()]
