"""Line numbers: in these texts, each value is the number of its own line."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from tarry.simulator.files.documents import json_lines, toml_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.simulator.files.documents import KeyPath

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


def leaves(value: object, place: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each number in parsed data with its key path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, (*place, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from leaves(one, (*place, index))
    elif isinstance(value, int):
        yield place, value


def test_toml_values_are_found_on_their_lines() -> None:
    """Each value has its line number, whatever surrounds it."""
    lines = toml_lines(TOML)

    expected = dict(leaves(tomllib.loads(TOML)))
    assert expected == {place: lines[place] for place in expected}


def test_toml_tables_are_found_on_their_lines() -> None:
    """A table, or an item of an array of tables, has the line of its header."""
    lines = toml_lines(TOML)

    assert [17, 19, 21, 21, 25, 27] == [
        lines[place]
        for place in [
            ("table",),
            ("table", "sub"),
            ("many",),
            ("many", 0),
            ("many", 1),
            ("many", 1, "table"),
        ]
    ]


def test_json_values_are_found_on_their_lines() -> None:
    """A value has the line of its key, even if the value is on the next line."""
    lines, twin = json_lines(JSON)

    expected = dict(leaves(json.loads(JSON)))
    assert twin is None
    assert expected == {place: lines[place] for place in expected}


def test_duplicate_json_key_is_reported() -> None:
    """A duplicate key is reported, although the JSON parser accepts it."""
    assert ("a", 3) == json_lines('{"a": 1,\n"b": {"a": 2},\n"a": 3}')[1]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "a = 1"])
def test_text_without_a_final_newline_is_read(text: str) -> None:
    """A text that is empty or lacks a final newline is read completely."""
    assert len(tomllib.loads(text)) == len(toml_lines(text))
