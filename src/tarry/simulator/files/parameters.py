"""List and change the values of a scenario by dotted names like `servers.payments.concurrency`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from tarry.core.policy import Policy
from tarry.errors import short_repr
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import DISTRIBUTIONS, Empirical, Fixed
from tarry.simulator.files.documents import SourceLocation
from tarry.simulator.files.schema import part_classes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.simulator.files.documents import Document, KeyPath
    from tarry.simulator.scenario import Scenario

_DISTRIBUTION_KINDS: dict[type, str] = {cls: kind for kind, cls in DISTRIBUTIONS.items()}


def list_parameters(scenario: Scenario) -> dict[str, Any]:
    """Return the names of all values that can be changed, with their current values."""
    return dict(_list_values("", scenario))


def with_value(document: Document, name: str, value: object) -> Document:
    """Return a document with one value changed.

    An error about the value shows the change, such as `clients.rate = 5`, instead of a line.
    """
    key_path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    location = SourceLocation(f"{name} = {short_repr(value)}")
    data = cast("dict[str, Any]", _replace_at(document.data, key_path, value))
    return replace(document, data=data, locations=document.locations | {key_path: location})


def merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base table with the changes of a variant.

    Nested tables are merged as well, with two exceptions: `false` removes a table, and a table that
    has a `kind` replaces the base table instead of being merged.
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and value is False:
            del result[key]
        elif isinstance(old, Mapping) and isinstance(value, Mapping) and "kind" not in value:
            result[key] = merge_tables(
                cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value)
            )
        else:
            result[key] = value
    return result


def _list_values(name: str, value: object) -> Iterator[tuple[str, Any]]:
    inner: Mapping[str, object] | None = None
    if isinstance(value, Defence):
        inner = _defence_values(value)
    elif isinstance(value, Fixed):
        value = value.value  # a file has just the number
    elif isinstance(value, Empirical):
        value = value.mean
    elif type(value) in _DISTRIBUTION_KINDS:
        # List the table itself too, so that a number can replace the whole table.
        yield name.removeprefix("."), _DISTRIBUTION_KINDS[type(value)]
        inner = _field_values(value)
    elif is_dataclass(value):
        inner = _field_values(value)
    elif isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        inner = {str(index): item for index, item in enumerate(items)}
    elif isinstance(value, dict):
        inner = cast("dict[str, object]", value)
    if inner is None:
        yield name.removeprefix("."), value
        return
    for key, inner_value in inner.items():
        yield from _list_values(f"{name}.{key}", inner_value)


def _field_values(value: Any) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _defence_values(defence: Defence) -> dict[str, Any]:
    """Return the fields of a defence's policy and parts, including those with default values."""
    data = defence.to_dict()
    values = dict.fromkeys(signature(Policy).parameters) if defence.hedging is None else {}
    values |= data
    for name, cls in part_classes(data).items():
        parameters = signature(cls).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in parameters}
        values[name] = defaults | data[name]
    return values


def _replace_at(data: object, key_path: KeyPath, value: object) -> object:
    """Return a copy of nested data with the value at a key path replaced."""
    if not key_path:
        return value
    key, rest = key_path[0], key_path[1:]
    if isinstance(data, list) and isinstance(key, int):
        items = list(cast("list[object]", data))
        items[key] = _replace_at(items[key], rest, value)
        return items
    table = dict(cast("Mapping[str, Any]", data)) if isinstance(data, Mapping) else {}
    return {**table, str(key): _replace_at(table.get(str(key)), rest, value)}
