"""Make scenarios and defences from the plain data of a file; each refusal names its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tarry.core.breaker import Breaker
from tarry.core.checks import check_at_least, check_number
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.core.suggest import did_you_mean
from tarry.errors import ConfigurationError, short_repr
from tarry.policyfile.defence import BUDGETS, LIMITERS, Defence
from tarry.simulator.distributions import DISTRIBUTIONS, Fixed
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.simulator.distributions import Distribution
    from tarry.simulator.files.documents import Document, Place

T = TypeVar("T")

_WORD = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
_KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {"budget": BUDGETS, "limiter": LIMITERS}
_MAKERS: dict[str, Callable[..., Any]] = {"breaker": Breaker, "hedging": Hedging}
DEFENCE_KEYS = ("preset", *signature(Policy).parameters, *_MAKERS, *_KINDS)


def scenario_of(document: Document) -> Scenario:
    """Make a scenario from a whole document."""
    return _made(Scenario, document, (), document.data)


def defence_of(document: Document, place: Place, data: object) -> Defence:
    """Make a defence from its table."""
    table = _table(document, place, data)
    check_keys(document, place, table, DEFENCE_KEYS)
    for name in (*_MAKERS, *_KINDS):
        if name in table:  # each by itself first, so that a refusal is about its own keys
            _check_part(document, (*place, name), name, table[name])
    return _guarded(document, place, table, lambda: Defence.from_dict(table))


def distribution_of(document: Document, place: Place, data: object) -> Distribution:
    """Make a distribution from a number, which is always drawn, or from a table with its kind."""
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return Fixed(_checked(document, place, lambda name: check_at_least(name, data, 0)))
    if not isinstance(data, Mapping):
        msg = f"{_name(place)} must be seconds or a table with a kind, got {short_repr(data)}"
        msg += _hint(data)
        raise document.refusal(place, msg)
    table = cast("Mapping[str, Any]", data)
    kind = _kind(document, place, table, DISTRIBUTIONS)
    rest = {key: value for key, value in table.items() if key != "kind"}
    return _made(DISTRIBUTIONS[kind], document, place, rest)


def parts_of(defence: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the class of each part that the plain form of a defence has."""
    makers = {name: make for name, make in _MAKERS.items() if name in defence}
    kinds = {name: of[defence[name]["kind"]] for name, of in _KINDS.items() if name in defence}
    return makers | kinds


def _check_part(document: Document, place: Place, name: str, data: object) -> None:
    table = _table(document, place, data)
    if name in _KINDS:
        _kind(document, place, table, _KINDS[name])
    make = parts_of({name: table})[name]
    kind = ["kind"] if name in _KINDS else []
    known = signature(make).parameters
    check_keys(document, place, table, [*kind, *known])
    for key, one in known.items():
        if one.default is Parameter.empty and key not in table:
            raise document.refusal(place, f"{_name(place)} needs the key {key!r}")
    _guarded(document, place, table, lambda: Defence.from_dict({name: table}))


def _made(make: type[T], document: Document, place: Place, data: object) -> T:
    """Call a dataclass with the values of a table, each made from its plain form."""
    table = _table(document, place, data)
    known = {field.name: field for field in fields(cast("Any", make))}
    check_keys(document, place, table, known)
    for name, field in known.items():
        missing = field.default is MISSING and field.default_factory is MISSING
        if missing and name not in table:
            raise document.refusal(place, f"{_name(place)} needs the key {name!r}")
    values = {
        name: _value(str(known[name].type), document, (*place, name), value)
        for name, value in table.items()
    }
    return _guarded(document, place, table, lambda: make(**values))


def _value(kind: str, document: Document, place: Place, data: object) -> Any:
    """Make the value of a field, told by the annotation of the field."""
    kind, _, none = kind.partition(" | ")
    if none and data is None:
        return None
    match kind:
        case "Distribution":
            return distribution_of(document, place, data)
        case "Defence":
            return defence_of(document, place, data)
        case "Clients":
            return _made(Clients, document, place, data)
        case "dict[str, Server]":
            table = _table(document, place, data)
            return {
                name: _made(Server, document, (*place, name), one) for name, one in table.items()
            }
        case "tuple[Failure, ...]":
            return _list(Failure, document, place, data)
        case "tuple[Surge, ...]":
            return _list(Surge, document, place, data)
        case "tuple[float, ...]":
            if not isinstance(data, (list, tuple)):
                raise document.refusal(
                    place, f"{_name(place)} must be a list, got {short_repr(data)}"
                )
            return tuple(cast("list[float]", data))
        case "float":
            return _checked(document, place, lambda name: check_number(name, data), _hint(data))
        case "str" if not isinstance(data, str):
            raise document.refusal(place, f"{_name(place)} must be a text, got {short_repr(data)}")
        case _:
            return data


def _list(make: type[T], document: Document, place: Place, data: object) -> tuple[T, ...]:
    if not isinstance(data, list):
        raise document.refusal(
            place, f"{_name(place)} must be a list of tables, got {short_repr(data)}"
        )
    items = enumerate(cast("list[object]", data))
    return tuple(_made(make, document, (*place, index), item) for index, item in items)


def _table(document: Document, place: Place, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise document.refusal(place, f"{_name(place)} must be a table, got {short_repr(data)}")
    return cast("Mapping[str, Any]", data)


def _kind(
    document: Document, place: Place, table: Mapping[str, Any], kinds: Mapping[str, object]
) -> str:
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        got = f", got {short_repr(kind)}" if "kind" in table else ""
        msg = f"{_name(place)} needs a kind, one of {', '.join(sorted(kinds))}{got}"
        raise document.refusal((*place, "kind"), msg)
    return kind


def check_keys(
    document: Document, place: Place, table: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Refuse a key that is not known, and suggest one that is."""
    names = list(known)
    for key in table:
        if key not in names:
            msg = f"{_name(place)} has no key {key!r}; {did_you_mean(key, names)}"
            raise document.refusal((*place, key), msg)


def _guarded(
    document: Document,
    place: Place,
    table: Mapping[str, Any],
    make: Callable[[], T],
) -> T:
    """Make a value; an error gets the line of its field, or of the first key its rule mentions."""
    try:
        return make()
    except ConfigurationError as error:
        mentioned = [error.field or "", *_WORD.findall(error.rule)]
        words = (tuple(word.split(".")) for word in mentioned)
        at = next((word for word in words if word[0] in table), ())
        about = f"{_name(place)}: " if place else ""
        raise document.refusal((*place, *at), f"{about}{error}") from None


def _checked(document: Document, place: Place, check: Callable[[str], T], hint: str = "") -> T:
    """Check one value under its full name."""
    try:
        return check(_name(place))
    except ConfigurationError as error:
        raise document.refusal(place, f"{error}{hint}") from None


def _hint(data: object) -> str:
    """Say how a number is written that YAML, or a pair of quotes, made a text of."""
    if not isinstance(data, str):
        return ""
    try:
        float(data)
    except ValueError:
        return ""
    return "; write it without quotes, and in YAML as 1.0e+1, not 1e1"


def _name(place: Place) -> str:
    """The way to a value as people write it: servers.payments.failures[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "the file"
