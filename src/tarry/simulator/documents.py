"""Read a TOML, YAML or JSON file, and remember on which line each value stands.

Every refusal begins with the file and the line. What is read is bounded, because files come from
anywhere.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.lines import json_lines, toml_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    from yaml.nodes import Node

    from tarry.simulator.lines import Place

    Parsed: TypeAlias = "tuple[Any, dict[Place, int]]"

LARGEST = 1_000_000
"""Bytes of a file that people write; the YAML parser takes seconds for as many."""
_AT_LINE = re.compile(r" \((?:at line (\d+), column \d+|at end of document)\)")


class Spot(NamedTuple):
    """Where a value comes from: a line of a file, or what else is named instead."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data, and where each part of it was written."""

    path: Path
    data: dict[str, Any]
    spots: dict[Place, Spot]

    def refusal(self, place: Place, message: str) -> ConfigurationError:
        """Return an error about the value at a place, or about the nearest table around it."""
        while place and place not in self.spots:
            place = place[:-1]
        spot = self.spots.get(place, Spot(str(self.path)))
        return ConfigurationError(f"{spot}: {message}")


class _Syntax(Exception):
    """What a parser did not like, and the line when it is known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_document(path: Path) -> Document:
    """Read a file whose name tells its language."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        msg = f"{path}: the name must end in {', '.join(_PARSERS)}"
        raise ConfigurationError(msg)
    text = read_text(path, LARGEST)
    try:
        data, lines = parse(text)
    except _Syntax as error:
        msg = f"{Spot(str(path), error.line)}: {error}"
        raise ConfigurationError(msg) from None
    except RecursionError:
        msg = f"{path}: nested too deeply"
        raise ConfigurationError(msg) from None
    except MissingExtra as error:
        msg = f"{path}: {error}"
        raise MissingExtra(msg) from None
    if not isinstance(data, dict):
        msg = f"{path}:1: must be a table of keys and values, got {short(data)}"
        raise ConfigurationError(msg)
    spots = {place: Spot(str(path), line) for place, line in lines.items()}
    return Document(path, cast("dict[str, Any]", data), {(): Spot(str(path), 1), **spots})


def read_text(path: Path, largest: int) -> str:
    """Read a file of UTF-8 and at most so many bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise ConfigurationError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise ConfigurationError(msg) from None
    if len(raw) > largest:
        msg = f"{path}: too large; at most {largest:,} bytes are read"
        raise ConfigurationError(msg)
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        msg = f"{path}:{line}: must be UTF-8, got the byte 0x{raw[error.start]:02x}"
        raise ConfigurationError(msg) from None


def _toml(text: str) -> Parsed:
    try:
        return tomllib.loads(text), toml_lines(text)
    except ValueError as error:
        found = _AT_LINE.search(str(error))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1
        raise _Syntax(f"not TOML: {_AT_LINE.sub('', str(error))}", line) from None


def _json(text: str) -> Parsed:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Syntax(f"not JSON: {error.msg}", error.lineno) from None
    except ValueError as error:  # a number of thousands of digits
        raise _Syntax(f"not JSON: {error}") from None
    lines, twin = json_lines(text)
    if twin is not None:
        key, line = twin
        raise _Syntax(f"the key {key!r} stands twice in one table", line)
    return data, lines


def _yaml(text: str) -> Parsed:
    try:
        import yaml
    except ImportError:
        raise MissingExtra("YAML needs PyYAML: pip install 'tarry[sim]'") from None

    try:
        loader: Any = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: dict[Place, int] = {}
        if node is None:
            return {}, lines
        _note_yaml(node, (), lines, set())
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _Syntax(f"not YAML: {error.problem}", mark.line + 1 if mark else 0) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _Syntax(f"not YAML: {' '.join(str(error).split())}") from None


def _note_yaml(node: Node, place: Place, lines: dict[Place, int], seen: set[int]) -> None:
    import yaml

    if id(node) in seen:  # a few lines of aliases can stand for more values than memory holds
        raise _Syntax("write the value out instead of an alias", lines.get(place, 1))
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*place, index] = item.start_mark.line + 1
            _note_yaml(item, (*place, index), lines, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                raise _Syntax("a key must be a plain name or a text in quotes", line)
            here = (*place, key.value)
            if here in lines:
                message = f"the key {key.value!r} stands twice, first on line {lines[here]}"
                raise _Syntax(message, line)
            lines[here] = line
            _note_yaml(value, here, lines, seen)


def short(value: object, most: int = 60) -> str:
    """Return a value as text that fits into a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


_PARSERS: dict[str, Callable[[str], Parsed]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
}
