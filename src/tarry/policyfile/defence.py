"""A policy together with what stands around it, as one file can say it.

    max_attempts = 4            # the policy's own fields, or preset = "interactive"
    [breaker]                   # the arguments of tarry.Breaker
    [budget]                    # kind = "token", "ratio" or "throttle", and its arguments
    [limiter]                   # kind = "in-flight", "aimd" or "adaptive", and its arguments
    [hedging]                   # instead of the policy's fields: a call is retried or hedged

A breaker or a budget has a state, so this holds their arguments and makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.checks import check_one_of
from tarry.core.downstream import Downstream
from tarry.core.hedging import Hedging
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.policy import PRESETS, Policy
from tarry.core.value import Value
from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from typing import Self

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
_PARTS = ("breaker", "budget", "limiter")
_TABLES = (*_PARTS, "hedging")


class Defence(Value):
    """A policy or a hedging, and the arguments of the breaker, budget and limiter beside it."""

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
            msg = "a call has a policy or a hedging, never both: leave one out"
            raise ConfigurationError(msg)
        self._set(
            policy=Policy() if policy is None else policy,
            hedging=hedging,
            breaker=_kept("breaker", breaker),
            budget=_kept("budget", budget),
            limiter=_kept("limiter", limiter),
        )
        self.downstream("check")  # so that a bad argument is refused here and not in the run

    def downstream(self, name: str) -> Downstream:
        """Make a dependency with a fresh state."""
        return Downstream(
            name,
            breaker=None if self.breaker is None else made("breaker", Breaker, self.breaker),
            budget=None if self.budget is None else _of_kind("budget", BUDGETS, self.budget),
            limiter=None if self.limiter is None else _of_kind("limiter", LIMITERS, self.limiter),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON and TOML can hold."""
        plain: dict[str, Any] = {} if self.hedging is not None else self.policy.to_dict()
        given = self._asdict()
        plain |= {name: given[name] for name in _PARTS if given[name] is not None}
        if self.hedging is not None:
            hedging = self.hedging
            values = {field: getattr(hedging, field) for field in signature(Hedging).parameters}
            plain["hedging"] = {name: value for name, value in values.items() if value is not None}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Build from what `to_dict` gave; `preset` names the policy to start from."""
        tables = {name: _table(name, plain[name]) for name in _TABLES if name in plain}
        fields = {name: value for name, value in plain.items() if name not in _TABLES}
        policy: Policy | None = None
        if fields:
            preset = fields.pop("preset", "default")
            check_one_of("preset", preset, PRESETS)
            policy = Policy.from_dict(Policy.preset(preset).to_dict() | fields)
        hedging = tables.get("hedging")
        return cls(
            policy,
            hedging=None if hedging is None else made("hedging", Hedging, hedging),
            breaker=tables.get("breaker"),
            budget=tables.get("budget"),
            limiter=tables.get("limiter"),
        )

    def _asdict(self) -> dict[str, Any]:
        """Return the arguments that make an equal one, tables as plain dicts.

        Equality, the text form and pickling go by these. A view of a dict cannot be pickled, and
        the policy beside a hedging is none that was given.
        """
        given = super()._asdict()
        if self.hedging is not None:
            given["policy"] = None
        return given | {name: dict(given[name]) for name in _PARTS if given[name] is not None}

    def __hash__(self) -> int:
        tables = (getattr(self, name) for name in _PARTS)
        parts = (None if table is None else frozenset(table.items()) for table in tables)
        return hash((type(self), self.policy, self.hedging, *parts))


def made(table: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a class with the arguments of a table, and refuse what it does not know."""
    known = [name for name in signature(make).parameters if name != "kind"]
    for name in arguments:
        if name not in known:
            msg = f"{table} has no field {name!r}; it has {', '.join(known)}"
            raise ConfigurationError(msg)
    for name, one in signature(make).parameters.items():
        if one.default is Parameter.empty and name not in arguments:
            msg = f"{table} needs the field {name!r}"
            raise ConfigurationError(msg)
    return make(**arguments)


def _of_kind(
    table: str, kinds: Mapping[str, Callable[..., Any]], arguments: Mapping[str, Any]
) -> Any:
    kind = arguments.get("kind")
    check_one_of(f"{table}.kind", kind, kinds)
    rest = {name: value for name, value in arguments.items() if name != "kind"}
    return made(table, kinds[cast("str", kind)], rest)


def _kept(name: str, arguments: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Copy the arguments: what the caller does to its dict later is no change of a defence.

    One level is enough, because each argument is a number or a name: no class takes a list.
    """
    return None if arguments is None else MappingProxyType(dict(_table(name, arguments)))


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(name, "must be a table of its arguments", value)
    return cast("Mapping[str, Any]", value)
