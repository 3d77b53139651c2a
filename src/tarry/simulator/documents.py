"""Read TOML, YAML and JSON files with the line number of each value; write files atomically.

The message of an error starts with the file and the line. The size of a file is limited, because it
may come from an untrusted source. The parsers of the standard library do not report line numbers,
so `toml_line_numbers` and `json_line_numbers` find them in a second pass over the text. A "table"
is a TOML table, a YAML mapping or a JSON object.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EISDIR, ENOENT
from secrets import token_hex
from shutil import copymode
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

from tarry.core.extras import require_extra
from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, MissingExtra, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from yaml.nodes import Node


T = TypeVar("T")
KeyPath: TypeAlias = "tuple[str | int, ...]"
"""The keys and list indices (from 0) that lead to a value."""

MAX_DOCUMENT_BYTES = 1_000_000
"""The limit of `read_document` and `parse_file`; the YAML parser takes seconds for such a file."""

_TOML_ERROR_POSITION = re.compile(r" \((?:at line (\d+), column \d+|at end of document)\)")
_TOML_TOKEN = re.compile(
    r'''(?P<skip>[ \t\r]+|\#[^\n]*)
      | """(?:\\.|[^\\])*?"{3,5} | \'\'\'.*?\'{3,5}
      | "(?:\\.|[^"\\\n])*" | \'[^\'\n]*\'
      | \n | [\[\]{}=,]
      | [^\s\[\]{}=,#"\']+''',
    re.VERBOSE | re.DOTALL,
)
_JSON_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+)
      | "(?:\\.|[^"\\])*"
      | \n | [\[\]{}:,]
      | [^\s\[\]{}:,"]+""",
    re.VERBOSE,
)
_QUOTES = ('"', "'")


@dataclass(frozen=True, slots=True)
class Document:
    """The table of a file that has exactly one document, and the location of each value."""

    path: Path
    data: dict[str, Any]
    locations: dict[KeyPath, str]
    """Where each value comes from: file and line, or an option of the command line."""

    @property
    def root(self) -> DocumentValue:
        """The table that holds all values of the document."""
        return DocumentValue(self, (), self.data)

    def error_at(self, key_path: KeyPath, message: str) -> ConfigurationError:
        """Return an error with the location of a value, or of the nearest table around it."""
        while key_path and key_path not in self.locations:
            key_path = key_path[:-1]
        return ConfigurationError(f"{self.locations.get(key_path, self.path)}: {message}")


class DocumentValue(NamedTuple):
    """A value of a document (a table, a list or a scalar), and the keys that lead to it."""

    document: Document
    key_path: KeyPath
    data: Any

    @property
    def name(self) -> str:
        """The key path as text: servers.payments.failures[0]."""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.key_path)
        return "".join(steps).removeprefix(".") or "the file"

    def item(self, key: str | int) -> DocumentValue:
        """Return the value of a key of this table, or at an index of this list."""
        return DocumentValue(self.document, (*self.key_path, key), self.data[key])

    def table(self) -> Mapping[str, Any]:
        """Return the data if it is a table, else raise."""
        if not isinstance(self.data, Mapping):
            raise self.type_error("a table")
        return cast("Mapping[str, Any]", self.data)

    def check(self, check_function: Callable[..., T], *limits: float, hint: str = "") -> T:
        """Check the data with a function of `tarry.core.checks`; append `hint` to its error."""
        try:
            return check_function(self.name, self.data, *limits)
        except ConfigurationError as error:
            raise self.error(f"{error}{hint}") from None

    def check_keys(self, allowed_keys: Iterable[str]) -> None:
        """Raise if this table has a key that is not allowed; the error suggests a similar key."""
        keys = list(allowed_keys)
        for key in self.table():
            if key not in keys:
                message = f"{key!r} is not a known key of {self.name}; {did_you_mean(key, keys)}"
                raise self.error(message, key)

    def type_error(self, expected: str) -> ConfigurationError:
        """Return an error about the type of this value."""
        return self.error(f"{self.name} must be {expected}, got {short_repr(self.data)}")

    def error(self, message: str, *keys: str | int) -> ConfigurationError:
        """Return an error with the location of this value, or of a value inside it."""
        return self.document.error_at((*self.key_path, *keys), message)


class ParsedDocument(NamedTuple):
    """One parsed document, and the line of each value. A YAML file can have several documents."""

    data: Any
    line_numbers: dict[KeyPath, int]
    first_line: int = 1


