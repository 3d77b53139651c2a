"""Losses: settings that cannot be translated to or from another system.

Every loss is reported to the user; none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.policy import Policy

if TYPE_CHECKING:
    from tarry.policyfile.defence import Defence

_MAX_LISTED = 8


class Severity(IntEnum):
    """How serious a loss is; the most serious losses are reported first."""

    CRITICAL = 0
    """The translation is a different policy."""
    LOAD = 1
    """Changes whether and how often requests are sent."""
    TIMING = 2
    """Changes when requests are sent and how long they can take."""
    DETAIL = 3
    """Small differences: rounding, and effects of default values."""


class Loss(NamedTuple):
    """A setting that cannot be translated: its name, its value and what happens instead."""

    field: str
    value: object
    instead: str
    severity: Severity = Severity.TIMING

    def __str__(self) -> str:
        return f"{self.field} = {format_value(self.value)}: {self.instead}"


class Exported(NamedTuple):
    """The documents for another system, as plain values, and the losses by severity."""

    documents: tuple[dict[str, Any], ...]
    losses: tuple[Loss, ...]


class Imported(NamedTuple):
    """The defence from a document of another system, and the losses."""

    defence: Defence
    losses: tuple[Loss, ...]
    fields_set: tuple[str, ...] = ()
    """The fields of the policy that the document sets."""

    def to_dict(self) -> dict[str, Any]:
        """Return the defence as a dict, without defaults that the document does not set."""
        defaults = Policy().to_dict()
        return {
            name: value
            for name, value in self.defence.to_dict().items()
            if name in self.fields_set or value != defaults.get(name)
        }


def sort_losses(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """Return the losses, the most serious first; equally serious losses keep their order."""
    return tuple(sorted(losses, key=lambda loss: loss.severity))


def format_value(value: object) -> str:
    """Return a value as short text, as in a policy file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (set, frozenset)):
        return _join(sorted(map(str, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return _join(list(map(format_value, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return _join([f"{name} {_format_nested(item)}" for name, item in items])
    return "a function" if callable(value) else str(value)


def _format_nested(value: object) -> str:
    return "{...}" if isinstance(value, Mapping) else format_value(value)


def _join(words: list[str]) -> str:
    if len(words) > _MAX_LISTED:
        words = [*words[:_MAX_LISTED], f"and {len(words) - _MAX_LISTED} more"]
    return ", ".join(words) or "nothing"
