"""What can be changed in a scenario, by its dotted name: `servers.payments.concurrency`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from tarry.core.policy import Policy
from tarry.errors import short_repr
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import DISTRIBUTIONS, Empirical, Fixed
from tarry.simulator.files.documents import Spot
from tarry.simulator.files.schema import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.simulator.files.documents import Document, Place
    from tarry.simulator.scenario import Scenario

_KINDS: dict[type, str] = {make: kind for kind, make in DISTRIBUTIONS.items()}


def settings_of(scenario: Scenario) -> dict[str, Any]:
    """Return everything that can be changed, with the value in force."""
    return dict(_settings("", scenario))


def changed(document: Document, name: str, value: object) -> Document:
    """Return a document with one value changed, which is where a refusal will point to."""
    place: Place = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    spot = Spot(f"{name} = {short_repr(value)}")
    data = cast("dict[str, Any]", _put(document.data, place, value))
    return replace(document, data=data, spots=document.spots | {place: spot})


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the changes of a variant, table by table.

    `false` takes a table away. A table of another kind replaces the whole table.
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and value is False:
            del result[key]
        elif isinstance(old, Mapping) and isinstance(value, Mapping) and "kind" not in value:
            result[key] = merged(cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result


def _settings(name: str, value: object) -> Iterator[tuple[str, Any]]:
    parts: Mapping[str, object] | None = None
    if isinstance(value, Defence):
        parts = _of_defence(value)
    elif isinstance(value, Fixed):
        value = value.value  # in a file just the number
    elif isinstance(value, Empirical):
        value = value.mean
    elif type(value) in _KINDS:
        yield name.removeprefix("."), _KINDS[type(value)]  # so that it can become just a number
        parts = _fields(value)
    elif is_dataclass(value):
        parts = _fields(value)
    elif isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        parts = {str(index): item for index, item in enumerate(items)}
    elif isinstance(value, dict):
        parts = cast("dict[str, object]", value)
    if parts is None:
        yield name.removeprefix("."), value
        return
    for part, inner in parts.items():
        yield from _settings(f"{name}.{part}", inner)


def _fields(value: Any) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _of_defence(defence: Defence) -> dict[str, Any]:
    """Return the fields of the policy and of the parts that there are, the defaults too."""
    plain = defence.to_dict()
    own = dict.fromkeys(signature(Policy).parameters) if defence.hedging is None else {}
    own |= plain
    for name, make in parts_of(plain).items():
        known = signature(make).parameters.values()
        own[name] = {one.name: one.default for one in known} | plain[name]
    return own


def _put(data: object, place: Place, value: object) -> object:
    if not place:
        return value
    key, rest = place[0], place[1:]
    if isinstance(data, list) and isinstance(key, int):
        items = list(cast("list[object]", data))
        items[key] = _put(items[key], rest, value)
        return items
    table = dict(cast("Mapping[str, Any]", data)) if isinstance(data, Mapping) else {}
    return {**table, str(key): _put(table.get(str(key)), rest, value)}
