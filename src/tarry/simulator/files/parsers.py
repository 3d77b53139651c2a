"""TOML, YAML and JSON as plain data, with the line of each value."""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.errors import MissingExtra
from tarry.simulator.files.lines import json_lines, toml_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from yaml.nodes import Node

    from tarry.simulator.files.lines import Place

_AT_LINE = re.compile(r" \((?:at line (\d+), column \d+|at end of document)\)")


class Parsed(NamedTuple):
    """One document of a file, the lines of its values, and the line on which it begins."""

    data: Any
    lines: dict[Place, int]
    line: int = 1


class Syntax(Exception):
    """What a parser did not like, and the line when it is known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def yaml_library() -> Any:
    """Return PyYAML, which is an extra."""
    try:
        import yaml
    except ImportError:
        raise MissingExtra("YAML needs PyYAML: pip install 'tarry[sim]'") from None
    return yaml


def _toml(text: str) -> list[Parsed]:
    try:
        return [Parsed(tomllib.loads(text), toml_lines(text))]
    except ValueError as error:
        found = _AT_LINE.search(str(error))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1
        raise Syntax(f"not TOML: {_AT_LINE.sub('', str(error))}", line) from None


def _json(text: str) -> list[Parsed]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise Syntax(f"not JSON: {error.msg}", error.lineno) from None
    except ValueError as error:  # a number of thousands of digits
        raise Syntax(f"not JSON: {error}") from None
    lines, twin = json_lines(text)
    if twin is not None:
        key, line = twin
        raise Syntax(f"the key {key!r} stands twice in one table", line)
    return [Parsed(data, lines)]


def _yaml(text: str) -> list[Parsed]:
    yaml = yaml_library()
    found: list[Parsed] = []
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            begins = loader.peek_event().start_mark.line + 1
            node = loader.get_node()
            lines: dict[Place, int] = {}
            _note(node, (), lines, set())
            found.append(Parsed(loader.construct_document(node), lines, begins))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Syntax(f"not YAML: {error.problem}", mark.line + 1 if mark else 0) from None
    except (yaml.YAMLError, ValueError) as error:
        raise Syntax(f"not YAML: {' '.join(str(error).split())}") from None
    return found


def _note(node: Node, place: Place, lines: dict[Place, int], seen: set[int]) -> None:
    """Note the line of everything below a node of YAML, and refuse what has two meanings."""
    import yaml

    if id(node) in seen:  # a few lines of aliases can stand for more values than memory holds
        raise Syntax("write the value out instead of an alias", lines.get(place, 1))
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*place, index] = item.start_mark.line + 1
            _note(item, (*place, index), lines, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                raise Syntax("a key must be a plain name or a text in quotes", line)
            here = (*place, key.value)
            if here in lines:
                message = f"the key {key.value!r} stands twice, first on line {lines[here]}"
                raise Syntax(message, line)
            lines[here] = line
            _note(value, here, lines, seen)


PARSERS: dict[str, Callable[[str], list[Parsed]]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
}
"""By the end of a file's name."""
