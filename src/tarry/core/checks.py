"""Checks for arguments. Each raises ConfigurationError with the field, the rule and the value."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_number(field: str, value: object) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationTypeError(field, "must be a number", value)
    try:
        result = float(value)
    except OverflowError:
        result = float("inf")
    if not isfinite(result):
        raise ConfigurationError(field, "must be finite", value)
    return result


def check_positive(field: str, value: object) -> float:
    """Return a finite number greater than 0."""
    result = check_number(field, value)
    if result <= 0:
        raise ConfigurationError(field, "must be greater than 0", value)
    return result


def check_at_least(field: str, value: object, minimum: float) -> float:
    """Return a finite number that is at least `minimum`."""
    result = check_number(field, value)
    if result < minimum:
        raise ConfigurationError(field, f"must be at least {minimum:g}", value)
    return result


def check_share(field: str, value: object) -> float:
    """Return a fraction: greater than 0, at most 1."""
    result = check_number(field, value)
    if not 0 < result <= 1:
        raise ConfigurationError(field, "must be greater than 0 and at most 1", value)
    return result


def check_count(field: str, value: object, minimum: int = 1) -> int:
    """Return a whole number that is at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationTypeError(field, "must be a whole number", value)
    if value < minimum:
        raise ConfigurationError(field, f"must be at least {minimum}", value)
    return value


def check_one_of(field: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigurationError unless the value is one of the known names."""
    names = sorted(known)
    if value not in names:
        raise ConfigurationError(field, f"must be one of {', '.join(names)}", value)


def duration_or_none(value: object) -> float | None:
    """Return seconds that a server sent, or None when the value is not a valid duration."""
    return value if isinstance(value, (int, float)) and 0 <= value < inf else None
