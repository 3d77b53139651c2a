"""Build scenarios and defences from the data of a document. Errors name the line of the value.

The keys of a scenario file are the fields of the dataclasses in `tarry.simulator.scenario`. The
annotation of a field selects how its value is built. A defence is a policy with optional parts:
breaker, hedging, budget and limiter.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tarry.core.breaker import Breaker
from tarry.core.checks import check_at_least, check_number, check_positive
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, short_repr
from tarry.policyfile.defence import BUDGETS, LIMITERS, Defence
from tarry.simulator.distributions import DISTRIBUTIONS, Fixed
from tarry.simulator.documents import read_text
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge

if TYPE_CHECKING:
    from _csv import Reader
    from collections.abc import Iterable
    from pathlib import Path

    from tarry.simulator.distributions import Distribution
    from tarry.simulator.documents import Document, KeyPath

T = TypeVar("T")

MAX_DURATIONS_BYTES = 50_000_000
MAX_DURATIONS = 1_000_000
_DOTTED_NAME = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
_PART_KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {"budget": BUDGETS, "limiter": LIMITERS}
"""The parts of a defence whose class depends on their `kind`, with the class of each kind."""
_PART_CLASSES: dict[str, Callable[..., Any]] = {"breaker": Breaker, "hedging": Hedging}
"""The parts of a defence that have only one class."""
DEFENCE_KEYS = ("preset", *signature(Policy).parameters, *_PART_CLASSES, *_PART_KINDS)


def build_scenario(document: Document) -> Scenario:
    """Build a scenario from a whole document."""
    return _build(Scenario, document, (), document.data)


def build_defence(document: Document, key_path: KeyPath, data: object) -> Defence:
    """Build a defence from its table."""
    table = _as_table(document, key_path, data)
    check_keys(document, key_path, table, DEFENCE_KEYS)
    for name in (*_PART_CLASSES, *_PART_KINDS):
        if name in table:  # check each part on its own, so that an error names its key
            _check_part(document, (*key_path, name), name, table[name])
    return _with_location(document, key_path, table, lambda: Defence.from_dict(table))


def build_distribution(document: Document, key_path: KeyPath, data: object) -> Distribution:
    """Build a distribution from a number of seconds (`Fixed`), or from a table with a `kind`."""
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return Fixed(_check(document, key_path, lambda name: check_at_least(name, data, 0)))
    if not isinstance(data, Mapping):
        name = _format_key_path(key_path)
        msg = f"{name} must be seconds or a table with a kind, got {short_repr(data)}"
        raise document.error_at(key_path, msg + _number_hint(data))
    table = cast("Mapping[str, Any]", data)
    kind = _get_kind(document, key_path, table, DISTRIBUTIONS)
    arguments = {key: value for key, value in table.items() if key != "kind"}
    return _build(DISTRIBUTIONS[kind], document, key_path, arguments)


def part_classes(defence: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the class of each part (breaker, budget, ...) that the data of a defence contains."""
    single = {name: cls for name, cls in _PART_CLASSES.items() if name in defence}
    by_kind = {
        name: kinds[defence[name]["kind"]] for name, kinds in _PART_KINDS.items() if name in defence
    }
    return single | by_kind


