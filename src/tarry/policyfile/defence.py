"""A defence: a retry policy or hedging, and optionally a breaker, a retry budget and a limiter.

A policy file describes one defence:

    max_attempts = 4            # fields of tarry.Policy; preset = "interactive" sets the others
    [breaker]                   # the arguments of tarry.Breaker
    [budget]                    # kind = "token", "ratio" or "throttle", and its arguments
    [limiter]                   # kind = "in-flight", "aimd", "adaptive" or "adaptive-limit"
    [hedging]                   # the arguments of tarry.Hedging, instead of the policy's fields

Breakers, budgets and limiters (called components) have state. Therefore a defence contains only
their arguments, and `Defence.downstream` builds new components from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Self, cast

from tarry.core.adaptive_limit import AdaptiveLimit
from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.checks import check_one_of
from tarry.core.downstream import Downstream
from tarry.core.hedging import Hedging
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.policy import Policy
from tarry.core.text import did_you_mean
from tarry.core.values import ImmutableValue
from tarry.errors import ConfigurationError, ConfigurationTypeError

BUDGETS: dict[str, Callable[..., Any]] = {
    "token": TokenBudget,
    "ratio": RatioBudget,
    "throttle": ThrottleBudget,
}
LIMITERS: dict[str, Callable[..., Any]] = {
    "in-flight": InFlight,
    "aimd": AIMD,
    "adaptive": AdaptiveRate,
    "adaptive-limit": AdaptiveLimit,
}
_CLASSES_BY_KIND = {"budget": BUDGETS, "limiter": LIMITERS}
_COMPONENT_NAMES = ("breaker", "budget", "limiter")
TABLE_NAMES = (*_COMPONENT_NAMES, "hedging")


class Defence(ImmutableValue):
    """A policy or hedging, with the arguments of its breaker, budget and limiter.

    `breaker`, `budget` and `limiter` contain arguments; None means that the defence has no such
    component. With hedging, `policy` is the default policy and is not used.
    """

    __slots__ = __match_args__ = _fields = ("policy", "hedging", "breaker", "budget", "limiter")

    policy: Policy
    hedging: Hedging | None
    breaker: Mapping[str, Any] | None
    budget: Mapping[str, Any] | None
    limiter: Mapping[str, Any] | None

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        hedging: Hedging | None = None,
        breaker: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        limiter: Mapping[str, Any] | None = None,
    ) -> None:
        if policy is not None and hedging is not None:
            raise ConfigurationError("a call has a policy or hedging, not both: leave one out")
        tables = {"breaker": breaker, "budget": budget, "limiter": limiter}
        copies = (_copy_table(name, table) for name, table in tables.items())
        self._set_fields(Policy() if policy is None else policy, hedging, *copies)
        self.downstream(name="check")  # only to reject invalid arguments

    def downstream(self, name: str) -> Downstream:
        """Build a downstream (the state kept for a dependency) with new components."""
        return Downstream(name, **build_components(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a policy file as a dict of JSON and TOML types."""
        data: dict[str, Any] = {} if self.hedging is not None else self.policy.to_dict()
        values = self._asdict()
        data |= {name: values[name] for name in _COMPONENT_NAMES if values[name] is not None}
        if self.hedging is not None:
            hedging = self.hedging
            fields = {field: getattr(hedging, field) for field in signature(Hedging).parameters}
            data["hedging"] = {name: value for name, value in fields.items() if value is not None}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a defence from the contents of a policy file, which may have a key "preset"."""
        tables = {name: _check_table(name, data[name]) for name in TABLE_NAMES if name in data}
        fields = {name: value for name, value in data.items() if name not in TABLE_NAMES}
        policy: Policy | None = None
        if fields:
            preset = fields.pop("preset", "default")  # the policy that sets the missing fields
            policy = Policy.from_dict(Policy.preset(preset).to_dict() | fields)
        hedging = _build("hedging", tables.pop("hedging", None))
        return cls(policy, hedging=hedging, **tables)

    def _asdict(self) -> dict[str, Any]:
        """Return the arguments of the constructor, used for comparison, repr and pickling.

        Tables become plain dicts, because a mapping proxy cannot be pickled. With hedging the
        policy is None, because the constructor accepts only one of the two.
        """
        values = super()._asdict()
        if self.hedging is not None:
            values["policy"] = None
        return values | {
            name: dict(values[name]) for name in _COMPONENT_NAMES if values[name] is not None
        }

    def __hash__(self) -> int:
        tables = (getattr(self, name) for name in _COMPONENT_NAMES)
        items = (None if table is None else frozenset(table.items()) for table in tables)
        return hash((type(self), self.policy, self.hedging, *items))


def build_components(defence: Defence) -> dict[str, Any]:
    """Build a new breaker, budget and limiter, by name; None for those that the defence lacks."""
    return {name: _build(name, getattr(defence, name)) for name in _COMPONENT_NAMES}


def component_arguments(defence: Defence, component: str) -> dict[str, Any] | None:
    """Return a component's arguments, with defaults but without `kind`; None if it is missing."""
    table: Mapping[str, Any] | None = getattr(defence, component)
    return None if table is None else table_arguments(component, table)


def table_arguments(table_name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a table, with defaults for missing ones but without `kind`."""
    factory, arguments = _factory_and_arguments(table_name, table)
    parameters = parameters_of(factory)
    return {name: parameter.default for name, parameter in parameters.items()} | arguments


def parameters_of(factory: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a class by name, without `**unknown`."""
    parameters = signature(factory).parameters.items()
    return {name: item for name, item in parameters if item.kind is not Parameter.VAR_KEYWORD}


def _build(table_name: str, table: Mapping[str, Any] | None) -> Any:
    """Build a breaker, budget, limiter or hedging from its table; None without a table."""
    if table is None:
        return None
    factory, arguments = _factory_and_arguments(table_name, table)
    parameters = parameters_of(factory)
    for name in arguments:
        if name not in parameters:
            msg = f"{table_name} has no field {name!r}; {did_you_mean(name, parameters)}"
            raise ConfigurationError(msg)
    for name, parameter in parameters.items():
        if parameter.default is Parameter.empty and name not in arguments:
            raise ConfigurationError(f"{table_name} needs the field {name!r}")
    try:
        return factory(**arguments)
    except ConfigurationError as error:
        raise error.with_field(f"{table_name}.{error.field}") from None


def _factory_and_arguments(
    table_name: str, table: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class that a table configures, and the arguments in the table without `kind`."""
    arguments = dict(table)
    if table_name not in _CLASSES_BY_KIND:
        return Breaker if table_name == "breaker" else Hedging, arguments
    kind = arguments.pop("kind", None)
    check_one_of(f"{table_name}.kind", kind, _CLASSES_BY_KIND[table_name])
    return _CLASSES_BY_KIND[table_name][kind], arguments


def _copy_table(name: str, table: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a read-only copy of a table, so that later changes by the caller have no effect.

    A shallow copy is enough, because every argument is a number, a string or None.
    """
    return None if table is None else MappingProxyType(dict(_check_table(name, table)))


def _check_table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(name, "must be a table of its fields", value)
    return cast("Mapping[str, Any]", value)