class DocumentSyntaxError(Exception):
    """Raised if a text cannot be parsed; `line` is 0 if the parser does not report it."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_document(path: Path) -> Document:
    """Read a file that holds one table. The suffix of the file selects the format."""
    if path.suffix.lower() not in PARSERS:
        raise ConfigurationError(f"{path}: the name must end in {', '.join(PARSERS)}")
    documents = parse_file(path)
    if len(documents) > 1:
        msg = f"{path}:{documents[1].first_line}: must hold one document, but a second one begins"
        raise ConfigurationError(msg)
    data, line_numbers, _ = documents[0] if documents else ParsedDocument({}, {})
    if not isinstance(data, dict):
        msg = f"{path}:1: must be a table of keys and values, got {short_repr(data)}"
        raise ConfigurationError(msg)
    locations = {key_path: f"{path}:{line}" for key_path, line in line_numbers.items()}
    return Document(path, cast("dict[str, Any]", data), {(): f"{path}:1", **locations})


def parse_file(path: Path) -> list[ParsedDocument]:
    """Parse every document of a file. A file with an unknown suffix is parsed as YAML."""
    parse = PARSERS.get(path.suffix.lower(), PARSERS[".yaml"])
    text = read_text(path, MAX_DOCUMENT_BYTES)
    try:
        return parse(text)
    except DocumentSyntaxError as error:
        location = f"{path}:{error.line}" if error.line else path
        raise ConfigurationError(f"{location}: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: nested too deeply") from None
    except MissingExtra as error:
        raise MissingExtra(f"{path}: {error}") from None


def import_yaml() -> Any:
    """Return the module `yaml`, or raise `MissingExtra`."""
    with require_extra("YAML needs PyYAML", "sim"):
        import yaml
    return yaml


def _parse_toml(text: str) -> list[ParsedDocument]:
    try:
        return [ParsedDocument(tomllib.loads(text), toml_line_numbers(text))]
    except ValueError as error:
        position = _TOML_ERROR_POSITION.search(str(error))
        line = int(position[1]) if position and position[1] else text.count("\n") + 1
        message = _TOML_ERROR_POSITION.sub("", str(error))
        raise DocumentSyntaxError(f"not TOML: {message}", line) from None


def _parse_json(text: str) -> list[ParsedDocument]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DocumentSyntaxError(f"not JSON: {error.msg}", error.lineno) from None
    except ValueError as error:  # Python does not parse an integer with thousands of digits
        raise DocumentSyntaxError(f"not JSON: {error}") from None
    line_numbers, duplicate_key = json_line_numbers(text)
    if duplicate_key is not None:
        key, line = duplicate_key
        raise DocumentSyntaxError(f"the key {key!r} appears twice in one table", line)
    return [ParsedDocument(data, line_numbers)]


def _parse_yaml(text: str) -> list[ParsedDocument]:
    yaml = import_yaml()
    documents: list[ParsedDocument] = []
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            first_line = loader.peek_event().start_mark.line + 1
            node = loader.get_node()
            line_numbers: dict[KeyPath, int] = {}
            _record_yaml_line_numbers(node, (), line_numbers, set())
            data = loader.construct_document(node)
            documents.append(ParsedDocument(data, line_numbers, first_line))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        raise DocumentSyntaxError(f"not YAML: {error.problem}", line) from None
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentSyntaxError(f"not YAML: {' '.join(str(error).split())}") from None
    return documents


def _record_yaml_line_numbers(
    node: Node, key_path: KeyPath, line_numbers: dict[KeyPath, int], visited: set[int]
) -> None:
    """Record the line of each value below a YAML node; raise for aliases and duplicate keys."""
    import yaml

    if id(node) in visited:  # an alias: nested aliases can expand to more values than fit in memory
        line = line_numbers.get(key_path, 1)
        raise DocumentSyntaxError("write the value out instead of an alias", line)
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            line_numbers[*key_path, index] = item.start_mark.line + 1
            _record_yaml_line_numbers(item, (*key_path, index), line_numbers, visited)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                raise DocumentSyntaxError("a key must be a plain name or a quoted string", line)
            inner_path = (*key_path, key.value)
            if inner_path in line_numbers:
                first_line = line_numbers[inner_path]
                message = f"the key {key.value!r} appears twice, first on line {first_line}"
                raise DocumentSyntaxError(message, line)
            line_numbers[inner_path] = line
            _record_yaml_line_numbers(value, inner_path, line_numbers, visited)


PARSERS: dict[str, Callable[[str], list[ParsedDocument]]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}
"""The parser for each file suffix."""


class _Token(NamedTuple):
    text: str
    line: int


class _LineFinder:
    """Reads the tokens of a valid TOML or JSON text, and records the line of each key and item."""

    def __init__(self, text: str, pattern: re.Pattern[str], unquote: Callable[[str], str]) -> None:
        self.line_numbers: dict[KeyPath, int] = {}
        self.duplicate_key: _Token | None = None
        """For JSON: the first key that is repeated in its table, and the line where it does."""
        self._unquote = unquote
        self._tokens: list[_Token] = []
        self._position = 0
        line = 1
        for match in pattern.finditer(text):
            if not match["skip"]:
                self._tokens.append(_Token(match[0], line))
            line += match[0].count("\n")
        self._tokens.append(_Token("", line))  # marks the end

    def peek(self) -> _Token:
        return self._tokens[self._position]

    def take(self) -> _Token:
        token = self.peek()
        if token.text:
            self._position += 1
        return token

    def skip(self, *texts: str) -> _Token:
        """Take all tokens with these texts; return the token after them without taking it."""
        while self.peek().text in texts:
            self.take()
        return self.peek()

    def take_key(self, separator: str) -> list[str]:
        """Take a key and the separator after it, such as "="; return the parts of a dotted key."""
        parts: list[str] = []
        while (text := self.take().text) not in {separator, ""}:
            if text.startswith(_QUOTES):
                parts.append(self._unquote(text))
            else:
                parts.extend(part for part in text.split(".") if part)
        return parts

    def take_pair(self, key_path: KeyPath, separator: str) -> None:
        """Take a key and its value inside the table at `key_path`."""
        line = self.peek().line
        for part in self.take_key(separator):
            key_path = (*key_path, part)
            # In TOML this need not be a duplicate: two dotted keys can have the same first part.
            # Only JSON uses `duplicate_key`, because the TOML parser rejects duplicates itself.
            if key_path in self.line_numbers and self.duplicate_key is None:
                self.duplicate_key = _Token(part, line)
            self.line_numbers.setdefault(key_path, line)
        self.skip("\n")
        self.take_value(key_path, separator)

    def take_value(self, key_path: KeyPath, separator: str) -> None:
        """Take a scalar, or a list or table with all its content."""
        first_text = self.take().text
        if first_text == "[":
            index = 0
            while self.skip("\n", ",").text not in {"]", ""}:
                self.line_numbers[*key_path, index] = self.peek().line
                self.take_value((*key_path, index), separator)
                index += 1
            self.take()
        elif first_text == "{":
            while self.skip("\n", ",").text not in {"}", ""}:
                self.take_pair(key_path, separator)
            self.take()
        else:  # a scalar; a TOML date and its time can be separated by a space
            while self.peek().text not in {",", "]", "}", "\n", ""}:
                self.take()


def toml_line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the line of each table, key and list item of a valid TOML text."""
    finder = _LineFinder(text, _TOML_TOKEN, lambda key: str(tomllib.loads(f"key = {key}")["key"]))
    last_index: dict[KeyPath, int] = {}  # the index of the last table in each array of tables
    table_path: KeyPath = ()
    while (token := finder.skip("\n")).text:
        if token.text != "[":
            finder.take_pair(table_path, "=")
            continue
        finder.take()
        is_array = finder.peek().text == "["
        finder.skip("[")
        key = finder.take_key("]")
        finder.skip("]")
        table_path = ()
        for number, part in enumerate(key, 1):
            table_path = (*table_path, part)
            finder.line_numbers.setdefault(table_path, token.line)
            if is_array and number == len(key):
                last_index[table_path] = last_index.get(table_path, -1) + 1
            if table_path in last_index:
                table_path = (*table_path, last_index[table_path])
                finder.line_numbers.setdefault(table_path, token.line)
    return finder.line_numbers


