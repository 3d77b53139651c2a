"""A defence: a policy or hedging, with its breaker, retry budget and limiter.

A policy file describes one defence:

    max_attempts = 4            # the policy's own fields, or preset = "interactive"
    [breaker]                   # the arguments of tarry.Breaker
    [budget]                    # kind = "token", "ratio" or "throttle", and its arguments
    [limiter]                   # kind = "in-flight", "aimd" or "adaptive", and its arguments
    [hedging]                   # instead of the policy's fields: a call is retried or hedged

Breakers, budgets and limiters (called parts) have state. Therefore a defence contains only their
arguments, and `Defence.downstream` builds new objects from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Self, cast

from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.checks import ImmutableValue, check_one_of
from tarry.core.downstream import Downstream
from tarry.core.hedging import Hedging
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.policy import Policy
from tarry.core.text import did_you_mean
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
}
_KINDS = {"budget": BUDGETS, "limiter": LIMITERS}
"""Classes by `kind`, for the tables that have a `kind`."""
_PART_NAMES = ("breaker", "budget", "limiter")
_TABLE_NAMES = (*_PART_NAMES, "hedging")


class Defence(ImmutableValue):
    """A policy or hedging, with the arguments of its breaker, budget and limiter."""

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
            msg = "a call has a policy or hedging, not both: leave one out"
            raise ConfigurationError(msg)
        tables = {"breaker": breaker, "budget": budget, "limiter": limiter}
        copies = (_copy_table(name, table) for name, table in tables.items())
        self._set_fields(Policy() if policy is None else policy, hedging, *copies)
        self.downstream(name="check")  # so that a bad argument is rejected here and not later

    def downstream(self, name: str) -> Downstream:
        """Return a new downstream with a new breaker, budget and limiter."""
        return Downstream(name, **{part: _build(part, getattr(self, part)) for part in _PART_NAMES})

    def to_dict(self) -> dict[str, Any]:
        """Return the defence as a dict of JSON and TOML types."""
        plain: dict[str, Any] = {} if self.hedging is not None else self.policy.to_dict()
        values = self._asdict()
        plain |= {name: values[name] for name in _PART_NAMES if values[name] is not None}
        if self.hedging is not None:
            hedging = self.hedging
            fields = {field: getattr(hedging, field) for field in signature(Hedging).parameters}
            plain["hedging"] = {name: value for name, value in fields.items() if value is not None}
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a defence from the result of `to_dict`; `preset` can name a base policy."""
        tables = {name: _check_table(name, data[name]) for name in _TABLE_NAMES if name in data}
        fields = {name: value for name, value in data.items() if name not in _TABLE_NAMES}
        policy: Policy | None = None
        if fields:
            preset = fields.pop("preset", "default")
            policy = Policy.from_dict(Policy.preset(preset).to_dict() | fields)
        hedging = _build("hedging", tables.pop("hedging", None))
        return cls(policy, hedging=hedging, **tables)

    def _asdict(self) -> dict[str, Any]:
        """Return the arguments of the constructor, used for comparison, repr and pickling.

        Tables become plain dicts, because a mapping proxy cannot be pickled. With hedging the
        policy is None, because only one of the two can be passed.
        """
        values = super()._asdict()
        if self.hedging is not None:
            values["policy"] = None
        return values | {
            part: dict(values[part]) for part in _PART_NAMES if values[part] is not None
        }

    def __hash__(self) -> int:
        tables = (getattr(self, name) for name in _PART_NAMES)
        parts = (None if table is None else frozenset(table.items()) for table in tables)
        return hash((type(self), self.policy, self.hedging, *parts))


def part_arguments(defence: Defence, part_name: str) -> dict[str, Any] | None:
    """Return all arguments of a breaker, budget or limiter, or None if the defence has none.

    Missing arguments have their default values.
    """
    arguments: Mapping[str, Any] | None = getattr(defence, part_name)
    if arguments is None:
        return None
    factory, values = _factory_and_arguments(part_name, arguments)
    parameters = signature(factory).parameters
    return {name: parameter.default for name, parameter in parameters.items()} | values


def _build(table_name: str, arguments: Mapping[str, Any] | None) -> Any:
    """Build a breaker, budget, limiter or hedging from its table; None without a table."""
    if arguments is None:
        return None
    factory, values = _factory_and_arguments(table_name, arguments)
    parameters = signature(factory).parameters
    for name in values:
        if name not in parameters:
            msg = f"{table_name} has no field {name!r}; {did_you_mean(name, parameters)}"
            raise ConfigurationError(msg)
    for name, parameter in parameters.items():
        if parameter.default is Parameter.empty and name not in values:
            msg = f"{table_name} needs the field {name!r}"
            raise ConfigurationError(msg)
    return factory(**values)


def _factory_and_arguments(
    table_name: str, arguments: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class that a table configures, and the arguments in the table."""
    values = dict(arguments)
    if table_name not in _KINDS:
        return Breaker if table_name == "breaker" else Hedging, values
    kind = values.pop("kind", None)
    check_one_of(f"{table_name}.kind", kind, _KINDS[table_name])
    return _KINDS[table_name][kind], values


def _copy_table(name: str, arguments: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a read-only copy of a table, so that later changes by the caller have no effect.

    A shallow copy is enough, because every argument is a number or a name.
    """
    return None if arguments is None else MappingProxyType(dict(_check_table(name, arguments)))


def _check_table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(name, "must be a table of its arguments", value)
    return cast("Mapping[str, Any]", value)
