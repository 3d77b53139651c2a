"""Build scenarios and defences from the data of a document. Errors name the line of the value.

The keys of a scenario file are the fields of the dataclasses in `tarry.simulator.scenario`. The
annotation of a field selects how its value is built. A defence is a retry policy or a hedging
policy, with an optional breaker, budget and limiter.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from io import StringIO
from math import inf, nan
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from tarry.core.breaker import Breaker
from tarry.core.checks import check_at_least, check_number, check_positive
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, short_repr
from tarry.policyfile.defence import BUDGETS, LIMITERS, Defence, parameters_of
from tarry.simulator.distributions import DISTRIBUTIONS, Fixed
from tarry.simulator.documents import DocumentValue, read_text
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge

if TYPE_CHECKING:
    from pathlib import Path

    from tarry.simulator.distributions import Distribution
    from tarry.simulator.documents import Document

T = TypeVar("T")
PartClass: TypeAlias = Callable[..., Any]  # Breaker, Hedging, a budget or a limiter

MAX_DURATIONS_FILE_BYTES = 50_000_000
MAX_DURATION_COUNT = 1_000_000
_DOTTED_NAME = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
_CLASSES_BY_KIND: dict[str, Mapping[str, PartClass]] = {"budget": BUDGETS, "limiter": LIMITERS}
"""For the parts of a defence that have a `kind`: the class of each kind."""
_CLASSES_WITHOUT_KIND: dict[str, PartClass] = {"breaker": Breaker, "hedging": Hedging}
"""For the parts of a defence that have no `kind`: their class."""
DEFENCE_KEYS = ("preset", *parameters_of(Policy), *_CLASSES_WITHOUT_KIND, *_CLASSES_BY_KIND)


def build_scenario(document: Document) -> Scenario:
    """Build a scenario from the document of a scenario file."""
    return _build_object(Scenario, document.root)


def build_defence(value: DocumentValue) -> Defence:
    """Build a defence from its table."""
    table = value.table()
    value.check_keys(DEFENCE_KEYS)
    for name in (*_CLASSES_WITHOUT_KIND, *_CLASSES_BY_KIND):
        if name in table:  # checked separately, so that an error names the key of the part
            _check_part(name, value.item(name))
    return with_location(value, lambda: Defence.from_dict(table))


def read_durations(value: DocumentValue) -> tuple[float, ...]:
    """Read the file that a table `{ kind = "empirical", file, column, scale }` refers to.

    The file has one number on each line, or it is a CSV file if the table has a `column`. Each
    number is multiplied by `scale` to get seconds.
    """
    table = value.table()
    value.check_keys(("kind", "file", "column", "scale"))
    file_name, column = table["file"], table.get("column")
    for key, text in (("file", file_name), ("column", column)):
        if text is not None and not isinstance(text, str):
            raise value.error(f"{key} must be a string, got {short_repr(text)}", key)
    try:
        scale = check_positive("scale", table.get("scale", 1.0))
    except ConfigurationError as error:
        raise value.error(str(error), "scale") from None
    try:
        return _read_durations_file(value.document.path.parent / file_name, column, scale)
    except ConfigurationError as error:
        raise value.error(f"file: {error}", "file") from None


def _check_part(name: str, value: DocumentValue) -> None:
    if name in _CLASSES_BY_KIND:
        kinds = _CLASSES_BY_KIND[name]
        cls = kinds[_get_kind(value, kinds)]
        _check_arguments(value, cls, "kind")
    else:
        cls = _CLASSES_WITHOUT_KIND[name]
        _check_arguments(value, cls)
    arguments = {key: argument for key, argument in value.table().items() if key != "kind"}
    with_location(value, lambda: cls(**arguments))


def _build_object(cls: type[T], value: DocumentValue) -> T:
    parameters = _check_arguments(value, cls)
    arguments = {
        name: _build_field(str(parameters[name].annotation), value.item(name))
        for name in value.table()
    }
    return with_location(value, lambda: cls(**arguments))


def _check_arguments(
    value: DocumentValue, cls: Callable[..., Any], *other_keys: str
) -> Mapping[str, Parameter]:
    """Check that the keys of a table are the parameters of a class; return these parameters."""
    parameters = parameters_of(cls)
    table = value.table()
    value.check_keys((*other_keys, *parameters))
    for name, parameter in parameters.items():
        if parameter.default is Parameter.empty and name not in table:
            raise value.error(f"{value.name} needs the key {name!r}")
    return parameters


def _build_field(annotation: str, value: DocumentValue) -> Any:
    """Build the value of a field of a dataclass; the annotation of the field names its type."""
    data = value.data
    type_name, _, alternative = annotation.partition(" | ")
    if alternative and data is None:
        return None
    match type_name:
        case "Distribution":
            return _build_distribution(value)
        case "Defence":
            return build_defence(value)
        case "Clients":
            return _build_object(Clients, value)
        case "dict[str, Server]":
            return {name: _build_object(Server, value.item(name)) for name in value.table()}
        case "tuple[Failure, ...]" | "tuple[Surge, ...]":
            if not isinstance(data, list):
                raise value.type_error("a list of tables")
            cls = Failure if "Failure" in type_name else Surge
            count = len(cast("list[object]", data))
            return tuple(_build_object(cls, value.item(index)) for index in range(count))
        case "tuple[float, ...]":
            if not isinstance(data, (list, tuple)):
                raise value.type_error("a list")
            return tuple(cast("list[float]", data))
        case "float":
            return value.check(check_number, hint=_number_hint(data))
        case "str" if not isinstance(data, str):
            raise value.type_error("a string")
        case _:
            return data


def _build_distribution(value: DocumentValue) -> Distribution:
    """Build a distribution from a number of seconds (`Fixed`), or from a table with a `kind`."""
    data = value.data
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return Fixed(value.check(check_at_least, 0))
    if not isinstance(data, Mapping):
        msg = f"{value.name} must be seconds or a table with a kind, got {short_repr(data)}"
        raise value.error(msg + _number_hint(data))
    kind = _get_kind(value, DISTRIBUTIONS)
    arguments = {key: argument for key, argument in value.table().items() if key != "kind"}
    return _build_object(DISTRIBUTIONS[kind], value._replace(data=arguments))


def _get_kind(value: DocumentValue, kinds: Mapping[str, object]) -> str:
    table = value.table()
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        got = f", got {short_repr(kind)}" if "kind" in table else ""
        msg = f"{value.name} needs a kind, one of {', '.join(sorted(kinds))}{got}"
        raise value.error(msg, "kind")
    return kind


def with_location(value: DocumentValue, build: Callable[[], T]) -> T:
    """Call `build`. Its errors get the line of their field, or of the first key they mention."""
    try:
        return build()
    except ConfigurationError as error:
        mentioned_names = [error.field or "", *_DOTTED_NAME.findall(error.rule)]
        candidates = (tuple(name.split(".")) for name in mentioned_names)
        inner_path = next((path for path in candidates if path[0] in value.data), ())
        prefix = f"{value.name}: " if value.key_path else ""
        raise value.error(f"{prefix}{error}", *inner_path) from None


def _number_hint(data: object) -> str:
    """Return a hint if the data is a string with a number, else ""."""
    if not isinstance(data, str):
        return ""
    try:
        float(data)
    except ValueError:
        return ""
    return "; write it without quotes; YAML needs 1.0e+1 instead of 1e1"


def _read_durations_file(path: Path, column: str | None, scale: float) -> tuple[float, ...]:
    rows = csv.reader(StringIO(read_text(path, MAX_DURATIONS_FILE_BYTES)))
    column_index = 0
    durations: list[float] = []
    try:
        if column is not None:
            header = next(rows, list[str]())
            if column not in header:
                msg = f"{path}:1: there is no column {column!r}; there are {', '.join(header)}"
                raise ConfigurationError(msg)
            column_index = header.index(column)
        for row in filter(None, rows):
            text = row[column_index] if column_index < len(row) else ""
            try:
                duration = float(text)
            except ValueError:
                duration = nan
            if not 0 <= duration < inf:
                got = short_repr(text)
                msg = f"{path}:{rows.line_num}: must be a number of at least 0, got {got}"
                raise ConfigurationError(msg)
            if len(durations) == MAX_DURATION_COUNT:
                msg = f"{path}:{rows.line_num}: at most {MAX_DURATION_COUNT:,} values are allowed"
                raise ConfigurationError(msg)
            durations.append(duration * scale)
    except csv.Error as error:
        raise ConfigurationError(f"{path}:{rows.line_num}: not CSV: {error}") from None
    if not durations:
        raise ConfigurationError(f"{path}: the file has no values")
    return tuple(durations)
