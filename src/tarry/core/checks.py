"""Rules for arguments. Each refusal names the field, the rule and the value that broke it."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable


def shown(value: object) -> str:
    """Return a value as text, also a number too long for Python to print."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def short(value: object, most: int = 60) -> str:
    """Return a value from outside as text that fits into a message."""
    text = shown(value)
    return text if len(text) <= most else f"{text[:most]}..."


def number(field: str, value: object) -> float:
    """Any finite number, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{field} must be a number, got {shown(value)}"
        raise ConfigurationTypeError(msg)
    try:
        result = float(value)
    except OverflowError:
        result = float("inf")
    if not isfinite(result):
        msg = f"{field} must be finite, got {shown(value)}"
        raise ConfigurationError(msg)
    return result


def positive(field: str, value: object) -> float:
    """A finite number above zero."""
    result = number(field, value)
    if result <= 0:
        msg = f"{field} must be greater than 0, got {shown(value)}"
        raise ConfigurationError(msg)
    return result


def at_least(field: str, value: object, floor: float) -> float:
    """A finite number that is not below `floor`."""
    result = number(field, value)
    if result < floor:
        msg = f"{field} must be at least {floor:g}, got {shown(value)}"
        raise ConfigurationError(msg)
    return result


def share(field: str, value: object) -> float:
    """A part of a whole: above 0, at most 1."""
    result = number(field, value)
    if not 0 < result <= 1:
        msg = f"{field} must be greater than 0 and at most 1, got {shown(value)}"
        raise ConfigurationError(msg)
    return result


def count(field: str, value: object, floor: int = 1) -> int:
    """A whole number that is not below `floor`."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{field} must be a whole number, got {shown(value)}"
        raise ConfigurationTypeError(msg)
    if value < floor:
        msg = f"{field} must be at least {floor}, got {shown(value)}"
        raise ConfigurationError(msg)
    return value


def one_of(field: str, value: object, known: Iterable[str]) -> None:
    """A name from a known list."""
    names = sorted(known)
    if value not in names:
        msg = f"{field} must be one of {', '.join(names)}, got {shown(value)}"
        raise ConfigurationError(msg)


def seconds_or_none(said: object) -> float | None:
    """Return what a server asked for; what is no length of time is ignored, never an error."""
    return said if isinstance(said, (int, float)) and 0 <= said < inf else None
