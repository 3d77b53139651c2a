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
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.checks import one_of
from tarry.core.downstream import Downstream
from tarry.core.hedging import Hedging
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.policy import Policy
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
_TABLES = ("breaker", "budget", "limiter", "hedging")


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
            breaker=breaker,
            budget=budget,
            limiter=limiter,
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
        for name in ("breaker", "budget", "limiter"):
            arguments = getattr(self, name)
            if arguments is not None:
                plain[name] = dict(arguments)
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
            base = Policy.preset(preset).to_dict() if isinstance(preset, str) else {}
            one_of("preset", preset, ("default", "interactive", "webhook", "patient"))
            policy = Policy.from_dict(base | fields)
        hedging = tables.get("hedging")
        return cls(
            policy,
            hedging=None if hedging is None else made("hedging", Hedging, hedging),
            breaker=tables.get("breaker"),
            budget=tables.get("budget"),
            limiter=tables.get("limiter"),
        )


def made(table: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a class with the arguments of a table, and refuse what it does not know."""
    known = [name for name in signature(make).parameters if name != "kind"]
    for name in arguments:
        if name not in known:
            msg = f"{table} has no field {name!r}; it has {', '.join(known)}"
            raise ConfigurationError(msg)
    return make(**arguments)


def _of_kind(
    table: str, kinds: Mapping[str, Callable[..., Any]], arguments: Mapping[str, Any]
) -> Any:
    kind = arguments.get("kind")
    one_of(f"{table}.kind", kind, kinds)
    rest = {name: value for name, value in arguments.items() if name != "kind"}
    return made(table, kinds[cast("str", kind)], rest)


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        msg = f"{name} must be a table of its arguments, got {value!r}"
        raise ConfigurationTypeError(msg)
    return cast("Mapping[str, Any]", value)
