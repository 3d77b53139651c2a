"""What another system cannot say: told, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from tarry.wire.defence import Defence

_MOST_SHOWN = 8


class Loss(NamedTuple):
    """One setting that does not arrive as it was: its name, its value, what happens instead."""

    field: str
    value: object
    instead: str

    def __str__(self) -> str:
        return f"{self.field} = {shown(self.value)}: {self.instead}"


class Exported(NamedTuple):
    """The documents of another system, as plain values, and what they do not say."""

    documents: tuple[dict[str, Any], ...]
    losses: tuple[Loss, ...]


class Imported(NamedTuple):
    """What a document of another system comes to here, and what it says besides."""

    defence: Defence
    losses: tuple[Loss, ...]


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
