"""What another system cannot say: told, never dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.policy import Policy

if TYPE_CHECKING:
    from tarry.policyfile.defence import Defence

_MOST_SHOWN = 8


class Rank(IntEnum):
    """How much a loss matters; those that matter most are told first."""

    ALARM = 0
    """What arrives is another policy."""
    SENT = 1
    """Whether and how often something is sent."""
    TIMED = 2
    """When it is sent, and for how long it may take."""
    DETAIL = 3
    """What few would notice: roundings, and what comes from a default."""


class Loss(NamedTuple):
    """One setting that does not arrive as it was: its name, its value, what happens instead."""

    field: str
    value: object
    instead: str
    rank: Rank = Rank.TIMED

    def __str__(self) -> str:
        return f"{self.field} = {shown(self.value)}: {self.instead}"


class Exported(NamedTuple):
    """The documents of another system, as plain values, and what they do not say, by rank."""

    documents: tuple[dict[str, Any], ...]
    losses: tuple[Loss, ...]


class Imported(NamedTuple):
    """What a document of another system comes to here, and what it says besides."""

    defence: Defence
    losses: tuple[Loss, ...]
    read: tuple[str, ...] = ()
    """The fields of the policy that the document speaks about."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain form of the defence, without defaults that nobody has spoken about."""
        defaults = Policy().to_dict()
        return {
            name: value
            for name, value in self.defence.to_dict().items()
            if name in self.read or value != defaults.get(name)
        }


def ranked(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """Return what matters most first; equals stay in their order."""
    return tuple(sorted(losses, key=lambda loss: loss.rank))


def shown(value: object) -> str:
    """Return a value as a person would write it into a policy file, on one short line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (set, frozenset)):
        return _listed(sorted(map(str, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return _listed(list(map(shown, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return _listed([f"{name} {_within(item)}" for name, item in items])
    return "a function" if callable(value) else str(value)


def _within(value: object) -> str:
    return "{...}" if isinstance(value, Mapping) else shown(value)


def _listed(words: list[str]) -> str:
    if len(words) > _MOST_SHOWN:
        words = [*words[:_MOST_SHOWN], f"and {len(words) - _MOST_SHOWN} more"]
    return ", ".join(words) or "nothing"
