"""Rules for arguments. Each refusal names the field, the rule and the value that broke it."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_number(field: str, value: object) -> float:
    """Any finite number, as a float."""
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
    """A finite number above zero."""
    result = check_number(field, value)
    if result <= 0:
        raise ConfigurationError(field, "must be greater than 0", value)
    return result


def check_at_least(field: str, value: object, floor: float) -> float:
    """A finite number that is not below `floor`."""
    result = check_number(field, value)
    if result < floor:
        raise ConfigurationError(field, f"must be at least {floor:g}", value)
    return result


def check_share(field: str, value: object) -> float:
    """A part of a whole: above 0, at most 1."""
    result = check_number(field, value)
    if not 0 < result <= 1:
        raise ConfigurationError(field, "must be greater than 0 and at most 1", value)
    return result


def check_count(field: str, value: object, floor: int = 1) -> int:
    """A whole number that is not below `floor`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationTypeError(field, "must be a whole number", value)
    if value < floor:
        raise ConfigurationError(field, f"must be at least {floor}", value)
    return value


def check_one_of(field: str, value: object, known: Iterable[str]) -> None:
    """A name from a known list."""
    names = sorted(known)
    if value not in names:
        raise ConfigurationError(field, f"must be one of {', '.join(names)}", value)


def duration_or_none(said: object) -> float | None:
    """Return what a server asked for; what is no length of time is ignored, never an error."""
    return said if isinstance(said, (int, float)) and 0 <= said < inf else None