def check_keys(
    document: Document, key_path: KeyPath, table: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Raise if a table has a key that is not in `known`; the error suggests the closest one."""
    names = list(known)
    for key in table:
        if key not in names:
            msg = f"{_format_key_path(key_path)} has no key {key!r}; {did_you_mean(key, names)}"
            raise document.error_at((*key_path, key), msg)


def read_durations(
    document: Document, key_path: KeyPath, table: Mapping[str, Any]
) -> tuple[float, ...]:
    """Read the file of `{ kind = "empirical", file = ..., column = ..., scale = ... }`.

    The file has one number on each line, or it is a CSV file if the table has a `column`. Each
    number is multiplied by `scale` to get seconds.
    """
    check_keys(document, key_path, table, ("kind", "file", "column", "scale"))
    name, column = table["file"], table.get("column")
    for key, value in (("file", name), ("column", column)):
        if value is not None and not isinstance(value, str):
            msg = f"{key} must be a string, got {short_repr(value)}"
            raise document.error_at((*key_path, key), msg)
    try:
        scale = check_positive("scale", table.get("scale", 1.0))
    except ConfigurationError as error:
        raise document.error_at((*key_path, "scale"), str(error)) from None
    try:
        return _read_csv_durations(document.path.parent / name, column, scale)
    except ConfigurationError as error:
        raise document.error_at((*key_path, "file"), f"file: {error}") from None


def _check_part(document: Document, key_path: KeyPath, name: str, data: object) -> None:
    table = _as_table(document, key_path, data)
    if name in _PART_KINDS:
        _get_kind(document, key_path, table, _PART_KINDS[name])
    parameters = signature(part_classes({name: table})[name]).parameters
    kind_key = ["kind"] if name in _PART_KINDS else []
    check_keys(document, key_path, table, [*kind_key, *parameters])
    for key, parameter in parameters.items():
        if parameter.default is Parameter.empty and key not in table:
            raise document.error_at(key_path, f"{_format_key_path(key_path)} needs the key {key!r}")
    _with_location(document, key_path, table, lambda: Defence.from_dict({name: table}))


def _build(cls: type[T], document: Document, key_path: KeyPath, data: object) -> T:
    """Build an instance of a dataclass from a table."""
    table = _as_table(document, key_path, data)
    fields_by_name = {field.name: field for field in fields(cast("Any", cls))}
    check_keys(document, key_path, table, fields_by_name)
    for name, field in fields_by_name.items():
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and name not in table:
            msg = f"{_format_key_path(key_path)} needs the key {name!r}"
            raise document.error_at(key_path, msg)
    values = {
        name: _build_value(str(fields_by_name[name].type), document, (*key_path, name), value)
        for name, value in table.items()
    }
    return _with_location(document, key_path, table, lambda: cls(**values))


def _build_value(annotation: str, document: Document, key_path: KeyPath, data: object) -> Any:
    """Build the value of a field with this annotation."""
    annotation, _, optional = annotation.partition(" | ")
    if optional and data is None:
        return None
    match annotation:
        case "Distribution":
            return build_distribution(document, key_path, data)
        case "Defence":
            return build_defence(document, key_path, data)
        case "Clients":
            return _build(Clients, document, key_path, data)
        case "dict[str, Server]":
            table = _as_table(document, key_path, data)
            return {
                name: _build(Server, document, (*key_path, name), server)
                for name, server in table.items()
            }
        case "tuple[Failure, ...]":
            return _build_list(Failure, document, key_path, data)
        case "tuple[Surge, ...]":
            return _build_list(Surge, document, key_path, data)
        case "tuple[float, ...]":
            if not isinstance(data, (list, tuple)):
                raise _type_error(document, key_path, "a list", data)
            return tuple(cast("list[float]", data))
        case "float":
            hint = _number_hint(data)
            return _check(document, key_path, lambda name: check_number(name, data), hint)
        case "str" if not isinstance(data, str):
            raise _type_error(document, key_path, "a string", data)
        case _:
            return data


def _build_list(cls: type[T], document: Document, key_path: KeyPath, data: object) -> tuple[T, ...]:
    if not isinstance(data, list):
        raise _type_error(document, key_path, "a list of tables", data)
    items = enumerate(cast("list[object]", data))
    return tuple(_build(cls, document, (*key_path, index), item) for index, item in items)


def _as_table(document: Document, key_path: KeyPath, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise _type_error(document, key_path, "a table", data)
    return cast("Mapping[str, Any]", data)


def _type_error(
    document: Document, key_path: KeyPath, expected: str, data: object
) -> ConfigurationError:
    msg = f"{_format_key_path(key_path)} must be {expected}, got {short_repr(data)}"
    return document.error_at(key_path, msg)


def _get_kind(
    document: Document, key_path: KeyPath, table: Mapping[str, Any], kinds: Mapping[str, object]
) -> str:
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        got = f", got {short_repr(kind)}" if "kind" in table else ""
        name = _format_key_path(key_path)
        msg = f"{name} needs a kind, one of {', '.join(sorted(kinds))}{got}"
        raise document.error_at((*key_path, "kind"), msg)
    return kind


def _with_location(
    document: Document,
    key_path: KeyPath,
    table: Mapping[str, Any],
    build: Callable[[], T],
) -> T:
    """Return `build()`; add the location of the value to an error.

    The value is the field of the error, or else the first key of the table that the error mentions.
    """
    try:
        return build()
    except ConfigurationError as error:
        mentioned = [error.field or "", *_DOTTED_NAME.findall(error.rule)]
        candidates = (tuple(name.split(".")) for name in mentioned)
        inner_path = next((names for names in candidates if names[0] in table), ())
        prefix = f"{_format_key_path(key_path)}: " if key_path else ""
        raise document.error_at((*key_path, *inner_path), f"{prefix}{error}") from None


def _check(document: Document, key_path: KeyPath, check: Callable[[str], T], hint: str = "") -> T:
    """Return `check(name)` for the full name of a value; add the location to an error."""
    try:
        return check(_format_key_path(key_path))
    except ConfigurationError as error:
        raise document.error_at(key_path, f"{error}{hint}") from None


def _number_hint(data: object) -> str:
    """Return a hint if a string looks like a number: it was quoted, or YAML read it as a string."""
    if not isinstance(data, str):
        return ""
    try:
        float(data)
    except ValueError:
        return ""
    return "; write it without quotes, and in YAML as 1.0e+1, not 1e1"


def _format_key_path(key_path: KeyPath) -> str:
    """Return a key path as text: servers.payments.failures[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key_path)
    return text.removeprefix(".") or "the file"


def _read_csv_durations(path: Path, column: str | None, scale: float) -> tuple[float, ...]:
    rows = csv.reader(StringIO(read_text(path, MAX_DURATIONS_BYTES)))
    try:
        return _parse_durations(path, rows, column, scale)
    except csv.Error as error:
        msg = f"{path}:{rows.line_num}: not CSV: {error}"
        raise ConfigurationError(msg) from None


def _parse_durations(
    path: Path, rows: Reader, column: str | None, scale: float
) -> tuple[float, ...]:
    index = 0
    if column is not None:
        header = next(rows, list[str]())
        if column not in header:
            msg = f"{path}:1: there is no column {column!r}; there are {', '.join(header)}"
            raise ConfigurationError(msg)
        index = header.index(column)
    durations: list[float] = []
    for row in rows:
        if not row:
            continue
        text = row[index] if index < len(row) else ""
        duration = _parse_duration(text)
        if duration is None:
            msg = f"{path}:{rows.line_num}: must be a number of at least 0, got {short_repr(text)}"
            raise ConfigurationError(msg)
        if len(durations) == MAX_DURATIONS:
            msg = f"{path}:{rows.line_num}: at most {MAX_DURATIONS:,} values are read"
            raise ConfigurationError(msg)
        durations.append(duration * scale)
    if not durations:
        msg = f"{path}: the file has no values"
        raise ConfigurationError(msg)
    return tuple(durations)


def _parse_duration(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
