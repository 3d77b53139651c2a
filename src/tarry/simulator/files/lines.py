"""On which line each value of a TOML or JSON text stands, which their parsers do not tell.

The text has been parsed before, so nothing is checked here: this only counts lines.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Place: TypeAlias = "tuple[str | int, ...]"
"""The way to a value: the keys, and the indices from 0 of lists."""

_TOML = re.compile(
    r'''(?P<skip>[ \t\r]+|\#[^\n]*)
      | """(?:\\.|[^\\])*?"{3,5} | \'\'\'.*?\'{3,5}
      | "(?:\\.|[^"\\\n])*" | \'[^\'\n]*\'
      | \n | [\[\]{}=,]
      | [^\s\[\]{}=,#"\']+''',
    re.VERBOSE | re.DOTALL,
)
_JSON = re.compile(
    r"""(?P<skip>[ \t\r]+)
      | "(?:\\.|[^"\\])*"
      | \n | [\[\]{}:,]
      | [^\s\[\]{}:,"]+""",
    re.VERBOSE,
)
_QUOTES = ('"', "'")


class _Token(NamedTuple):
    text: str
    line: int


class _Walk:
    """Goes through the tokens once and notes the line of everything that has a key or index."""

    def __init__(self, text: str, pattern: re.Pattern[str], unquote: Callable[[str], str]) -> None:
        self.lines: dict[Place, int] = {}
        self.twin: _Token | None = None
        """A key that stood in its table before, and the line on which it stands again."""
        self._unquote = unquote
        self._tokens: list[_Token] = []
        self._at = 0
        line = 1
        for found in pattern.finditer(text):
            if not found["skip"]:
                self._tokens.append(_Token(found[0], line))
            line += found[0].count("\n")
        self._tokens.append(_Token("", line))

    def peek(self) -> _Token:
        return self._tokens[self._at]

    def take(self) -> _Token:
        token = self.peek()
        if token.text:  # never past the end
            self._at += 1
        return token

    def skip(self, *texts: str) -> _Token:
        while self.peek().text in texts:
            self.take()
        return self.peek()

    def key(self, end: str) -> list[str]:
        """Take a dotted key and the token after it."""
        parts: list[str] = []
        while (text := self.take().text) not in {end, ""}:
            if text.startswith(_QUOTES):
                parts.append(self._unquote(text))
            else:
                parts.extend(part for part in text.split(".") if part)
        return parts

    def pair(self, place: Place, sign: str) -> None:
        line = self.peek().line
        for part in self.key(sign):
            place = (*place, part)
            if self.lines.setdefault(place, line) != line:  # in TOML just a shared first part
                self.twin = _Token(part, line)
        self.skip("\n")
        self.value(place, sign)

    def value(self, place: Place, sign: str) -> None:
        opening = self.take().text
        if opening == "[":
            index = 0
            while self.skip("\n", ",").text not in {"]", ""}:
                self.lines[*place, index] = self.peek().line
                self.value((*place, index), sign)
                index += 1
            self.take()
        elif opening == "{":
            while self.skip("\n", ",").text not in {"}", ""}:
                self.pair(place, sign)
            self.take()
        else:  # a scalar; a date and a time may stand apart
            while self.peek().text not in {",", "]", "}", "\n", ""}:
                self.take()


def toml_lines(text: str) -> dict[Place, int]:
    """Return the line of each table, key and list item of a TOML text."""
    walk = _Walk(text, _TOML, _unquoted_toml)
    last: dict[Place, int] = {}  # of each list of tables, the index of its last one
    table: Place = ()
    while (token := walk.skip("\n")).text:
        if token.text != "[":
            walk.pair(table, "=")
            continue
        walk.take()
        in_list = walk.peek().text == "["
        walk.skip("[")
        key = walk.key("]")
        walk.skip("]")
        table = ()
        for number, part in enumerate(key, 1):
            table = (*table, part)
            walk.lines.setdefault(table, token.line)
            if in_list and number == len(key):
                last[table] = last.get(table, -1) + 1
            if table in last:
                table = (*table, last[table])
                walk.lines.setdefault(table, token.line)
    return walk.lines


def json_lines(text: str) -> tuple[dict[Place, int], tuple[str, int] | None]:
    """Return the line of each key and list item of a JSON text, and a key that stands twice."""
    walk = _Walk(text, _JSON, _unquoted_json)
    walk.skip("\n")
    walk.value((), ":")
    return walk.lines, walk.twin


def _unquoted_toml(text: str) -> str:
    parsed: dict[str, Any] = tomllib.loads(f"key = {text}")
    return str(parsed["key"])


def _unquoted_json(text: str) -> str:
    return str(json.loads(text))