def json_line_numbers(text: str) -> tuple[dict[KeyPath, int], tuple[str, int] | None]:
    """Return the line of each key and item of a valid JSON text, and its duplicate key, if any."""
    finder = _LineFinder(text, _JSON_TOKEN, json.loads)
    finder.skip("\n")
    finder.take_value((), ":")
    return finder.line_numbers, finder.duplicate_key


def read_text(path: Path, max_bytes: int) -> str:
    """Return the content of a UTF-8 file of at most `max_bytes` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > max_bytes:
        raise ConfigurationError(f"{path}: too large; at most {max_bytes:,} bytes are allowed")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        msg = f"{path}:{line}: must be UTF-8, got the byte 0x{raw[error.start]:02x}"
        raise ConfigurationError(msg) from None


def check_output_path(path: Path) -> None:
    """Raise if the path is a folder or its folder does not exist. Call it before expensive work."""
    with _convert_os_errors(path):
        if path.is_dir():
            raise OSError(EISDIR, "Is a folder")
        if not path.parent.is_dir():
            raise OSError(ENOENT, "No such folder")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it, so that readers never see a partial file."""
    check_output_path(path)
    with _convert_os_errors(path):
        if path.exists() and not path.is_file():  # a pipe or a device must not be replaced
            path.write_bytes(content)
            return
        target = path.resolve()  # so that a symbolic link stays a link
        # `tempfile` is not used, because it creates files that only their owner can read.
        temporary = target.with_name(f".{target.name}.{token_hex(4)}")
        try:
            temporary.write_bytes(content)
            if target.exists():
                copymode(target, temporary)
            temporary.replace(target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def _convert_os_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
